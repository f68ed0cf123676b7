"""Test the moving average of the weights in every ZeRO stage: its values, its use and its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import Layers, gathered_weights, save_engine, small_engine
from torch import Tensor, nn

from neuclip_ds.checkpoint.engine_state import load_engine
from neuclip_ds.checkpoint.sharded_state import WEIGHT, StateFiles
from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.average import AVERAGE, WeightAverage, discard_average
from neuclip_ds.engine.engine import Engine
from neuclip_ds.errors import UserError

STAGES = [f"zero{stage}_{precision}" for stage in range(4) for precision in ("fp32", "bf16")]
STAGES += ["zero2_bf16_offload", "zero3_bf16_offload"]
QUICK = ["zero0_fp32", "zero3_bf16"]
DECAY = 0.3  # from the third step on; before that 2/11 and 3/12
ROWS = 4


def build(name: str, communicator: Communicator, seed: int = 0) -> Engine:
    torch.manual_seed(seed)
    net = Layers(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 7, bias=False))
    net.get_parameter("0.bias").requires_grad_(False)
    return small_engine(net, OptimizerConfig(lr=0.1), name, ROWS, communicator)


def step(engine: Engine, number: int) -> None:
    rows = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
    output: Any = engine(rows.to(next(engine.module.parameters()).dtype), None)
    engine.backward((output.float() + 0.5).square().mean())
    engine.step(lr=0.1)


def tensors_of_kind(files: StateFiles, kind: str) -> dict[str, Tensor]:
    return {name: files.read(name, kind) for name in files.shapes if kind in files.kinds(name)}


def average_of_four_steps(communicator: Communicator, folder: Path, names: list[str]) -> None:
    for name in names:
        engine = build(name, communicator)
        average = WeightAverage(engine, DECAY)
        expected: dict[str, Tensor] = {}
        for number in range(1, 5):
            step(engine, number)
            average.update(number)
            files = save_engine(folder / name / str(number), engine, communicator)
            expected = moved_toward(expected, tensors_of_kind(files, WEIGHT), number)
            if number == 2:
                check_average_in_use(engine, average, tensors_of_kind(files, AVERAGE))
        found = tensors_of_kind(StateFiles(folder / name / "4"), AVERAGE)
        assert found.keys() == {"0.weight", "1.weight", "1.bias", "2.weight"}, "the frozen bias has none"
        for key, value in found.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=f"{name} {key}")


def moved_toward(before: dict[str, Tensor], now: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return the expected average, computed from the float32 weights."""
    decay = min(DECAY, (1 + number) / (10 + number))
    return {name: decay * before.get(name, now[name]) + (1 - decay) * now[name] for name in now}


def check_average_in_use(engine: Engine, average: WeightAverage, wanted: dict[str, Tensor]) -> None:
    """Check that the module uses the average, cast to its dtype, and then the original weights, bit for bit."""
    before = gathered_weights(engine.module)
    with average.in_use():
        used = gathered_weights(engine.module)
    after = gathered_weights(engine.module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(used[name].view(-1), wanted[name].to(used[name].dtype)) for name in wanted)
    assert not torch.equal(used["2.weight"], before["2.weight"])


def load_elsewhere(communicator: Communicator, folder: Path, names: list[str]) -> None:
    """Check that a different number of ranks and ZeRO stage restores every bit, and can update or drop the average."""
    for name in names:
        other = STAGES[(STAGES.index(name) + 2) % len(STAGES)]
        engine = build(other, communicator, seed=1)
        load_engine(folder / name / "4", engine, communicator)
        again = save_engine(folder / name / "again", engine, communicator)
        first = StateFiles(folder / name / "4")
        for kind in (AVERAGE, WEIGHT):
            found, wanted = tensors_of_kind(again, kind), tensors_of_kind(first, kind)
            assert found.keys() == wanted.keys()
            trained = [key for key in wanted if key != "0.bias"]
            assert all(torch.equal(found[key], wanted[key]) for key in trained), (name, kind)
        step(engine, 5)
        WeightAverage(engine, DECAY).update(5)
        moved = tensors_of_kind(save_engine(folder / name / "moved", engine, communicator), AVERAGE)
        assert not torch.equal(moved["2.weight"], tensors_of_kind(first, AVERAGE)["2.weight"])
        discard_average(engine)
        without = save_engine(folder / name / "without", engine, communicator)
        assert tensors_of_kind(without, AVERAGE) == {}
        with pytest.raises(UserError, match="contains no average of the weights"):
            without.weights(average=True)
        step(engine, 6)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in STAGES if name not in QUICK], marks=pytest.mark.slow)]
)
def test_the_average_follows_the_master_weights_and_survives_resharding(names: list[str], tmp_path: Path) -> None:
    run_ranks(2, average_of_four_steps, tmp_path, names)
    run_ranks(1, load_elsewhere, tmp_path, names)
