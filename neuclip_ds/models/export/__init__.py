"""Export trained models to the files of other libraries: `transformers`, `open_clip` and, in onnx.py, ONNX.

`CONVERTERS` convert a package of one family to another format, and `WRITERS` write it. ONNX takes any model as it is.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from neuclip_ds.errors import UserError
from neuclip_ds.models.export import convert
from neuclip_ds.models.export.write import write_open_clip, write_transformers
from neuclip_ds.models.pretrained.base import Package

WRITERS: dict[str, Callable[[Package, Path], None]] = {"transformers": write_transformers, "open_clip": write_open_clip}

CONVERTERS: dict[tuple[str, str], Callable[[Package], Package]] = {
    ("transformers", "open_clip"): convert.clip_to_open_clip,
    ("open_clip", "transformers"): convert.open_clip_to_clip,
    ("timm", "transformers"): convert.timm_to_clip,
    ("timm", "open_clip"): convert.timm_to_open_clip,
}


def export(package: Package, form: str, folder: Path, card: str) -> None:
    """Write a model into a new folder.

    Args:
        package: the model in its family's form.
        form: a key of WRITERS.
        folder: absent or empty.
        card: text of the model card.

    Raises:
        UserError: the format cannot express the model, or the folder is not empty.
    """
    with new_folder(folder) as partial:
        converted = package if package.family == form else CONVERTERS[package.family, form](package)
        WRITERS[form](converted, partial)
        (partial / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder to write in, which takes the name `folder` once it is complete and vanishes on an error.

    Raises:
        UserError: `folder` is not empty.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; name a new folder with --out.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        partial = Path(temporary) / folder.name
        partial.mkdir()
        yield partial
        partial.rename(folder)
