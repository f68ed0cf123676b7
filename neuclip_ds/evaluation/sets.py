"""Open an evaluation set in any form: webdataset shards, a folder of images by class, a table of pairs."""

from pathlib import Path

from neuclip_ds.data.pair_table import TABLES
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.folder import LAYOUT, EvaluationFolder, EvaluationSet
from neuclip_ds.evaluation.image_folder import ImageFolder, is_image_folder
from neuclip_ds.evaluation.pair_file import PairFile

FORMS = f"{LAYOUT}; or a folder has a folder of images for each class; or a file ({', '.join(TABLES)}) has pairs"


def is_set(path: Path) -> bool:
    """Whether a path is a set itself, and not a folder of sets."""
    if path.is_file():
        return path.suffix.lower() in TABLES
    return path.is_dir() and ((path / "test" / "nshards.txt").is_file() or is_image_folder(path))


def open_set(path: Path) -> EvaluationSet:
    """Open a set; raise UserError if it is none, or a file is missing or malformed."""
    if path.is_file():
        return PairFile.read(path)
    if not path.is_dir():
        raise UserError(f"{path} does not exist; name an evaluation set: {FORMS}.")
    has_shards = (path / "test" / "nshards.txt").is_file() or not is_image_folder(path)
    return EvaluationFolder.read(path) if has_shards else ImageFolder.read(path)


def open_captioned(path: Path) -> EvaluationSet:
    """Open a retrieval set; raise UserError if it is none."""
    found = open_set(path)
    if found.kind != "retrieval":
        raise UserError(f"{path} is a {found.kind} set, not a retrieval set; write retrieval to its dataset_type.txt.")
    return found
