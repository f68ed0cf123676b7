"""A plain training loop for small heads on frozen features, or for small towers on pixels and words.

The loss is any loss of this project or an oracle of the study. `train` is the whole loop; a step of heads takes a few
milliseconds on one core.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from neuclip_ds.errors import UserError, counted
from neuclip_ds.losses import ContrastiveLoss
from study.features import VALIDATION, Pairs, with_copies
from study.guides import Guide, guide_path, load_guide
from study.measures import normalizers, scores
from study.oracle import OracleLoss
from study.pixels import image_tower, text_tower

WARMUP = 0.02  # fraction of the run
RECORDS = (0.1, 0.3, 0.6, 1.0)  # records of the learning curve, as fractions of the run


@dataclass(frozen=True)
class Run:
    """One training run."""

    loss: str  # a method of ContrastiveLoss, or `oracle`
    batch: int
    seed: int
    epochs: float = 12.0
    lr: float = 1e-3
    width: int = 256  # of the features
    hidden: int = 0  # units of the heads' hidden layer; 0 makes them linear
    dropout: float = 0.3
    weight_decay: float = 0.0
    temperature_rate: float = 1.0  # the temperature's learning rate as a multiple of the heads'
    # rho is log(n / effective), the KL divergence if `effective` of the n negatives share the weight equally
    effective: float | None = None
    noise: float = 0.0  # share of captions that are paired with a wrong image
    copies: float = 0.0  # share of pairs replaced by copies of the others, as false negatives
    copies_known: bool = False  # the loss receives the index of the pair that was copied, not one for each copy
    fine_tunes: bool = False  # start from a checkpoint of other photographs; see fine_tuning.py
    recovery: float = 0.0  # epochs that recover Adam's moments and u with frozen weights before fine-tuning
    first: float = 0.0  # start of the images that the run trains on, as a fraction of all images
    last: float = 1.0  # end of these images, as a fraction of all images
    trains_towers: bool = False  # train small towers on pixels and words instead of heads on features; see pixels.py
    recipe: str = ""  # recipe in this folder, with which the trainer trains both towers; see towers.py
    tower_rate: float = 1.0  # the towers' learning rate as a multiple of lr, for pretrained towers
    reference: str = ""  # name of the saved run that is the reference model; see guides.py
    teacher: str = ""  # name of the saved run that is the teacher
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the loss


class Heads(nn.Module):
    """A head for images and a head for captions; their outputs are rows of norm 1."""

    def __init__(self, pairs: Pairs, run: Run) -> None:
        super().__init__()
        if run.trains_towers:
            self.image = image_tower(run.width)
            self.text = text_tower(pairs.text.shape[-1], run.width)
        else:
            self.image = self._head(pairs.image.shape[-1], run)
            self.text = self._head(pairs.text.shape[-1], run)

    @staticmethod
    def _head(width: int, run: Run) -> nn.Module:
        if not run.hidden:
            return nn.Sequential(nn.Dropout(run.dropout), nn.Linear(width, run.width))
        hidden = nn.Sequential(nn.Linear(width, run.hidden), nn.GELU(), nn.Dropout(run.dropout))
        return nn.Sequential(nn.Dropout(run.dropout), hidden, nn.Linear(run.hidden, run.width))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.image(images), dim=1), normalize(self.text(texts), dim=1)

    @torch.no_grad()
    def encode(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the features of all images (first crop) and of all captions, without dropout."""
        self.eval()
        image, text = self(pairs.image[0], pairs.text)
        self.train()
        return image, text


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a run, and its final state."""

    results: dict[str, Any]  # the last record of the learning curve, and the whole `curve`
    heads: Heads
    loss: ContrastiveLoss | OracleLoss
    optimizer: AdamW


def loss_options(run: Run, samples: int) -> dict[str, Any]:
    """Return the options of a run's loss, including the options of the temperature that depend on the data."""
    options: dict[str, Any] = {}
    for key, value in run.options.items():
        options[key] = dict(value) if isinstance(value, Mapping) else value
    temperature = options.setdefault("temperature", {})
    temperature.setdefault("lr", run.lr * run.temperature_rate)
    if run.effective is not None:
        temperature["rho"] = math.log(samples / run.effective)
    return options


def build_loss(run: Run, pairs: Pairs, heads: Heads, steps_per_epoch: int) -> ContrastiveLoss | OracleLoss:
    """Build the loss of a run; options that depend on the data are filled in here."""
    samples = len(pairs.text)
    if run.loss == "oracle":
        return OracleLoss(pairs, heads, lr=run.lr * run.temperature_rate, **run.options)
    options = loss_options(run, samples)
    temperature = options["temperature"]
    if run.loss == "siglip":  # the mean match of the first pairs starts at the prior's log odds
        first_pairs = pairs.of_images(torch.arange(pairs.image.shape[1]) < run.batch)
        image, text = heads.encode(first_pairs)
        mean = float((image[first_pairs.image_of] * text).sum(dim=1).mean())
        options["siglip"] = {"bias": -mean / temperature["initial"] - math.log(run.batch - 1)}
    options |= {"dim": run.width, "samples": samples, "epochs": run.epochs, "steps_per_epoch": steps_per_epoch}
    return ContrastiveLoss(run.loss, lr=run.lr, betas=(0.9, 0.999), adam_eps=1e-12, validate=False, **options)


def train(
    pairs: Pairs,
    held_out: Pairs,
    run: Run,
    start: Callable[..., None] | None = None,
    guides: Path | None = None,
) -> Trained:
    """Train on pairs, and record scores on held-out pairs.

    Args:
        start: function that sets the initial state of the heads, the loss and the optimizer.
        guides: folder of the saved runs that serve as the run's reference and teacher.

    Raises:
        UserError: there are fewer training pairs than the batch size, or the reference or the teacher was not saved.
    """
    order = torch.Generator().manual_seed(run.seed)
    pairs = pairs.between(run.first, run.last)
    if len(pairs.text) < run.batch:
        raise UserError(
            f"A batch of {run.batch} needs more than the {counted(len(pairs.text), 'training pair')} of this run; pass "
            f"a source with more pairs ({VALIDATION} images of train/ are the validation split)."
        )
    pairs = pairs.with_noise(run.noise, order)
    source = with_copies(len(pairs.text), run.copies)
    pairs = pairs.at(source)
    stored = _stored(pairs, run, guides)
    if "teacher" in stored:
        run = _with_teacher(run, stored["teacher"].tau)
    torch.manual_seed(run.seed)  # runs with and without a guide start from the same heads
    heads = Heads(pairs, run)
    per_epoch = len(pairs.text) // run.batch
    total = round(run.epochs * per_epoch)
    recorded = {max(1, round(part * total)) for part in RECORDS}
    loss_fn = build_loss(run, pairs, heads, per_epoch)
    optimizer = AdamW(heads.parameters(), run.lr, weight_decay=run.weight_decay, eps=1e-12, fused=True)
    if start is not None:
        start(heads, loss_fn, optimizer)
    warmup = max(1, round(WARMUP * total))

    def lr_factor(step: int) -> float:
        return min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * step / total)) / 2

    scheduler = LambdaLR(optimizer, lr_factor)
    records = []
    for step in range(total):
        if step % per_epoch == 0:
            permutation = torch.randperm(len(pairs.text), generator=order)
            crops = torch.randint(len(pairs.image), (len(permutation),), generator=order)
        index = permutation[step % per_epoch * run.batch :][: run.batch]
        loss_fn.lr = optimizer.param_groups[0]["lr"]
        crop = crops[index]
        image, text = heads(pairs.image[crop, pairs.image_of[index]], pairs.text[index])
        stored_rows = {name: guide.rows(crop, index) for name, guide in stored.items()}
        loss = loss_fn(image, text, source[index] if run.copies_known else index, **stored_rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step + 1 in recorded:
            tau = float(loss_fn.metrics["tau"])
            record = {"step": step + 1, "tau": tau, **scores(heads, held_out)}
            records.append(record | normalizers(heads, pairs, run, tau, loss_fn))
    return Trained(results={**records[-1], "curve": records}, heads=heads, loss=loss_fn, optimizer=optimizer)


def _stored(pairs: Pairs, run: Run, folder: Path | None) -> dict[str, Guide]:
    """Return the features of the run's reference and teacher, by the names of the loss's arguments."""
    names = {"reference": run.reference, "teacher": run.teacher}
    guides: dict[str, Guide] = {}
    for argument, name in names.items():
        if name:
            assert folder is not None, "a run with a reference or a teacher needs the folder of the saved runs"
            guides[argument] = load_guide(guide_path(folder, name), pairs)
    return guides


def _with_teacher(run: Run, tau: float) -> Run:
    """Return the run with the teacher's final temperature in the loss's options, unless they name another."""
    distill = {"temperature": tau, **run.options.get("distill", {})}
    return replace(run, options={**run.options, "distill": distill})
