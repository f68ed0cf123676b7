"""Render the demo dataset from a seed: image-caption pairs and a zero-shot set, both of colored shapes.

    FOLDER/train/00000.tar, ...        img2dataset layout: 000000000.jpg/.json/.txt, 1,000 pairs per shard
    FOLDER/val/00000.tar, ...          held-out pairs
    FOLDER/zero_shot/                  CLIP_benchmark's webdataset layout; each class is a color and a shape

Each pair is a pure function of (seed, split, size, index). The number of processes therefore does not matter, a smaller
set contains the first pairs of a larger one, and the same version of Pillow gives the same files. About one pair in
twenty is a near-duplicate, like the false negatives in scraped data: its image shows the scene of an earlier pair, and
its caption uses a different template. By chance, a `val` pair may have the same caption as a `train` pair, but its
image differs.
"""

import hashlib
import io
import json
import logging
import math
import os
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

from neuclip_ds.data.children import map_in_processes
from neuclip_ds.errors import UserError
from neuclip_ds.files import explain_disk, new_folder

log = logging.getLogger(__name__)

Point = tuple[float, float]
Rgb = tuple[int, int, int]
Words = Sequence[str]  # the first word is the canonical one


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of `number` objects that look alike; shape, color, size and place are keys of the tables below."""

    shape: str
    color: str
    size: str
    number: int
    place: str
    offset: float  # shift of the center across the row of groups, as a fraction of the image side; captions omit it


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A scene of one to three groups of objects on a background, which is a key of BACKGROUNDS."""

    groups: tuple[Group, ...]
    background: str


@dataclass(frozen=True, kw_only=True)
class PairPlan:
    """The random choices that determine a pair's image and caption."""

    scene: Scene
    template: int  # index into TEMPLATES
    original: int | None  # index of the pair that this one nearly duplicates
    rng: Random  # for all further choices


def _arc(radius: float, points: int = 40) -> tuple[Point, ...]:
    """Return points on a circle, starting and ending at the top."""
    angles = (2 * math.pi * i / points for i in range(points + 1))
    return tuple((radius * math.sin(a), -radius * math.cos(a)) for a in angles)


def _heart() -> tuple[Point, ...]:
    angles = [2 * math.pi * i / 40 for i in range(40)]
    return tuple(
        (math.sin(a) ** 3, -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16 - 0.1)
        for a in angles
    )


def _star() -> tuple[Point, ...]:
    outer = _arc(1.05, 10)
    inner = _arc(0.43, 10)
    return tuple(inner[i] if i % 2 else outer[i] for i in range(10))


_ARM = 0.33
_CROSS = (
    (-_ARM, -1.0),
    (_ARM, -1.0),
    (_ARM, -_ARM),
    (1.0, -_ARM),
    (1.0, _ARM),
    (_ARM, _ARM),
    (_ARM, 1.0),
    (-_ARM, 1.0),
    (-_ARM, _ARM),
    (-1.0, _ARM),
    (-1.0, -_ARM),
    (-_ARM, -_ARM),
)

# outlines are centered at (0, 0) with a radius of about 1; the y axis points down
SHAPES: dict[str, tuple[tuple[Point, ...], Words]] = {
    "circle": (_arc(0.95), ("circle", "disc")),
    "square": (((-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)), ("square", "box")),
    "triangle": (((0.0, -0.95), (0.97, 0.75), (-0.97, 0.75)), ("triangle",)),
    "star": (_star(), ("star", "five-pointed star")),
    "cross": (_CROSS, ("cross", "plus sign")),
    "ring": (_arc(1.0) + _arc(0.55)[::-1], ("ring", "hoop")),
    "diamond": (((0.0, -1.05), (0.7, 0.0), (0.0, 1.05), (-0.7, 0.0)), ("diamond", "rhombus")),
    "heart": (_heart(), ("heart", "heart shape")),
}
_VOCABULARY: Any = yaml.safe_load((Path(__file__).parent / "demo_words.yaml").read_text(encoding="utf-8"))
COLORS: dict[str, tuple[Rgb, Words]] = _VOCABULARY["colors"]
SIZES: dict[str, tuple[float, Words]] = _VOCABULARY["sizes"]  # as fractions of the image side
NUMBERS: dict[int, Words] = _VOCABULARY["numbers"]
PLACES: dict[str, Words] = _VOCABULARY["places"]
BACKGROUNDS: dict[str, tuple[Rgb, Words]] = _VOCABULARY["backgrounds"]
TEMPLATES: list[tuple[str, str]] = _VOCABULARY["templates"]  # with and without the background
CLASS_TEMPLATES: list[str] = _VOCABULARY["class_templates"]
_INK = (195, 195, 195)  # color of the patterns

_POSITIONS = {"left": 1 / 6, "top": 1 / 6, "centre": 1 / 2, "right": 5 / 6, "bottom": 5 / 6}
_ROWS = (("left", "centre", "right"), ("top", "centre", "bottom"))
_MOST_OBJECTS = {1: 4, 2: 3, 3: 2}  # maximum number of objects per group, by the number of groups
_SUPERSAMPLING = 4

SPLITS = ("train", "val", "zero_shot")
CLASSES = tuple((color, shape) for color in COLORS for shape in SHAPES)
PAIRS_PER_SHARD = 1000
_DUPLICATES = 0.05  # probability that a pair is a near-duplicate
_PROGRESS_INTERVAL = 2.0  # seconds between progress lines


def make_demo_data(
    folder: Path,
    *,
    pairs: int = 20_000,
    held_out: int = 1_000,
    zero_shot: int = 2_000,
    size: int = 64,
    seed: int = 0,
    processes: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Render the three splits in a temporary folder, then rename it, so that `folder` is never incomplete.

    Args:
        folder: the folder to create; an empty folder is replaced.
        pairs: the number of training pairs.
        held_out: the number of pairs in `val`.
        zero_shot: the number of zero-shot images, which are balanced across the classes.
        size: the side length of the images in pixels, from 16 to 1024.
        seed: the seed of all random choices.
        processes: the maximum number of processes; by default, one per core. With 1, this process renders all images.
        on_progress: called with (images done, total images).

    Raises:
        UserError: `folder` is not empty or cannot be written, a number is out of range, or a worker process ends early.
    """
    processes = (os.cpu_count() or 1) if processes is None else processes
    for name, count in (("pairs", pairs), ("held_out", held_out), ("zero_shot", zero_shot), ("processes", processes)):
        if count < 1:
            raise UserError(f"{name}={count} is out of range; it must be 1 or more.")
    if not 16 <= size <= 1024:
        raise UserError(f"size={size} is out of range; it must be from 16 to 1024.")
    with new_folder(folder) as temporary:
        # the files of the zero-shot set, apart from its shard
        zero_shot_folder = temporary / "zero_shot"
        (zero_shot_folder / "test").mkdir(parents=True)
        class_names = "".join(f"{color} {shape}\n" for color, shape in CLASSES)
        (zero_shot_folder / "classnames.txt").write_text(class_names)
        (zero_shot_folder / "zeroshot_classification_templates.txt").write_text("\n".join(CLASS_TEMPLATES) + "\n")
        (zero_shot_folder / "test" / "nshards.txt").write_text("1\n")

        # the shards of all splits: path, indices of the samples, and the function that makes a sample
        zero_shot_tar = zero_shot_folder / "test" / "0.tar"
        shards: list[tuple[Path, range, _Sampler]]
        shards = [(zero_shot_tar, range(zero_shot), partial(_labeled_image, seed, size))]
        for split, pairs_of_split in (("train", pairs), ("val", held_out)):
            (temporary / split).mkdir()
            sampler = partial(_pair, seed, split, size)
            for number, first in enumerate(range(0, pairs_of_split, PAIRS_PER_SHARD)):
                indices = range(first, min(first + PAIRS_PER_SHARD, pairs_of_split))
                shards.append((temporary / split / f"{number:05d}.tar", indices, sampler))

        done = 0
        for written in map_in_processes(_write_shard, shards, min(processes, len(shards))):
            done += written
            on_progress(done, pairs + held_out + zero_shot)


def demo_split(source: str, cache: Path) -> Path:
    """Return the folder of `demo:train`, `demo:val` or `demo:zero_shot`; render the dataset if it is not in `cache`.

    If several processes render the dataset at the same time, all of them use the files of the first one to finish.
    Raises UserError if `source` is not the name of a split, if `cache` cannot be written, or if `make_demo_data` raises
    it.
    """
    _, _, split = source.partition(":")
    if split not in SPLITS or source != f"demo:{split}":
        splits = ", ".join(f"demo:{name}" for name in SPLITS)
        raise UserError(f"'{source}' is not a demo split; choose one of {splits}.")
    folder = cache / "demo"
    if not (folder / split).is_dir():
        with explain_disk(cache, "run the command in another folder"):
            cache.mkdir(parents=True, exist_ok=True)
        try:
            log.info("rendering the demo data into %s", folder)
            make_demo_data(folder, on_progress=_progress_log())
        except UserError:
            if not (folder / split).is_dir():  # otherwise, another process was faster
                raise
    return folder / split


def _progress_log() -> Callable[[int, int], None]:
    """Return a function of (images done, total images) that logs the progress at most once every 2 seconds."""
    next_line = time.monotonic() + _PROGRESS_INTERVAL

    def on_progress(done: int, total: int) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            log.info("rendered %d of %d images", done, total)
            next_line = time.monotonic() + _PROGRESS_INTERVAL

    return on_progress


_Sampler = Callable[[int], dict[str, Any]]  # returns the sample at an index; picklable


def _write_shard(shard: tuple[Path, range, _Sampler]) -> int:
    """Write a shard, given as its path, its indices and a function that makes a sample; return the number of samples.

    The standard library writes the tar, because webdataset imports torch, which takes each process seconds.
    """
    path, indices, sample = shard
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for index in indices:
            members = sample(index)
            key = members.pop("__key__")
            for extension, content in sorted(members.items()):
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                # the time (0), the mode and the owner are fixed, so that equal samples give equal files
                member.mode = 0o644
                member.uname = "demo"
                member.gname = "demo"
                tar.addfile(member, io.BytesIO(content))
    return len(indices)


def _stream(seed: int, split: str, index: int) -> Random:
    return Random(f"{seed}/{split}/{index}")  # seeded by the string's SHA-512, which is the same on every platform


def plan_pair(seed: int, split: str, index: int) -> PairPlan:
    """Plan a pair: a new scene or, for one pair in twenty, the scene of an earlier pair with another template."""
    rng = _stream(seed, split, index)
    if index == 0 or rng.random() >= _DUPLICATES:
        scene = random_scene(rng)
        return PairPlan(scene=scene, template=rng.randrange(len(TEMPLATES)), original=None, rng=rng)
    original = rng.randrange(index)
    plan = plan_pair(seed, split, original)
    if plan.original is not None:  # a duplicate of a duplicate
        original = plan.original
        plan = plan_pair(seed, split, original)
    template = (plan.template + rng.randrange(1, len(TEMPLATES))) % len(TEMPLATES)
    return PairPlan(scene=plan.scene, template=template, original=original, rng=rng)


def _pair(seed: int, split: str, size: int, index: int) -> dict[str, Any]:
    plan = plan_pair(seed, split, index)
    caption = describe(plan.scene, plan.template, plan.rng)
    metadata = {
        "key": _key(index),
        "uid": hashlib.md5(f"{seed}/{split}/{index}".encode(), usedforsecurity=False).hexdigest(),
        "caption": caption,
        "width": size,
        "height": size,
        "objects": [asdict(group) for group in plan.scene.groups],
        "background": plan.scene.background,
        "near_duplicate_of": None if plan.original is None else _key(plan.original),
    }
    image = _jpeg(render(plan.scene, size, plan.rng))
    return {"__key__": _key(index), "jpg": image, "json": json.dumps(metadata).encode(), "txt": caption.encode()}


def _labeled_image(seed: int, size: int, index: int) -> dict[str, Any]:
    rng = _stream(seed, "zero_shot", index)
    label = index % len(CLASSES)
    image = render(single_object(rng, *CLASSES[label]), size, rng)
    return {"__key__": f"s{index:07d}", "jpg": _jpeg(image), "cls": str(label).encode()}


def _key(index: int) -> str:
    """Return a sample's key in img2dataset's form: the shard number, followed by the position in the shard."""
    return f"{index // PAIRS_PER_SHARD:05d}{index % PAIRS_PER_SHARD:04d}"


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, subsampling=0)  # full color resolution: the shapes are small
    return file.getvalue()


def random_scene(rng: Random) -> Scene:
    """Return a random scene, in which every group has a different combination of shape and color."""
    count = rng.choices((1, 2, 3), weights=(4, 4, 2))[0]
    row = rng.choice(_ROWS)
    places = sorted(rng.sample(row, count), key=row.index)
    kinds = rng.sample([(shape, color) for shape in SHAPES for color in COLORS], count)
    groups = []
    for (shape, color), place in zip(kinds, places, strict=True):
        groups.append(_random_group(rng, shape, color, place, rng.randint(1, _MOST_OBJECTS[count])))
    return Scene(groups=tuple(groups), background=rng.choice(list(BACKGROUNDS)))


def single_object(rng: Random, color: str, shape: str) -> Scene:
    """Return a scene with one object of the given class; its place, its size and the background are random."""
    group = _random_group(rng, shape, color, rng.choice(list(PLACES)), number=1)
    return Scene(groups=(group,), background=rng.choice(list(BACKGROUNDS)))


def render(scene: Scene, size: int, rng: Random) -> Image.Image:
    """Render a scene as a `size` x `size` RGB image; positions, tilts, shades and pixels vary slightly with `rng`."""
    side = size * _SUPERSAMPLING
    rgb, _ = BACKGROUNDS[scene.background]
    canvas = Image.new("RGB", (side, side), _shade(rgb, rng, 4))
    draw = ImageDraw.Draw(canvas)
    _draw_pattern(draw, scene.background, side, rng)
    sideways = any(group.place in ("left", "right") for group in scene.groups)
    for group in scene.groups:
        _draw_group(draw, group, sideways, side, rng)
    pixels = np.asarray(canvas.reduce(_SUPERSAMPLING), dtype=np.int16)  # (size, size, 3)
    noise = np.frombuffer(rng.randbytes(pixels.size), dtype=np.uint8).reshape(pixels.shape) // 23 - np.int16(5)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def describe(scene: Scene, template: int, rng: Random) -> str:
    """Return a caption from TEMPLATES[template] that names colors, shapes, numbers and, usually, other attributes."""
    with_background, without = TEMPLATES[template]
    form = with_background if rng.random() < 0.6 else without
    place_may_lead = not any(f"{word} {{objects}}" in form for word in ("of", "with"))  # avoid "of at the top a star"
    phrases = [_phrase(group, place_may_lead, rng) for group in scene.groups]
    rng.shuffle(phrases)
    objects = phrases[-1]
    if phrases[:-1]:
        objects = ", ".join(phrases[:-1]) + rng.choice((" and ", " as well as ", " and also ")) + objects
    _, backdrops = BACKGROUNDS[scene.background]
    caption = form.format(objects=objects, background=rng.choice(backdrops))
    return caption[0].upper() + caption[1:] + "." if rng.random() < 0.5 else caption


def _random_group(rng: Random, shape: str, color: str, place: str, number: int) -> Group:
    return Group(
        shape=shape,
        color=color,
        size=rng.choice(list(SIZES)),
        number=number,
        place=place,
        offset=round(rng.uniform(-0.13, 0.13), 3),
    )


def _shade(rgb: Rgb, rng: Random, spread: int) -> Rgb:
    """Return a color whose channels differ from `rgb` by random amounts of up to `spread`."""
    red, green, blue = (min(255, max(0, channel + rng.randint(-spread, spread))) for channel in rgb)
    return red, green, blue


def _draw_pattern(draw: ImageDraw.ImageDraw, background: str, side: int, rng: Random) -> None:
    """Draw the pattern of a background, if it has one."""
    cells = 6
    step = side / cells
    start = -rng.random() * step
    corners = [start + i * step for i in range(cells + 1)]
    if background == "striped":
        for x in corners:
            draw.rectangle((x, 0, x + step / 2, side), fill=_INK)
    elif background == "dotted":
        for x in corners:
            for y in corners:
                draw.ellipse((x + 0.25 * step, y + 0.25 * step, x + 0.75 * step, y + 0.75 * step), fill=_INK)
    elif background == "checkered":
        for column, x in enumerate(corners):
            for y in corners[column % 2 :: 2]:
                draw.rectangle((x, y, x + step, y + step), fill=_INK)


def _draw_group(draw: ImageDraw.ImageDraw, group: Group, sideways: bool, side: int, rng: Random) -> None:
    """Draw a group inside the image: a line of objects perpendicular to the row of groups, or a square of four."""
    mean_diameter, _ = SIZES[group.size]
    diameter = mean_diameter * rng.uniform(0.95, 1.0)
    pitch = 1.05 * diameter
    lanes = 2 if group.number == 4 else 1
    length = group.number // lanes
    along = _inside(_POSITIONS[group.place] + rng.uniform(-0.01, 0.01), (lanes - 1) * pitch + diameter)
    across = _inside(0.5 + group.offset + rng.uniform(-0.03, 0.03), (length - 1) * pitch + diameter)
    mean_rgb, _ = COLORS[group.color]
    rgb = _shade(mean_rgb, rng, 9)
    outline, _ = SHAPES[group.shape]
    for i in range(group.number):
        lane, position = divmod(i, length)
        along_middle = along + (lane - (lanes - 1) / 2) * pitch
        across_middle = across + (position - (length - 1) / 2) * pitch
        middle_x, middle_y = (along_middle, across_middle) if sideways else (across_middle, along_middle)
        x = side * (middle_x + rng.uniform(-0.008, 0.008))
        y = side * (middle_y + rng.uniform(-0.008, 0.008))
        tilt = math.radians(rng.uniform(-8, 8))
        cos = side * diameter / 2 * math.cos(tilt)
        sin = side * diameter / 2 * math.sin(tilt)
        draw.polygon([(x + cos * u - sin * v, y + sin * u + cos * v) for u, v in outline], fill=rgb)


def _inside(middle: float, extent: float) -> float:
    """Return the position nearest to `middle` at which objects of the given extent are within the image (0 to 1)."""
    half = min(0.5, extent / 2 + 0.015)
    return min(1 - half, max(half, middle))


def _phrase(group: Group, place_may_lead: bool, rng: Random) -> str:
    """Return a phrase such as "two big red circles at the top", with the attributes in one of several orders."""
    _, color_words = COLORS[group.color]
    _, shape_words = SHAPES[group.shape]
    _, size_words = SIZES[group.size]
    number = _word(NUMBERS[group.number], rng)
    color = _word(color_words, rng)
    shape = _word(shape_words, rng)
    if group.number > 1:
        shape += "es" if shape[-1] in "sx" else "s"
    size = _word(size_words, rng) if rng.random() < 0.6 else ""
    noun = f"{shape} in {color}" if rng.random() < 0.15 else f"{color} {shape}"
    if size:
        noun = f"{noun} of {group.size} size" if rng.random() < 0.15 else f"{size} {noun}"
    if number == "a" and noun[0] in "aeiou":
        number = "an"
    phrase = f"{number} {noun}"
    if rng.random() > 0.6:
        return phrase
    place = _word(PLACES[group.place], rng)
    return f"{place} {phrase}" if place_may_lead and rng.random() < 0.4 else f"{phrase} {place}"


def _word(words: Words, rng: Random) -> str:
    """Return the canonical word or, half the time, a random word from the list."""
    return words[0] if rng.random() < 0.5 else rng.choice(words)
