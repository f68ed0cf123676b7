"""Render the demo data set, image-caption pairs and a zero-shot set, from a seed.

    FOLDER/train/00000.tar, ...        img2dataset layout: 000000000.jpg/.json/.txt, 1,000 pairs a shard
    FOLDER/val/00000.tar, ...          held-out pairs
    FOLDER/zero_shot/                  CLIP_benchmark's webdataset layout; a class is a colour and a shape

A pair is a pure function of (seed, split, index): the number of processes does not matter, a smaller set is the
beginning of a larger one, and equal versions of Pillow give equal files. A given share of the pairs of a split are
near-duplicates: the scene of an earlier pair, drawn anew and captioned by another template. They stand for the false
negatives of scraped data.

The splits draw their scenes from independent random streams. Nothing is filtered: a scene of `val` may by chance have
the description of one in `train` (common for single groups, else rare), but never the same pixels.
"""

import io
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from PIL import Image

from neuclip_ds.data.atomic_write import new_folder
from neuclip_ds.data.children import process_pool
from neuclip_ds.data.demo_scenes import COLOURS, SHAPES, TEMPLATES, Scene, describe, random_scene, render, single_object
from neuclip_ds.errors import UserError

SPLITS = ("train", "val", "zero_shot")
CLASSES = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
CLASS_TEMPLATES = (
    "one {c}",
    "a single {c}",
    "a picture of one {c}",
    "an image of a single {c}",
    "a small {c}",
    "a large {c}",
    "this drawing shows one {c}",
)
PAIRS_PER_SHARD = 1000
JPEG_QUALITY = 90

Sample = dict[str, Any]


class _Shard(NamedTuple):
    path: Path
    indices: range
    sample: Callable[[int], Sample]  # by index; can be pickled


class _PairSpec(NamedTuple):
    """What a pair shows, before anything is drawn."""

    scene: Scene
    template: int
    original: int | None  # index of the pair of which this is a near-duplicate
    rng: Random  # for all later choices


def make_demo_data(
    folder: Path,
    *,
    pairs: int = 20_000,
    held_out: int = 1_000,
    zero_shot: int = 2_000,
    size: int = 64,
    duplicate_share: float = 0.05,
    seed: int = 0,
    processes: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the three splits to FOLDER.*.partial and rename it, so that `folder` is complete or absent.

    Processes are spawned, so a script must call this under `if __name__ == "__main__"`, or with one process.

    Args:
        folder: must be absent or empty.
        pairs, held_out: number of image-caption pairs in `train` and in `val`.
        zero_shot: number of labelled images; class counts differ by one at most.
        size: side of the images in pixels.
        duplicate_share: probability that a pair is a near-duplicate.
        seed: seed of all random choices.
        processes: by default the number of cores; 1 renders in this process.
        on_progress: called with (images done, total images) after each shard.

    Raises:
        UserError: `folder` is not empty or cannot be written, or a number is out of range.
    """
    processes = (os.cpu_count() or 1) if processes is None else processes
    _check_numbers(size, duplicate_share, pairs=pairs, held_out=held_out, zero_shot=zero_shot, processes=processes)
    with new_folder(folder) as temporary:
        _write_class_files(temporary / "zero_shot")
        labelled = partial(_labelled_image, seed, size)
        shards = [_Shard(temporary / "zero_shot" / "test" / "0.tar", range(zero_shot), labelled)]
        for split, count in (("train", pairs), ("val", held_out)):
            shards += _pair_shards(temporary / split, count, partial(_pair, seed, split, duplicate_share, size))
        total, done = sum(len(shard.indices) for shard in shards), 0
        for written in _written(shards, min(processes, len(shards))):
            done += written
            on_progress(done, total)


def demo_split(source: str, cache: Path) -> Path:
    """Return the folder of `demo:train`, `demo:val` or `demo:zero_shot`; render the data set if `cache` lacks it.

    Processes may race: each renders separately, and all use the files of the first one to finish.

    Raises:
        UserError: no split has that name, or `cache` cannot be written.
    """
    _, _, split = source.partition(":")
    if split not in SPLITS or source != f"demo:{split}":
        raise UserError(f"'{source}' is no demo split; choose {', '.join(f'demo:{name}' for name in SPLITS)}.")
    folder = cache / "demo"
    if not (folder / split).is_dir():
        try:
            make_demo_data(folder)
        except UserError:
            if not (folder / split).is_dir():  # else another process was faster
                raise
    return folder / split


def _check_numbers(size: int, duplicate_share: float, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name}={count} is out of range; it must be at least 1.")
    if not 16 <= size <= 1024:
        raise UserError(f"size={size} is out of range; demo images have a side of 16 to 1024 pixels.")
    if not 0 <= duplicate_share < 1:
        raise UserError(f"duplicate_share={duplicate_share} is out of range; it must be at least 0 and below 1.")


def _write_class_files(folder: Path) -> None:
    (folder / "test").mkdir(parents=True)
    names = [f"{colour} {shape}" for colour, shape in CLASSES]
    (folder / "classnames.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(CLASS_TEMPLATES) + "\n", encoding="utf-8")
    (folder / "test" / "nshards.txt").write_text("1\n", encoding="utf-8")


def _pair_shards(folder: Path, count: int, sample: Callable[[int], Sample]) -> Iterator[_Shard]:
    folder.mkdir()
    for number, first in enumerate(range(0, count, PAIRS_PER_SHARD)):
        indices = range(first, min(first + PAIRS_PER_SHARD, count))
        yield _Shard(folder / f"{number:05d}.tar", indices, sample)


def _written(shards: list[_Shard], processes: int) -> Iterator[int]:
    if processes == 1:
        yield from map(_write_shard, shards)
        return
    # spawned, not forked: the caller may have threads (torch's, for instance), which break under fork
    with process_pool(processes, "spawn") as pool:
        yield from pool.map(_write_shard, shards)


def _write_shard(shard: _Shard) -> int:
    from webdataset import TarWriter  # imports torch, which takes seconds

    # fixed time and owner: equal samples give equal files
    with (
        shard.path.open("wb") as file,
        TarWriter(file, user="demo", group="demo", mode=0o644, mtime=0, encoder=False) as writer,
    ):
        for index in shard.indices:
            writer.write(shard.sample(index))
    return len(shard.indices)


def _stream(seed: int, split: str, index: int) -> Random:
    return Random(f"{seed}/{split}/{index}")  # a string is seeded by its SHA-512, the same on every platform


def _pair_spec(seed: int, split: str, duplicate_share: float, index: int) -> _PairSpec:
    rng = _stream(seed, split, index)
    if index == 0 or rng.random() >= duplicate_share:
        return _PairSpec(random_scene(rng), rng.randrange(len(TEMPLATES)), None, rng)
    earlier = rng.randrange(index)
    source = _pair_spec(seed, split, duplicate_share, earlier)
    original = earlier if source.original is None else source.original
    first_template = _pair_spec(seed, split, duplicate_share, original).template
    template = (first_template + rng.randrange(1, len(TEMPLATES))) % len(TEMPLATES)
    return _PairSpec(source.scene, template, original, rng)


def _pair(seed: int, split: str, duplicate_share: float, size: int, index: int) -> Sample:
    spec = _pair_spec(seed, split, duplicate_share, index)
    caption = describe(spec.scene, spec.template, spec.rng)
    metadata = {
        "key": _key(index),
        "caption": caption,
        "width": size,
        "height": size,
        "objects": [group._asdict() for group in spec.scene.groups],
        "background": spec.scene.background,
        "near_duplicate_of": None if spec.original is None else _key(spec.original),
    }
    return {
        "__key__": _key(index),
        "jpg": _jpeg(render(spec.scene, size, spec.rng)),
        "json": json.dumps(metadata).encode(),
        "txt": caption.encode(),
    }


def _labelled_image(seed: int, size: int, index: int) -> Sample:
    rng = _stream(seed, "zero_shot", index)
    label = index % len(CLASSES)
    colour, shape = CLASSES[label]
    image = render(single_object(rng, shape, colour), size, rng)
    return {"__key__": f"s{index:07d}", "jpg": _jpeg(image), "cls": str(label).encode()}


def _key(index: int) -> str:
    """Return the shard number and the position in it, as img2dataset numbers its samples."""
    shard, position = divmod(index, PAIRS_PER_SHARD)
    return f"{shard:05d}{position:04d}"


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY, subsampling=0)  # full colour resolution: the shapes are small
    return file.getvalue()
