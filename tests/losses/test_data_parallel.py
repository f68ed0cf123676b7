"""On two ranks, the page's DDP and FSDP2 loops give the project trainer's weights and gradients."""

import re
import textwrap
from typing import Any

import pytest
import torch
from ranks import run_ranks
from replay import (
    EPOCHS,
    LR,
    Encoders,
    Trained,
    assert_equal,
    code_blocks,
    pairs,
    recorded,
    replay_encoders,
    run_code,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import ContrastiveLoss

RANKS, ROWS = 2, 4


def _on_ranks(communicator: Communicator, code: str, method: str) -> Trained:
    names: dict[str, Any] = {"encoders": Encoders(), "pairs": pairs()}
    names |= {"epochs": EPOCHS, "rows": ROWS, "lr": LR, "device": "cpu", "micro": 2}
    with recorded() as calls:
        names = run_code(code, method, names)
    return Trained.of(names["encoders"], names["loss_fn"].temperature, calls)


def loops() -> dict[str, str]:
    """Return the page's code for each variant of the loop."""
    (ddp,), (shard,), (micro,) = map(code_blocks, ("DDP", "FSDP2", "Micro-batches"))
    wrapping = "model = DistributedDataParallel(encoders)\n"
    assert wrapping in ddp
    fsdp2 = ddp.replace(wrapping, shard)
    return {
        "ddp": ddp,
        "fsdp2": fsdp2,
        "ddp in micro-batches": in_micro_batches(ddp, micro),
        "fsdp2 in micro-batches": in_micro_batches(fsdp2, micro),
    }


def in_micro_batches(loop: str, step: str) -> str:
    """Return a loop's code with its loss and backward pass replaced by the code in `step`."""
    lines = r"^( +)loss = loss_fn\(.*\n +loss\.backward\(\)\n"
    assert re.search(lines, loop, re.MULTILINE)
    return re.sub(lines, lambda found: textwrap.indent(step, found[1]), loop, flags=re.MULTILINE)


@pytest.mark.parametrize("method", ["neuclip", pytest.param("fastclip_v3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loop", loops())
def test_the_loop_equals_the_trainer(loop: str, method: str) -> None:
    ranks = run_ranks(RANKS, _on_ranks, loops()[loop], method)
    wanted = replay_encoders([rank.calls for rank in ranks], method)
    for found in ranks:
        assert found.gradients
        assert_equal(found, wanted)


def _after_each_micro_batch(communicator: Communicator, shards: bool) -> list[bool]:
    """Return, for each of a step's two micro-batches, whether gradients have been reduced over ranks after it."""
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
