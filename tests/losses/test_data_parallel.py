"""On two ranks, the page's DDP and FSDP2 loops give the project trainer's weights and gradients."""

import re
import textwrap
from typing import Any

import pytest
import torch
from build import accumulated
from ranks import run_ranks
from replay import (
    EPOCHS,
    LR,
    Encoders,
    Trained,
    assert_equal,
    code_blocks,
    full_tensor,
    pairs,
    recorded,
    replay_encoders,
    run_code,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import ContrastiveLoss

RANKS, ROWS = 2, 4


def _on_ranks(communicator: Communicator, method: str) -> dict[str, Trained]:
    """Train with each variant of the loop."""
    results: dict[str, Trained] = {}
    for name, code in loops().items():
        names: dict[str, Any] = {"encoders": Encoders(), "pairs": pairs()}
        names |= {"epochs": EPOCHS, "rows": ROWS, "lr": LR, "device": "cpu", "micro": 2, "torch": torch}
        with recorded() as calls:
            names = run_code(code, method, names)
        results[name] = Trained.of(names["encoders"], names["loss_fn"].temperature, calls)
    return results


def loops() -> dict[str, str]:
    """Return the page's code for each variant of the loop."""
    (ddp,) = code_blocks("DDP")
    (shard,) = code_blocks("FSDP2")
    (overlap,) = code_blocks("Send features while the towers run")
    (micro,) = code_blocks("Micro-batches")
    wrapping = "model = DistributedDataParallel(encoders)\n"
    assert wrapping in ddp
    fsdp2 = ddp.replace(wrapping, shard)
    in_float64 = ("device=device, **steps", "device=device, dtype=torch.float64, **steps")  # `begin` needs the dtype
    return {
        "ddp": ddp,
        "fsdp2": fsdp2,
        "ddp with begin": with_step(ddp, overlap).replace(*in_float64),
        "fsdp2 with begin": with_step(fsdp2, overlap).replace(*in_float64),
        "ddp in micro-batches": with_step(ddp, micro),
        "fsdp2 in micro-batches": with_step(fsdp2, micro),
    }


def with_step(loop: str, step: str) -> str:
    """Return a loop's code with its loss and backward pass replaced by the code in `step`."""
    lines = r"^( +)loss = loss_fn\(.*\n +loss\.backward\(\)\n"
    assert re.search(lines, loop, re.MULTILINE)
    return re.sub(lines, lambda match: textwrap.indent(step, match[1]), loop, flags=re.MULTILINE)


@pytest.mark.parametrize("method", ["neuclip", pytest.param("fastclip_v3", marks=pytest.mark.slow)])
def test_every_loop_equals_the_trainer(method: str) -> None:
    ranks = run_ranks(RANKS, _on_ranks, method)
    calls = [rank["ddp"].calls for rank in ranks]
    expected = replay_encoders(calls, method)
    for name in loops():
        for rank, calls_of_rank in zip(ranks, calls, strict=True):
            result = rank[name]
            assert len(result.calls) == len(calls_of_rank)
            for call, same_call in zip(result.calls, calls_of_rank, strict=True):
                assert torch.equal(call.index, same_call.index) and call.lr == same_call.lr
            assert result.gradients
            assert_equal(result, expected, name)


def _after_each_micro_batch(communicator: Communicator) -> list[list[bool]]:
    """Return, for DDP and FSDP2, whether gradients have been reduced over ranks after each of two micro-batches."""
    return [_reduced(communicator, shards) for shards in (False, True)]


def _reduced(communicator: Communicator, shards: bool) -> list[bool]:
    encoders = Encoders()
    model: nn.Module = encoders
    if shards:
        fully_shard(encoders, mesh=init_device_mesh("cpu", (RANKS,)))
    else:
        model = DistributedDataParallel(encoders)
    local_pairs = pairs()[communicator.rank :: RANKS][:ROWS]
    images = torch.stack([image for image, _ in local_pairs])
    texts = torch.stack([text for _, text in local_pairs])
    parts = list(zip(images.split(2), texts.split(2), strict=True))
    reduced = []
    for _ in accumulated(ContrastiveLoss("openclip", dim=6), model, parts):
        gradient = next(encoders.parameters()).grad
        everywhere = None if gradient is None else communicator.all_gather(full_tensor(gradient)[None], "control")
        reduced.append(everywhere is not None and bool(everywhere.eq(everywhere[0]).all()))
    return reduced


def test_gradients_are_reduced_in_the_last_micro_batch_only() -> None:
    ddp_and_fsdp2 = [[False, True], [False, True]]
    assert run_ranks(RANKS, _after_each_micro_batch) == [ddp_and_fsdp2] * RANKS
