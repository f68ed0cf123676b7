"""A plain training loop of small heads on frozen features: any loss of this project, or an oracle of the study.

`train` is the whole loop; a step takes a few milliseconds on one core.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from neuclip_ds.loss import ContrastiveLoss
from study.features import Pairs
from study.oracle import OracleLoss, log_mean_exp, negative_logits

ANCHORS, WARMUP, RECORDS = 512, 0.02, (0.1, 0.3, 0.6, 1.0)  # records of the learning curve, in parts of the run


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
    effective: float | None = None  # rho leaves an anchor the weight of so many negatives
    noise: float = 0.0  # share of captions that stand with another image
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the loss


class Heads(nn.Module):
    """One head for each side; their outputs are rows of norm 1."""

    def __init__(self, pairs: Pairs, run: Run) -> None:
        super().__init__()
        self.image, self.text = (self._head(x.shape[-1], run) for x in (pairs.image, pairs.text))

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
        found = self(pairs.image[0], pairs.text)
        self.train()
        return found


def build_loss(run: Run, pairs: Pairs, heads: Heads, steps_per_epoch: int) -> ContrastiveLoss | OracleLoss:
    """Build the loss of a run; options that depend on the data are filled in here."""
    samples = len(pairs.text)
    options: dict[str, Any] = {key: dict(value) if isinstance(value, Mapping) else value
                                         for key, value in run.options.items()}  # fmt: skip
    if run.loss == "oracle":
        return OracleLoss(pairs, heads, lr=run.lr * run.temperature_rate, **options)
    temperature = options.setdefault("temperature", {})
    temperature.setdefault("lr", run.lr * run.temperature_rate)
    if run.effective is not None:
        temperature["rho"] = math.log(samples / run.effective)
    if run.loss == "siglip":  # the bias of the batch's prior, given the first similarities
        image, text = heads.encode(pairs.first(run.batch))
        mean = float((image[pairs.image_of[: len(text)]] * text).sum(dim=1).mean())
        options["siglip"] = {"bias": -mean / temperature["initial"] - math.log(run.batch - 1)}
    options |= {"dim": run.width, "samples": samples, "epochs": run.epochs, "steps_per_epoch": steps_per_epoch}
    return ContrastiveLoss(run.loss, lr=run.lr, betas=(0.9, 0.999), adam_eps=1e-12, validate=False, **options)


def train(pairs: Pairs, held_out: Pairs, run: Run) -> dict[str, Any]:
    """Train, and return the records of the learning curve; the last one is the result."""
    torch.manual_seed(run.seed)
    order = torch.Generator().manual_seed(run.seed)
    pairs = with_noise(pairs, run.noise, order)
    heads = Heads(pairs, run)
    per_epoch = len(pairs.text) // run.batch
    total = round(run.epochs * per_epoch)
    recorded = {max(1, round(part * total)) for part in RECORDS}
    loss_fn = build_loss(run, pairs, heads, per_epoch)
    optimizer = AdamW(heads.parameters(), run.lr, weight_decay=run.weight_decay, eps=1e-12, fused=True)
    warmup = max(1, round(WARMUP * total))
    scheduler = LambdaLR(optimizer, lambda s: min(1, (s + 1) / warmup) * (1 + math.cos(math.pi * s / total)) / 2)
    records = []
    for step in range(total):
        if step % per_epoch == 0:
            permutation = torch.randperm(len(pairs.text), generator=order)
            crops = torch.randint(len(pairs.image), (len(permutation),), generator=order)
        index = permutation[step % per_epoch * run.batch :][: run.batch]
        loss_fn.lr = optimizer.param_groups[0]["lr"]
        image, text = heads(pairs.image[crops[index], pairs.image_of[index]], pairs.text[index])
        loss = loss_fn(image, text, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step + 1 in recorded:
            tau = float(loss_fn.metrics["tau"])
            records.append({"step": step + 1, "tau": tau, **scores(heads, held_out)})
            records[-1] |= normalizers(heads, pairs, run, tau, loss_fn)
    return {**records[-1], "curve": records}


def with_noise(pairs: Pairs, share: float, generator: torch.Generator) -> Pairs:
    """Return the pairs with a share of the captions permuted among themselves."""
    moved = torch.randperm(len(pairs.text), generator=generator)[: round(share * len(pairs.text))]
    image_of = pairs.image_of.clone()
    image_of[moved] = image_of[moved.roll(1)]
    return pairs._replace(image_of=image_of)


def scores(heads: Heads, pairs: Pairs) -> dict[str, float]:
    """Return the mean of R@1, R@5 and R@10 in both directions, in percent; ties count as misses."""
    images, texts = heads.encode(pairs)
    similarity = images @ texts.T
    own = torch.arange(len(images))[:, None] == pairs.image_of
    best = similarity.masked_fill(~own, -math.inf).amax(dim=1, keepdim=True)
    by_image = ((similarity >= best) & ~own).sum(dim=1)
    by_text = ((similarity >= similarity.gather(0, pairs.image_of[None])) & ~own).sum(dim=0)
    recalls = [(ahead < k).double().mean() for ahead in (by_image, by_text) for k in (1, 5, 10)]
    return {"recall": 100 * statistics.mean(map(float, recalls)), "image_to_text@1": 100 * float(recalls[0])}


@torch.no_grad()
def normalizers(heads: Heads, pairs: Pairs, run: Run, tau: float, loss_fn: nn.Module | None = None) -> dict[str, float]:
    """Return statistics of anchors against all n pairs: their KL divergence, and the ratio of a batch to them.

    `ratio` is the batch's mean over the exact mean, which weighs an anchor's negatives where the normalizer is exact.
    `error` is log u - log g of the images: the method's estimate against the exact value.
    """
    images, texts = heads.encode(pairs)
    rows = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[: max(ANCHORS, run.batch)]
    rows = rows[: len(rows) // run.batch * run.batch]
    image, text = images[pairs.image_of[rows]], texts[rows]
    logits = negative_logits(image, text, texts, rows, tau)
    log_g = log_mean_exp(logits)
    weights = logits.softmax(dim=1)
    divergence = (weights * logits.masked_fill(weights == 0, 0)).sum(dim=1) - log_g
    found = {"log_g": float(log_g.mean()), "kl": float(divergence.mean())}
    own = torch.arange(run.batch)
    blocks = zip(image.split(run.batch), text.split(run.batch), strict=True)
    batch = torch.cat([log_mean_exp(negative_logits(a, b, b, own, tau)) for a, b in blocks])
    ratio = (batch - log_g).exp()
    found |= {"ratio_mean": float(ratio.mean()), "ratio_std": float(ratio.std()), "ratio_max": float(ratio.max())}
    if isinstance(loss_fn, ContrastiveLoss) and run.loss != "siglip":  # SigLIP has no normalizer
        batches = zip(image.split(run.batch), text.split(run.batch), rows.split(run.batch), strict=True)
        error = torch.cat([loss_fn.log_normalizers(*one)[0] for one in batches]) - log_g
        found |= {"error_mean": float(error.mean()), "error_std": float(error.std())}
    return found
