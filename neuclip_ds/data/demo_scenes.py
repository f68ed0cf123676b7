"""Draw and caption the scenes of the demo data set: coloured shapes, rendered with PIL.

A scene is one to three groups of equal objects in front of a background. Groups form a row or a column, so that they
never overlap; every attribute stays visible at 48 pixels. All choices, pixel noise included, come from the given
`random.Random`: equal streams give equal images and captions.
"""

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw

Point = tuple[float, float]
Rgb = tuple[int, int, int]
T = TypeVar("T")


class Group(NamedTuple):
    """`number` equal objects; shape, colour, size and place are keys of the tables below."""

    shape: str
    colour: str
    size: str
    number: int
    place: str
    offset: float  # of the group's centre across the row of groups, in image sides; not in captions


class Scene(NamedTuple):
    """One to three groups of objects and a key of BACKGROUNDS."""

    groups: tuple[Group, ...]
    background: str


class Colour(NamedTuple):
    """A colour and its names in captions."""

    rgb: Rgb
    words: tuple[str, ...]


class Shape(NamedTuple):
    """The outline of a shape and its names in captions."""

    outline: tuple[Point, ...]  # around (0, 0), within about 1, y downwards
    words: tuple[str, ...]


def _arc(radius: float, points: int = 40) -> tuple[Point, ...]:
    """Return a closed circle, starting at the top."""
    angles = (2 * math.pi * i / points for i in range(points + 1))
    return tuple((radius * math.sin(a), -radius * math.cos(a)) for a in angles)


def _star() -> tuple[Point, ...]:
    tips, notches = _arc(1.05, 10), _arc(0.43, 10)
    return tuple(notches[i] if i % 2 else tips[i] for i in range(10))


def _heart() -> tuple[Point, ...]:
    angles = [2 * math.pi * i / 40 for i in range(40)]
    return tuple(
        (math.sin(a) ** 3, -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16 - 0.1)
        for a in angles
    )


_ARM = 0.33
_CROSS = (
    *((-_ARM, -1.0), (_ARM, -1.0), (_ARM, -_ARM), (1.0, -_ARM), (1.0, _ARM), (_ARM, _ARM)),
    *((_ARM, 1.0), (-_ARM, 1.0), (-_ARM, _ARM), (-1.0, _ARM), (-1.0, -_ARM), (-_ARM, -_ARM)),
)

# the first name of each is the canonical one, which class names use
SHAPES = {
    "circle": Shape(_arc(0.95), ("circle", "disc")),
    "square": Shape(((-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)), ("square", "box")),
    "triangle": Shape(((0.0, -0.95), (0.97, 0.75), (-0.97, 0.75)), ("triangle",)),
    "star": Shape(_star(), ("star", "five-pointed star")),
    "cross": Shape(_CROSS, ("cross", "plus sign")),
    "ring": Shape(_arc(1.0) + _arc(0.55)[::-1], ("ring", "hoop")),
    "diamond": Shape(((0.0, -1.05), (0.7, 0.0), (0.0, 1.05), (-0.7, 0.0)), ("diamond", "rhombus")),
    "heart": Shape(_heart(), ("heart", "heart shape")),
}
COLOURS = {
    "red": Colour((215, 25, 30), ("red", "scarlet", "crimson")),
    "orange": Colour((250, 135, 10), ("orange", "tangerine")),
    "yellow": Colour((250, 220, 15), ("yellow", "lemon yellow")),
    "green": Colour((40, 150, 45), ("green", "emerald")),
    "turquoise": Colour((40, 205, 200), ("turquoise", "aqua")),
    "blue": Colour((35, 65, 215), ("blue", "cobalt")),
    "purple": Colour((130, 40, 170), ("purple", "violet")),
    "pink": Colour((250, 130, 195), ("pink", "rose")),
    "brown": Colour((120, 68, 28), ("brown", "chestnut")),
    "black": Colour((20, 20, 20), ("black", "jet-black")),
}
SIZES = {"small": (0.23, ("small", "little", "tiny")), "large": (0.32, ("large", "big", "huge"))}  # image sides
NUMBERS = {
    1: ("a", "one", "a single"),
    2: ("two", "a pair of"),
    3: ("three", "a trio of"),
    4: ("four", "a group of four"),
}
PLACES = {
    "left": ("on the left", "at the left side", "on the left-hand side"),
    "right": ("on the right", "at the right side", "on the right-hand side"),
    "top": ("at the top", "in the upper part", "near the upper edge"),
    "bottom": ("at the bottom", "in the lower part", "near the lower edge"),
    "centre": ("in the middle", "in the centre", "at the center"),
}
BACKGROUNDS: dict[str, tuple[Rgb, tuple[str, ...]]] = {
    "white": ((250, 250, 250), ("a white background", "a plain white backdrop")),
    "grey": ((175, 175, 175), ("a grey background", "a plain gray backdrop")),
    "beige": ((238, 220, 180), ("a beige background", "a sand-coloured backdrop")),
    "pale blue": ((185, 215, 245), ("a pale blue background", "a light blue backdrop")),
    "pale green": ((190, 235, 190), ("a pale green background", "a light green backdrop")),
    "striped": ((248, 248, 248), ("a striped background", "a backdrop of grey stripes")),
    "dotted": ((248, 248, 248), ("a dotted background", "a backdrop of grey dots")),
    "checkered": ((248, 248, 248), ("a checkered background", "a chequered backdrop")),
}
_INK = (195, 195, 195)  # colour of the patterns

# forms with and without the background
TEMPLATES: tuple[tuple[str, str], ...] = (
    ("{objects} on {background}", "{objects}"),
    ("a picture of {objects} on {background}", "a picture of {objects}"),
    ("an image of {objects} against {background}", "an image of {objects}"),
    ("on {background}: {objects}", "there: {objects}"),
    ("against {background} you can see {objects}", "you can see {objects}"),
    ("{background} with {objects}", "a picture with {objects}"),
    ("this drawing shows {objects} over {background}", "this drawing shows {objects}"),
    ("on {background} somebody drew {objects}", "somebody drew {objects}"),
    ("a simple drawing of {objects}, made on {background}", "a simple drawing of {objects}"),
    ("{objects} in front of {background}", "just {objects}"),
    ("the picture has {background} and {objects}", "the picture has {objects}"),
    ("{objects}; behind, {background}", "{objects}, nothing else"),
)

_POSITIONS = {"left": 1 / 6, "top": 1 / 6, "centre": 1 / 2, "right": 5 / 6, "bottom": 5 / 6}
_ROWS = (("left", "centre", "right"), ("top", "centre", "bottom"))
_MOST_OBJECTS = {1: 4, 2: 3, 3: 2}  # objects in a group, by the number of groups
_SUPERSAMPLING = 4


def random_scene(rng: Random) -> Scene:
    """Return a random scene, in which no two groups share both shape and colour."""
    count = rng.choices((1, 2, 3), weights=(4, 4, 2))[0]
    row = rng.choice(_ROWS)
    places = sorted(rng.sample(row, count), key=row.index)
    kinds = rng.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], count)
    groups = tuple(
        _random_group(rng, shape, colour, place, rng.randint(1, _MOST_OBJECTS[count]))
        for (shape, colour), place in zip(kinds, places, strict=True)
    )
    return Scene(groups, rng.choice(list(BACKGROUNDS)))


def single_object(rng: Random, shape: str, colour: str) -> Scene:
    """Return a scene of one object of the given class; place, size and background are random."""
    group = _random_group(rng, shape, colour, rng.choice(list(PLACES)), number=1)
    return Scene((group,), rng.choice(list(BACKGROUNDS)))


def render(scene: Scene, size: int, rng: Random) -> Image.Image:
    """Draw a scene as a `size` x `size` RGB image; positions, tilt, shades and pixels vary a little with `rng`."""
    fine = size * _SUPERSAMPLING
    rgb, _ = BACKGROUNDS[scene.background]
    canvas = Image.new("RGB", (fine, fine), _shade(rgb, rng, 4))
    draw = ImageDraw.Draw(canvas)
    _draw_pattern(draw, scene.background, fine, rng)
    sideways = any(group.place in ("left", "right") for group in scene.groups)
    for group in scene.groups:
        _draw_group(draw, group, sideways, fine, rng)
    pixels = np.asarray(canvas.reduce(_SUPERSAMPLING), dtype=np.int16)  # (size, size, 3)
    noise = np.frombuffer(rng.randbytes(pixels.size), dtype=np.uint8).reshape(pixels.shape) // 23 - np.int16(5)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def describe(scene: Scene, template: int, rng: Random) -> str:
    """Return a caption by TEMPLATES[template]: always colour, shape and number, usually size, place and background."""
    with_background, without = TEMPLATES[template]
    form = with_background if rng.random() < 0.6 else without
    place_may_lead = not any(f"{word} {{objects}}" in form for word in ("of", "with"))  # "of at the top a star"
    phrases = [_phrase(group, place_may_lead, rng) for group in scene.groups]
    rng.shuffle(phrases)
    objects = phrases[-1]
    if phrases[:-1]:
        objects = ", ".join(phrases[:-1]) + rng.choice((" and ", " as well as ", " and also ")) + objects
    _, backdrops = BACKGROUNDS[scene.background]
    caption = form.format(objects=objects, background=rng.choice(backdrops))
    return caption[0].upper() + caption[1:] + "." if rng.random() < 0.5 else caption


def _random_group(rng: Random, shape: str, colour: str, place: str, number: int) -> Group:
    return Group(shape, colour, rng.choice(list(SIZES)), number, place, round(rng.uniform(-0.13, 0.13), 3))


def _shade(rgb: Rgb, rng: Random, spread: int) -> Rgb:
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
        for x, y in ((x, y) for x in corners for y in corners):
            draw.ellipse((x + 0.25 * step, y + 0.25 * step, x + 0.75 * step, y + 0.75 * step), fill=_INK)
    elif background == "checkered":
        for x, y in ((x, y) for i, x in enumerate(corners) for y in corners[i % 2 :: 2]):
            draw.rectangle((x, y, x + step, y + step), fill=_INK)


def _draw_group(draw: ImageDraw.ImageDraw, group: Group, sideways: bool, side: int, rng: Random) -> None:
    """Draw a group inside the image: its objects line up across the row of groups, four of them two by two."""
    diameter = SIZES[group.size][0] * rng.uniform(0.95, 1.0)
    pitch = 1.05 * diameter
    lanes = 2 if group.number == 4 else 1
    length = group.number // lanes
    along = _inside(_POSITIONS[group.place] + rng.uniform(-0.01, 0.01), (lanes - 1) * pitch + diameter)
    across = _inside(0.5 + group.offset + rng.uniform(-0.03, 0.03), (length - 1) * pitch + diameter)
    rgb = _shade(COLOURS[group.colour].rgb, rng, 9)
    for i in range(group.number):
        lane, position = divmod(i, length)
        middle = (along + (lane - (lanes - 1) / 2) * pitch, across + (position - (length - 1) / 2) * pitch)
        x, y = (side * (m + rng.uniform(-0.008, 0.008)) for m in (middle if sideways else middle[::-1]))
        outline = _placed(SHAPES[group.shape].outline, x, y, side * diameter / 2, math.radians(rng.uniform(-8, 8)))
        draw.polygon(outline, fill=rgb)


def _inside(middle: float, extent: float) -> float:
    half = min(0.5, extent / 2 + 0.015)
    return min(1 - half, max(half, middle))


def _placed(outline: Sequence[Point], x: float, y: float, radius: float, tilt: float) -> list[Point]:
    cos, sin = radius * math.cos(tilt), radius * math.sin(tilt)
    return [(x + cos * u - sin * v, y + sin * u + cos * v) for u, v in outline]


def _phrase(group: Group, place_may_lead: bool, rng: Random) -> str:
    """Return a phrase such as "two big red circles at the top", with the attributes in one of several orders."""
    number, colour = _word(NUMBERS[group.number], rng), _word(COLOURS[group.colour].words, rng)
    shape = _word(SHAPES[group.shape].words, rng)
    if group.number > 1:
        shape += "es" if shape[-1] in "sx" else "s"
    size = _word(SIZES[group.size][1], rng) if rng.random() < 0.6 else ""
    noun = f"{shape} in {colour}" if rng.random() < 0.15 else f"{colour} {shape}"
    if size:
        noun = f"{noun} of {group.size} size" if rng.random() < 0.15 else f"{size} {noun}"
    if number == "a" and noun[0] in "aeiou":
        number = "an"
    phrase = f"{number} {noun}"
    if rng.random() > 0.6:
        return phrase
    place = _word(PLACES[group.place], rng)
    return f"{place} {phrase}" if place_may_lead and rng.random() < 0.4 else f"{phrase} {place}"


def _word(words: Sequence[T], rng: Random) -> T:
    """Return the canonical word or, half of the time, any of them."""
    return words[0] if rng.random() < 0.5 else rng.choice(words)
