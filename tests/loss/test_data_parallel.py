"""The loops of the pages on DDP and FSDP2, on two ranks, give the weights and gradients of the project's trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from reference import (
    OPTIONS,
    Encoders,
    GlobalBatch,
    Trained,
    assert_equal,
    in_micro_batches,
    python_blocks,
    train,
    trained,
    whole,
    with_method,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.loss import ContrastiveLoss

SAMPLES, RANKS, ROWS, EPOCHS, LR = 24, 2, 4, 3, 1e-2
STEPS = EPOCHS * SAMPLES // (RANKS * ROWS)


def pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return list(zip(images, images + torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64), strict=True))


def global_batches() -> Iterator[GlobalBatch]:
    """What the ranks' samplers give in each step, rank after rank."""
    images, texts = (torch.stack(column) for column in zip(*pairs(), strict=True))
    rates = (LR * (1 + math.cos(math.pi * number / STEPS)) / 2 for number in range(STEPS))
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))  # as DistributedSampler does
        for rows in order.view(-1, ROWS, RANKS):
            index = rows.T.flatten()
            yield GlobalBatch(epoch, next(rates), images[index], texts[index], index)


def _on_ranks(communicator: Communicator, code: str, method: str) -> Trained:
    names: dict[str, Any] = {"encoders": Encoders(), "pairs": pairs(), "options": OPTIONS[method], "dim": 6}
    names |= {"epochs": EPOCHS, "rows": ROWS, "lr": LR, "device": "cpu", "micro": 2}
    exec(compile(with_method(code, method), "page", "exec"), names)
    return trained(names["encoders"], names["loss_fn"].temperature)


def loops() -> dict[str, str]:
    """Return the code of each way to run the loop."""
    (ddp,), (shard, micro) = python_blocks("loss_in_ddp.md"), python_blocks("loss_in_fsdp2.md")
    wrapping = "model = DistributedDataParallel(encoders)\n"
    assert wrapping in ddp
    fsdp2 = ddp.replace(wrapping, shard)
    return {
        "ddp": ddp,
        "fsdp2": fsdp2,
        "ddp in micro-batches": in_micro_batches(ddp, micro),
        "fsdp2 in micro-batches": in_micro_batches(fsdp2, micro),
    }


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("loop", loops())
def test_the_loop_equals_the_trainer(loop: str, method: str) -> None:
    model = Encoders()
    wanted = train(model, torch.optim.AdamW(model.parameters(), LR), global_batches(), method, 6, SAMPLES, STEPS)
    for found in run_ranks(RANKS, _on_ranks, loops()[loop], method):
        assert_equal(found, wanted)


def _after_each_micro_batch(communicator: Communicator, shards: bool) -> list[bool]:
    """Say after each of two micro-batches of a step whether gradients have been reduced over ranks."""
    encoders = Encoders()
    model: nn.Module = encoders
    if shards:
        fully_shard(encoders, mesh=init_device_mesh("cpu", (RANKS,)))
    else:
        model = DistributedDataParallel(encoders)
    images, texts = (torch.stack(column)[communicator.rank :: RANKS] for column in zip(*pairs(), strict=True))
    parts = list(zip(images[:ROWS].split(2), texts[:ROWS].split(2), strict=True))
    reduced = []
    with ContrastiveLoss("openclip", dim=6).accumulate(model) as passes:
        for part in parts:
            with passes.features():
                passes.add(*model(*part))
        passes.loss()
        for part in parts:
            with passes.gradients():
                passes.backward(*model(*part))
            gradient = next(encoders.parameters()).grad
            everywhere = None if gradient is None else communicator.all_gather(whole(gradient)[None], "control")
            reduced.append(everywhere is not None and bool(everywhere.eq(everywhere[0]).all()))
    return reduced


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_gradients_are_reduced_in_the_last_micro_batch_only(shards: bool) -> None:
    assert run_ranks(RANKS, _after_each_micro_batch, shards) == [[False, True]] * RANKS
