"""Zero-shot classification: an image belongs to the class whose prompts, averaged, lie nearest (CLIP, sec. 3.1).

Sets are read in the webdataset layout of CLIP_benchmark, which DataComp's evaluation sets share. Ties between
classes, such as two classes of one name, count by expectation, as in `neuclip_ds.evaluation.retrieval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import webdataset
from torch import Tensor
from torch.nn import functional

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Communicator, Encode
from neuclip_ds.evaluation.retrieval import count_rivals, hit_probability

LAYOUT = (
    "a zero-shot set is a folder with classnames.txt, zeroshot_classification_templates.txt, test/nshards.txt "
    "and test/0.tar, test/1.tar, ..."
)
PLACEHOLDER = "{c}"
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")


class LabelledImage(NamedTuple):
    name: str  # shard and key, for messages
    encoded: bytes
    label: int


@dataclass(frozen=True)
class ZeroShotSet:
    """A labelled image set with the words for its classes; iterating streams its images in a fixed order.

    Attributes:
        class_names: label -> name.
        templates: prompts with `{c}` where the class name goes.
        shards: tar files of images (jpg, jpeg, png or webp) and labels (cls).
    """

    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    shards: tuple[Path, ...]

    @classmethod
    def read(cls, folder: Path) -> ZeroShotSet:
        """Reads the words and finds the shards of a set.

        Raises:
            UserError: a file is missing, empty or not in CLIP_benchmark's form.
        """
        templates_file = folder / "zeroshot_classification_templates.txt"
        templates = _lines(templates_file)
        for template in templates:
            if PLACEHOLDER not in template:
                raise UserError(f"{templates_file}: the template '{template}' lacks {PLACEHOLDER}, the class's place.")
        shards_file = folder / "test" / "nshards.txt"
        shard_count = _lines(shards_file)[0]
        if not shard_count.isdecimal() or int(shard_count) == 0:
            raise UserError(f"{shards_file} holds '{shard_count}'; write the number of tar files there.")
        shards = tuple(folder / "test" / f"{number}.tar" for number in range(int(shard_count)))
        for shard in shards:
            _require(shard)
        return cls(_lines(folder / "classnames.txt"), templates, shards)

    def prompt(self, index: int) -> str:
        """Prompt `index` of len(class_names) * len(templates); prompts of a class are neighbours."""
        label, template = divmod(index, len(self.templates))
        return self.templates[template].replace(PLACEHOLDER, self.class_names[label])

    def __iter__(self) -> Iterator[LabelledImage]:
        """
        Raises:
            UserError: a sample lacks its image or label, or the label names no class.
        """
        # the splitters would share out shards by rank; here every rank sees the whole stream and picks its rows
        urls = [str(shard) for shard in self.shards]
        samples = webdataset.WebDataset(
            urls, shardshuffle=False, nodesplitter=None, workersplitter=None, empty_check=False
        )
        for sample in samples:
            yield self._labelled(sample)

    def _labelled(self, sample: dict[str, Any]) -> LabelledImage:
        name = f"{sample['__url__']}: sample {sample['__key__']}"
        encoded = next((sample[extension] for extension in IMAGE_EXTENSIONS if extension in sample), None)
        if encoded is None:
            raise UserError(f"{name} has no image; one of {', '.join(IMAGE_EXTENSIONS)} is needed.")
        if "cls" not in sample:
            raise UserError(f"{name} has no label; a .cls file with its class number is needed.")
        label = sample["cls"].decode(errors="replace").strip()
        if not label.isdecimal() or int(label) >= len(self.class_names):
            last = len(self.class_names) - 1
            raise UserError(f"{name} has label '{label}', but classnames.txt names classes 0 to {last}.")
        return LabelledImage(name, encoded, int(label))


@torch.no_grad()
def zero_shot(
    encode: Encode,
    tokenize: Callable[[list[str]], Tensor],
    image_set: ZeroShotSet,
    transform: Callable[[bytes], Tensor],
    communicator: Communicator,
    batch_size: int,
) -> dict[str, float]:
    """Top-1 and top-5 accuracy over the whole set, each image counted once.

    Args:
        encode: gives the features of a batch; see `Encode`.
        tokenize: n prompts -> (n, T) tokens.
        transform: encoded image -> (3, H, W) uint8.
        batch_size: rows a rank encodes at once; every call has exactly as many.

    Returns:
        `zero_shot_top1`, `zero_shot_top5` in [0, 1] and `zero_shot_images`, equal on all ranks.

    Raises:
        UserError: the set is empty or one of its samples is unreadable.
    """
    classes = class_embeddings(encode, tokenize, image_set, communicator, batch_size)
    every_class = torch.ones(classes.shape[0], dtype=torch.bool, device=classes.device)
    sums = torch.zeros(3, dtype=torch.float64, device=classes.device)
    problems: list[str] = []  # a rank that gave up alone would leave the others waiting for it
    for images, labels in _image_batches(image_set, transform, communicator, batch_size, problems):
        features, _ = encode(images, None)
        assert features is not None
        labels = labels.to(features.device)
        valid = labels >= 0
        ahead, tied = count_rivals(features[valid], classes, labels[valid], every_class)
        top1, top5 = (hit_probability(ahead, tied, k).sum() for k in (1, 5))
        sums += torch.stack([top1, top5, valid.sum()])
    communicator.agree(problems[0] if problems else None)
    top1, top5, images_seen = communicator.all_reduce(sums, "evaluation").tolist()
    if not images_seen:
        raise UserError(f"The zero-shot set of {image_set.shards[0]} has no image; {LAYOUT}.")
    return {
        "zero_shot_top1": top1 / images_seen,
        "zero_shot_top5": top5 / images_seen,
        "zero_shot_images": images_seen,
    }


def class_embeddings(
    encode: Encode,
    tokenize: Callable[[list[str]], Tensor],
    image_set: ZeroShotSet,
    communicator: Communicator,
    batch_size: int,
) -> Tensor:
    """(C, d) float32: of each class the normalised mean of its prompts' normalised features.

    Prompts are dealt out to ranks and filled up to whole batches; sums are float64, so that ranks do not show.
    """
    classes, templates = len(image_set.class_names), len(image_set.templates)
    rank, world_size = communicator.rank, communicator.world_size
    sums: Tensor | None = None
    for start in range(0, classes * templates, world_size * batch_size):
        index = torch.arange(start + rank, start + world_size * batch_size, world_size)  # (b,)
        valid = index < classes * templates
        prompts = [image_set.prompt(i) for i in index.where(valid, 0).tolist()]
        _, features = encode(None, tokenize(prompts))
        assert features is not None
        if sums is None:
            sums = features.new_zeros((classes, features.shape[1]), dtype=torch.float64)
        labels = (index[valid] // templates).to(features.device)
        sums.index_add_(0, labels, features[valid.to(features.device)].double())
    assert sums is not None  # `read` refuses sets without classes or templates
    return functional.normalize(communicator.all_reduce(sums, "evaluation"), dim=1).float()


def _image_batches(
    image_set: ZeroShotSet,
    transform: Callable[[bytes], Tensor],
    communicator: Communicator,
    batch_size: int,
    problems: list[str],
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's images (b, 3, H, W) and labels (b,), -1 where the set has run out.

    An image that cannot be decoded is replaced and put down in `problems`.

    A round is `world_size * batch_size` images of the stream, of which rank r has every K-th from the r-th on. All
    ranks see the stream's end in the same round, hence give equally many batches without counting ahead.
    """
    round_size = communicator.world_size * batch_size
    count, rows, labels = 0, [], []
    filler = torch.empty(0)
    for count, image in enumerate(image_set, start=1):
        if count == 1:  # on every rank: one may have no image of its own to fill a batch with
            filler = _pixels(image, transform)
        if (count - 1) % communicator.world_size == communicator.rank:
            try:
                rows.append(_pixels(image, transform))
            except UserError as error:
                rows.append(filler)
                problems.append(str(error))
            labels.append(image.label)
        if count % round_size == 0:
            yield torch.stack(rows), torch.tensor(labels)
            rows, labels = [], []
    if count % round_size:
        missing = batch_size - len(rows)
        yield torch.stack(rows + [filler] * missing), torch.tensor(labels + [-1] * missing)


def _pixels(image: LabelledImage, transform: Callable[[bytes], Tensor]) -> Tensor:
    try:
        return transform(image.encoded)
    except Exception as error:  # decoders raise what they like; all of it is about this one file
        raise UserError(f"{image.name} cannot be decoded ({error}); mend or remove it.") from error


def _require(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing; {LAYOUT}.")


def _lines(path: Path) -> tuple[str, ...]:
    """The stripped lines of a file that must have at least one and none blank, for a line's number has a meaning."""
    _require(path)
    lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").rstrip().split("\n"))
    if "" in lines:
        raise UserError(f"{path}: line {lines.index('') + 1} is blank; every line must hold an entry.")
    return lines
