"""Run steps of DeepSpeed's engine as one of many ranks, and check the waits for the GPU and the order of collectives.

This package waits for the device once per step, to read the gradient norm. DeepSpeed also waits, to detect overflows,
to clip, and under ZeRO 3 to synchronize its side streams; no option turns these waits off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarking import synthetic_profile
from benchmarking.run_loss import build_loss
from fake_cuda import DEVICE, calling_file, fake_cuda, fake_ranks
from small_runs import SMALL as SMALL_MODEL
from test_step import TOKENS, config_of, data
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.start import start_engine
from neuclip_ds.losses.base import Position
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.recipe import parse
from neuclip_ds.training.step import train_step

RANK = 3
RANKS = 8
ROWS = 4
STEPS = 3  # NeuCLIP's network predicts in the third step
METHODS = ("openclip", "siglip", "fastclip_v3", "isogclr", "amorlip", "neuclip")  # one of each kind
SMALL = {"vision": {"options": {"depth": 1}}}
SAMPLES = 1024
WEIGHT = 0.1  # value of all weights, so that all shards are alike
DEEPSPEED_WAITS = {
    "zero0_fp32": 2,  # two constants for clipping
    "zero0_bf16": 48,  # whether the gradient overflows, for each of 40 parameters, and the norm
    "zero1_fp32": 5,  # a constant and whether the norm is finite, for two groups; whether the total is finite
    "zero2_fp32": 5,
    "zero1_bf16": 3,  # a constant, whether the norm is finite, and whether to clip
    "zero2_bf16": 6,  # the waits of zero2_fp32, and whether a gradient overflows
    "zero3_fp32": 5,  # the reduction stream, two constants, whether the norm is finite, and the whole device
    "zero3_bf16": 5,
}


def run_steps(
    file: str, cases: Sequence[tuple[str, int]], device: str | torch.device = "cpu", steps_per_case: int = STEPS
) -> Iterator[Any]:
    """Run the steps of each (method, passes) case on one engine, and yield the case before each step."""
    communicator = Communicator(device)
    options: dict[str, Any] = {"data": {"batch_size": ROWS * communicator.world_size}, "model": SMALL}
    config = config_of("openclip", file, **options)
    model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
    for weight in model.parameters():
        nn.init.constant_(weight, WEIGHT)
    model.to(device).to = lambda *_: model  # type: ignore[method-assign]  # has references, so must not move again
    engine = start_engine(model, config.optimizer, load_engine_config(config, communicator.world_size), communicator)
    first = communicator.rank * SAMPLES // communicator.world_size
    index = torch.arange(first, first + ROWS)  # samples whose statistics this rank stores
    losses = []
    for method, _ in cases:
        losses.append(build_loss(config_of(method, file, **options), 16, SAMPLES, communicator, torch.float32))
    for case, loss in zip(cases, losses, strict=True):
        batches = DeviceBatches(communicator.device, ROWS // case[1])
        for number in range(steps_per_case):
            yield case
            larger = data(number)
            batch = Batch(larger.image[:ROWS], larger.tokens[:ROWS], index, larger.valid[:ROWS])
            batches.start(iter([RankBatch([batch])]))
            position = Position(step=number, lr=0.0, peak_lr=0.0)
            assert train_step(engine, loss, batches, next(batches), position).applied, case


@pytest.mark.parametrize(
    "file", [file if file == "zero1_bf16" else pytest.param(file, marks=pytest.mark.slow) for file in DEEPSPEED_WAITS]
)
def test_this_package_waits_once_in_a_step(file: str) -> None:
    waits_of_last_step: dict[int, Counter[str]] = {}
    with fake_cuda() as gpu, fake_ranks(RANK, RANKS):
        for _, passes in run_steps(file, [("fastclip_v3", 1), ("fastclip_v3", 2)], DEVICE, steps_per_case=2):
            gpu.syncs = Counter()
            waits_of_last_step[passes] = gpu.syncs
    for passes, waits in waits_of_last_step.items():
        in_deepspeed = Counter({name: count for name, count in waits.items() if name.startswith("deepspeed")})
        streams = passes - 1 if file.startswith("zero3") else 0  # one for each additional backward pass
        assert in_deepspeed.total() == DEEPSPEED_WAITS[file] + streams, in_deepspeed
        # without ZeRO, DeepSpeed returns the norm of a bf16 gradient as a Python number
        assert waits - in_deepspeed == ({} if file == "zero0_bf16" else {"engine/engine.py": 1})


class Collectives(TorchDispatchMode):
    """Record the operation, process group, shapes and dtypes of each collective.

    The fake group gathers copies of this rank's tensor. Gathered weights are then set to `WEIGHT`, as on real ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.groups: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "c10d":
            return result
        group = next(x for x in args if isinstance(x, torch.ScriptObject))
        self.groups.add(dist.ProcessGroup.unbox(group).group_name)
        tensors = [(x.shape, x.dtype) for x in tree_leaves(args) if isinstance(x, Tensor)]
        self.calls.append((str(func), *tensors))
        if "allgather" in str(func) and calling_file().startswith("deepspeed"):
            for gathered in tree_leaves(args[0]):
                gathered.fill_(WEIGHT)
        return result


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [(1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 8), (1, 64), (3, 64)))],
)
def test_all_ranks_call_the_same_collectives(stage: int, ranks: int) -> None:
    """All ranks use one group, in the same order; otherwise, ranks would wait for each other forever."""
    calls_of_rank_zero: list[tuple[Any, ...]] = []
    for rank in range(ranks):
        with fake_ranks(rank, ranks, on_gpu=False), Collectives() as recorded:
            for case in run_steps(f"zero{stage}_fp32", [(method, 2) for method in METHODS]):
                recorded.calls.append(case)
        calls_of_rank_zero = calls_of_rank_zero or recorded.calls
        assert recorded.calls == calls_of_rank_zero, f"rank {rank}"
        assert len(recorded.groups) == 1
    assert {(method, 2) for method in METHODS} <= set(calls_of_rank_zero)
    assert len(calls_of_rank_zero) > 10 * STEPS * len(METHODS)


@pytest.mark.slow
def test_the_step_benchmark_prefetches_batches_as_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would wait for a copy of more than 64 KB from pageable memory, in `engine/device_batches.py`."""

    def start(model: Any, *args: Any) -> Any:
        model.to(DEVICE).to = lambda *_: model  # has references, so must not move again
        return start_engine(model, *args)

    monkeypatch.setattr(synthetic_profile, "start_engine", start)
    tiny = [*SMALL_MODEL, "--objective.method=openclip", f"--data.batch_size={RANKS * 128}", "--deepspeed=zero1_bf16"]
    with fake_cuda() as gpu, fake_ranks(RANK, RANKS):
        steps = synthetic_profile.SyntheticSteps(parse(["demo", *tiny]).config, Communicator(DEVICE), batches=2)
        for number in range(3):
            gpu.syncs = Counter()
            assert steps.run(number).applied
    waits = {name: count for name, count in gpu.syncs.items() if not name.startswith("deepspeed")}
    assert waits == {"engine/engine.py": 1}
