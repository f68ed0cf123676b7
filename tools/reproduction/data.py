"""Shrunken copies of image-caption shards, so that a study is not spent on decoding."""

import io
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import webdataset
from PIL import Image

from neuclip_ds.errors import UserError
from neuclip_ds.files import new_folder

SIDE = 40  # pixels of the shorter side, for crops of 32


def prepare(source: Path, folder: Path, validation: int, test: int, pairs: int | None = None, side: int = SIDE) -> None:
    """Write FOLDER/{train,train_tenth,validation,test}; the last pairs of the source are held out.

    Images get `side` pixels on the shorter side; `pairs` limits those for training.

    If the source has a folder `val` next to it, that is the test set.

    Raises:
        UserError: the source has too few pairs.
    """
    if (folder / "done").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    found = list(shrunken(source, side))
    beside = source.parent / "val"
    if beside.is_dir():
        held_out = list(shrunken(beside, side))[:test]
    else:
        held_out = [found.pop() for _ in range(min(test, len(found)))]
    checked = [found.pop() for _ in range(min(validation, len(found)))]
    found = found[:pairs]
    if len(found) < 1000:
        raise UserError(f"{source} leaves only {len(found)} pairs for training; a comparison needs at least 1000.")
    splits = {"train": found, "train_tenth": found[: len(found) // 10], "validation": checked, "test": held_out}
    for name, content in splits.items():
        write_shards(content, folder / name)
    (folder / "done").touch()


def write_shards(pairs: Iterable[Mapping[str, bytes]], folder: Path) -> None:
    """Write pairs to tar files of 500; the folder is complete or absent."""
    with (
        new_folder(folder) as unfinished,
        webdataset.ShardWriter(str(unfinished / "%05d.tar"), maxcount=500, verbose=0) as writer,
    ):
        for number, pair in enumerate(pairs):
            writer.write({"__key__": f"{number:09d}", **pair})


def shrunken(source: Path, side: int = SIDE) -> Iterator[dict[str, bytes]]:
    """Yield jpg, txt and, where there is one, json of every pair with a caption in a folder of shards."""
    shards = sorted(str(path) for path in source.glob("*.tar"))
    if not shards:
        raise UserError(f"{source} holds no tar files; name a folder of image-caption shards.")
    for sample in webdataset.WebDataset(shards, shardshuffle=False, empty_check=False):
        if "jpg" in sample and sample.get("txt", b"").strip():
            captions = {name: sample[name] for name in ("txt", "json") if name in sample}
            yield {"jpg": _shrink(sample["jpg"], side), **captions}


def _shrink(encoded: bytes, side: int) -> bytes:
    image: Any = Image.open(io.BytesIO(encoded)).convert("RGB")
    factor = side / min(image.size)
    if factor < 1:
        image = image.resize([max(side, round(length * factor)) for length in image.size], Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()
