"""Replicated state is compared across ranks before each checkpoint, and the error names the rank that differs."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from small_runs import SMALL, read_options, train_connected

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.replicas import bit_hash
from neuclip_ds.training.trainer import Loop, StepResult

OPTIONS = [*SMALL, "--data.batch_size=12", "--data.val=", "--data.zero_shot=", "--data.workers=0", "--max_steps=4"]


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit of the first element of a float32 or bf16 tensor, in place."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(-1).view(integers)[0] ^= 1 << 12


class FlipBits(Hook):
    """Hook that flips one bit of each of the named tensors after a step, if `flips` is true on this rank."""

    def __init__(self, flips: bool, step: int, names: Sequence[str]) -> None:
        self._flips = flips
        self._step = step
        self._names = names

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if self._flips and result.step == self._step:
            weights = dict(loop.context.engine.module.named_parameters())
            tensors = {**weights, **loop.loss.function.replicated_state()}
            for name in self._names:
                flip(tensors[name])


Case = tuple[list[str], list[str], int]  # options, names of tensors, step


def error_messages(communicator: Communicator, cases: list[Case], shards: Path, runs: Path) -> list[str]:
    """Train each case while bits of the named tensors flip on the last rank; return the error, or "", of each."""
    messages = []
    for number, (options, names, step) in enumerate(cases):
        where = [f"--data.train={shards}", f"--run.output_dir={runs}", f"--run.name={number}"]
        config = parse(["demo", *read_options([*OPTIONS, *options]), *where]).config
        is_last_rank = communicator.rank == communicator.world_size - 1
        hook = FlipBits(is_last_rank, step, names)
        try:
            train_connected(communicator, config, hook)
            messages.append("")
        except TrainingDiverged as error:
            messages.append(str(error))
    return messages


V3, MLP = ["--objective.method=fastclip_v3"], ["--objective.method=neuclip", "--objective.npn.network=mlp"]
WEIGHT = "vision.trunk.patch_embed.proj.weight"


def test_a_flipped_bit_of_one_rank_ends_the_run_before_the_next_checkpoint(shards: Path, tmp_path: Path) -> None:
    every = "--run.checkpoint_every=2"
    cases: list[Case] = [
        ([*V3, every, "--deepspeed=zero0_fp32"], ["temperature.theta"], 3),
        ([*MLP, every, "--deepspeed=zero1_bf16"], ["normalizer.weights", WEIGHT], 4),
    ]
    ranks = run_ranks(3, error_messages, cases, shards, tmp_path)
    assert ranks[0] == ranks[1] == ranks[2]
    for number, ((_, names, _), message) in enumerate(zip(cases, ranks[0], strict=True)):
        assert message.startswith("step 4: ")
        for name in names:
            assert name in message
        assert "bits on all ranks, but those of rank 2 differ: test the memory" in message
        saved = complete_checkpoints(tmp_path / str(number) / "checkpoints")
        assert [path.name for path in saved] == ["step_000000002"]


def test_a_difference_between_two_ranks_names_both(shards: Path, tmp_path: Path) -> None:
    options = [*V3, "--run.checkpoint_every=1", "--max_steps=2"]
    for (drifted,) in run_ranks(2, error_messages, [(options, ["temperature.theta"], 2)], shards, tmp_path):
        assert drifted.startswith("step 2: ")
        assert "temperature.theta must have the same bits on all ranks, but ranks 0 and 1 differ: test" in drifted


@pytest.mark.slow
def test_state_that_may_differ_between_ranks_is_not_compared(shards: Path, tmp_path: Path) -> None:
    nothing_alike = ["--objective.method=fastclip_v2", "--deepspeed=zero3_fp32", "--run.checkpoint_every=1"]
    nets = ["--objective.method=amorlip", "--objective.amortized.gather=fits", "--objective.amortized.online_every=2"]
    cases: list[Case] = [
        ([*nothing_alike, "--max_steps=1"], [], 0),
        ([*nets, "--objective.epoch_steps=3", "--run.checkpoint_every=1"], [], 0),
    ]
    for divided, fitted_apart in run_ranks(2, error_messages, cases, shards, tmp_path):
        assert not divided
        assert not fitted_apart, "every rank fits the same nets to all rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_bit_and_every_position_changes_the_hash(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (40,)).to(dtype)
    before, whole = x.clone(), int(bit_hash(x))
    words = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    for place in (0, 1, 39):
        for bit in range(1 if dtype == torch.bool else 8 * x.element_size() - 1):
            words[place] ^= 1 << bit
            assert int(bit_hash(x)) != whole, (place, bit)
            words[place] ^= 1 << bit
    assert torch.equal(x, before), "the hash only reads"
    assert int(bit_hash(torch.tensor([1.0, 2.0]))) != int(bit_hash(torch.tensor([2.0, 1.0])))
