"""Scores of a run on held-out pairs, and a comparison of its normalizers with the exact normalizers."""

import math
import statistics
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from neuclip_ds.losses import ContrastiveLoss
from study.features import Pairs
from study.oracle import log_mean_exp, negative_logits

if TYPE_CHECKING:
    from study.loop import Heads, Run

ANCHORS = 512


def scores(heads: "Heads", pairs: Pairs) -> dict[str, float]:
    """Return `recall`, the mean of R@1, R@5 and R@10 in both directions, and `image_to_text@1`, both in percent.

    Ties count as misses.
    """
    images, texts = heads.encode(pairs)
    return recalls(images, texts, pairs.image_of)


def recalls(images: Tensor, texts: Tensor, image_of: Tensor) -> dict[str, float]:
    """Return the scores of (images, d) and (captions, d) features; `image_of` (captions,) is each caption's image."""
    similarity = images @ texts.T
    own = torch.arange(len(images), device=images.device)[:, None] == image_of
    best = similarity.masked_fill(~own, -math.inf).amax(dim=1, keepdim=True)
    by_image = ((similarity >= best) & ~own).sum(dim=1)
    by_text = ((similarity >= similarity.gather(0, image_of[None])) & ~own).sum(dim=0)
    shares = []
    for ahead in (by_image, by_text):  # number of other candidates that rank before the match
        for k in (1, 5, 10):
            shares.append(float((ahead < k).double().mean()))
    return {"recall": 100 * statistics.mean(shares), "image_to_text@1": 100 * shares[0]}


@torch.no_grad()
def normalizers(
    heads: "Heads", pairs: Pairs, run: "Run", tau: float, loss_fn: nn.Module | None = None
) -> dict[str, float]:
    """Return statistics of a sample of image anchors, whose exact normalizers g are means over all n - 1 negatives.

    `log_g` is the mean of log g. `kl` is the mean KL divergence of the anchors' softmax over their negatives from the
    uniform distribution. The ratio of an anchor (`ratio_mean`, `ratio_std`, `ratio_max`) is the mean over the negatives
    in a batch divided by g; with an exact normalizer, it is the total weight of these negatives. The error of an anchor
    (`error_mean`, `error_std`) is log u - log g, where u is the estimate of `loss_fn`; it is omitted without such an
    estimate (no `loss_fn`, an oracle, SigLIP), and for a run with a reference model, whose exponents differ from those
    of g.
    """
    images, texts = heads.encode(pairs)
    rows = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[: max(ANCHORS, run.batch)]
    rows = rows[: len(rows) // run.batch * run.batch]
    image = images[pairs.image_of[rows]]
    text = texts[rows]
    logits = negative_logits(image, text, texts, rows, tau)
    log_g = log_mean_exp(logits)
    weights = logits.softmax(dim=1)
    divergence = (weights * logits.masked_fill(weights == 0, 0)).sum(dim=1) - log_g
    statistics_of_anchors = {"log_g": float(log_g.mean()), "kl": float(divergence.mean())}

    own = torch.arange(run.batch)
    log_g_of_batches = []
    for batch_image, batch_text in zip(image.split(run.batch), text.split(run.batch), strict=True):
        log_g_of_batches.append(log_mean_exp(negative_logits(batch_image, batch_text, batch_text, own, tau)))
    ratio = (torch.cat(log_g_of_batches) - log_g).exp()
    statistics_of_anchors |= {
        "ratio_mean": float(ratio.mean()),
        "ratio_std": float(ratio.std()),
        "ratio_max": float(ratio.max()),
    }

    # SigLIP has no normalizer, and with a reference model, the exponents differ from those of g
    if isinstance(loss_fn, ContrastiveLoss) and run.loss != "siglip" and not run.reference:
        estimates = []
        batches = zip(image.split(run.batch), text.split(run.batch), rows.split(run.batch), strict=True)
        for batch_image, batch_text, batch_rows in batches:
            log_u_image, _ = loss_fn.log_normalizers(batch_image, batch_text, batch_rows)
            estimates.append(log_u_image)
        error = torch.cat(estimates) - log_g
        statistics_of_anchors |= {"error_mean": float(error.mean()), "error_std": float(error.std())}
    return statistics_of_anchors
