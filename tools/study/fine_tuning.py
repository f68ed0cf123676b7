"""Fine-tune a checkpoint on photographs that it was not trained on, as TuneCLIP does with open-weight models.

The photographs are split by content: along the first principal component of their captions' features, a fraction
`SHARE` of the photographs is of the first kind, and the rest is of the second kind. A checkpoint is trained on the
first kind; runs fine-tune it on the second at the checkpoint's temperature. Recovery (TuneCLIP Algorithm 1) first
lets Adam's moments and u accumulate with frozen weights, under the plain global contrastive loss, or under OpenCLIP's
loss (which has no u) if the run uses it.
"""

import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from neuclip_ds.losses import ContrastiveLoss
from study.features import Pairs
from study.loop import Heads, Run, Trained, train
from study.measures import scores
from study.oracle import OracleLoss

SHARE = 0.7
CHECKPOINT = Run("openclip", batch=256, seed=0, epochs=30, options={"temperature": {"initial": 0.07}})
_checkpoints: dict[int, Trained] = {}  # by seed; all runs of this process share them


def fine_tune(pairs: Pairs, held_out: Pairs, run: Run) -> dict[str, Any]:
    """Fine-tune the checkpoint of the run's seed, and return the results of `train`.

    In these results, `recall` is the mean of the recalls on the two kinds of held-out pairs, `recall_first` and
    `recall_second`; `start` is the same mean for the checkpoint.
    """
    direction, threshold = _content(pairs)
    first, second = _split(pairs, direction, threshold)
    held_out_first, held_out_second = _split(held_out, direction, threshold)
    if run.seed not in _checkpoints:
        _checkpoints[run.seed] = train(first, held_out_first, replace(CHECKPOINT, seed=run.seed))
    checkpoint = _checkpoints[run.seed]
    fixed_tau = {"temperature": {"initial": checkpoint.results["tau"], "lr": 0.0}}
    run = replace(run, options={**run.options, **fixed_tau})

    def start(heads: Heads, loss: ContrastiveLoss | OracleLoss, optimizer: AdamW) -> None:
        heads.load_state_dict(checkpoint.heads.state_dict())

    def start_recovered(heads: Heads, loss: ContrastiveLoss | OracleLoss, optimizer: AdamW) -> None:
        start(heads, loss, optimizer)
        for ours, recovered_parameter in zip(heads.parameters(), recovered.heads.parameters(), strict=True):
            optimizer.state[ours] = recovered.optimizer.state[recovered_parameter]
        if recovery_method == "gcl":  # as in the paper, the hinged loss continues with the plain loss's u
            built_with = loss.get_extra_state()["built_with"]
            loss.set_extra_state({**recovered.loss.get_extra_state(), "built_with": built_with})

    if run.recovery:
        recovery_method = "openclip" if run.loss == "openclip" else "gcl"
        recovery_run = replace(run, loss=recovery_method, lr=0.0, epochs=run.recovery, options=fixed_tau)
        recovered = train(second, held_out_second, recovery_run, start)
    trained = train(second, held_out_second, run, start_recovered if run.recovery else start)
    before = []
    after = []
    for kind in (held_out_first, held_out_second):
        before.append(scores(checkpoint.heads, kind)["recall"])
        after.append(scores(trained.heads, kind)["recall"])
    return {
        **trained.results,
        "recall": statistics.mean(after),
        "recall_first": after[0],
        "recall_second": after[1],
        "start": statistics.mean(before),
    }


def _content(pairs: Pairs) -> tuple[Tensor, float]:
    """Return the direction (width,) of the captions' largest variance, and the images' quantile `SHARE` along it."""
    _, _, directions = torch.linalg.svd(pairs.text - pairs.text.mean(dim=0), full_matrices=False)
    return directions[0], float(_along(pairs, directions[0]).quantile(SHARE))


def _along(pairs: Pairs, direction: Tensor) -> Tensor:
    """Return the mean over each image's captions of their components along a direction: (images,)."""
    total = torch.zeros(pairs.image.shape[1]).index_add_(0, pairs.image_of, pairs.text @ direction)
    return total / pairs.image_of.bincount(minlength=len(total))


def _split(pairs: Pairs, direction: Tensor, threshold: float) -> tuple[Pairs, Pairs]:
    above = _along(pairs, direction) > threshold
    return pairs.of_images(~above), pairs.of_images(above)
