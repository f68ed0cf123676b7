"""Engine state saved with one number of ranks, ZeRO stage and precision can be resumed with different ones."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from small_checkpoints import Layers, gathered_weights, save_engine, small_engine
from torch import Tensor, nn

from neuclip_ds.checkpoint.engine_state import load_engine
from neuclip_ds.checkpoint.sharded_state import BUFFER, SCALAR, WEIGHT, StateFiles
from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.engine import Engine
from neuclip_ds.errors import UserError

OPTIMIZERS = {
    "adamw": (["exp_avg", "exp_avg_sq"], ["step"]),
    "lamb": (["exp_avg", "exp_avg_sq"], ["step"]),
    "lion": (["exp_avg"], []),
    "sgd": (["momentum_buffer"], []),
}
STAGES = [f"zero{stage}_{precision}" for precision in ("fp32", "bf16") for stage in range(4)]
ROWS = 12
FROZEN = "1.bias"
Case = tuple[str, str]  # optimizer, name in ds_configs/
QUICK: list[Case] = [  # each of DeepSpeed's wrappers around the optimizer, and an optimizer without a second moment
    ("adamw", "zero0_fp32"),
    ("adamw", "zero0_bf16"),
    ("adamw", "zero1_bf16"),
    ("adamw", "zero2_fp32"),
    ("adamw", "zero3_bf16"),
    ("lion", "zero1_fp32"),
]


def build(case: Case, communicator: Communicator, seed: int, embedding: int = 5) -> Engine:
    """Return an engine with buffers and parameters, one frozen; two or three ranks cannot split all sizes evenly."""
    torch.manual_seed(seed)
    net = Layers(
        nn.Embedding(embedding, 3), nn.Linear(3, 5), nn.BatchNorm1d(4), nn.LayerNorm(5), nn.Conv1d(4, 7, 1, bias=False)
    )
    net.get_parameter(FROZEN).requires_grad_(False)
    return small_engine(net, OptimizerConfig(name=case[0], lr=0.1), case[1], ROWS, communicator)  # type: ignore[arg-type]


def train(engine: Engine, communicator: Communicator, steps: range) -> None:
    share = ROWS // communicator.world_size
    for step in steps:
        tokens = torch.randint(0, 5, (ROWS, 4), generator=torch.Generator().manual_seed(step))  # (B, 4)
        mine = tokens[communicator.rank * share : (communicator.rank + 1) * share]
        output: Any = engine(mine, None)
        engine.backward((output + 0.5).square().mean())
        engine.step(lr=0.1 / (step + 1))


def case_folder(folder: Path, case: Case) -> Path:
    return folder / "-".join(case)


def train_and_save(communicator: Communicator, folder: Path, cases: list[Case]) -> list[str]:
    """Save each engine after two steps and after a third; return this rank's errors from two loads that must fail."""
    for case in cases:
        engine = build(case, communicator, seed=0)
        train(engine, communicator, range(2))
        save_engine(case_folder(folder, case) / "first", engine, communicator)
        train(engine, communicator, range(2, 3))
        save_engine(case_folder(folder, case) / "whole", engine, communicator)
    good = case_folder(folder, cases[0]) / "first"
    larger = build(cases[0], communicator, seed=0, embedding=6)
    messages = []
    for path, target in ((folder / "nowhere" if communicator.rank else good, engine), (good, larger)):
        try:
            load_engine(path, target, communicator)
        except UserError as error:
            messages.append(str(error))
    return messages


def reshard(
    communicator: Communicator, folder: Path, cases: list[Case], readers: list[str], source: str, target: str
) -> None:
    """Load each case's checkpoint into a different kind of engine and save it again."""
    for case, reader in zip(cases, readers, strict=True):
        engine = build((case[0], reader), communicator, seed=1)
        load_engine(case_folder(folder, case) / source, engine, communicator)
        check_weights(engine, StateFiles(case_folder(folder, case) / source))
        save_engine(case_folder(folder, case) / target, engine, communicator)


def continue_training(communicator: Communicator, folder: Path, cases: list[Case], others: list[str]) -> None:
    """Take the third step from the resharded checkpoint, and also save the resharded one in the other precision."""
    for case in cases:
        engine = build(case, communicator, seed=2)
        load_engine(case_folder(folder, case) / "second", engine, communicator)
        train(engine, communicator, range(2, 3))
        save_engine(case_folder(folder, case) / "broken", engine, communicator)
    reshard(communicator, folder, cases, others, "second", "third")


def check_weights(engine: Engine, files: StateFiles) -> None:
    """Check that the module's weights are the saved master weights, cast to the module's dtype."""
    for name, weight in gathered_weights(engine.module).items():
        saved = files.read(name, WEIGHT).view(files.shapes[name])
        assert torch.equal(weight, saved.to(weight.dtype)), name


def contents(folder: Path) -> dict[str, Tensor]:
    files = StateFiles(folder)
    found = {f"{kind} of {name}": files.read(name, kind) for name in files.shapes for kind in files.kinds(name)}
    for name in files.shapes:
        found.update({f"{kind} of {name}": value for kind, value in files.replicated(SCALAR, f"{name}/").items()})
    found.update({f"counter {name}": torch.tensor(value) for name, value in files.counters.items()})
    return found | files.replicated(BUFFER)


def differing(left: Path, right: Path) -> set[str]:
    found, wanted = contents(left), contents(right)
    assert found.keys() == wanted.keys()
    return {name for name, value in wanted.items() if value.dtype != found[name].dtype or not value.equal(found[name])}


def check_resharding(cases: list[Case], ranks: int, folder: Path) -> list[list[str]]:
    """Reshard from two ranks to `ranks` ranks of the next ZeRO stage; return the errors that the two ranks raised."""
    messages = run_ranks(2, train_and_save, folder, cases)
    following = [f"zero{(int(engine[4]) + 1) % 4}_{engine[6:10]}" for _, engine in cases]
    run_ranks(ranks, reshard, folder, cases, following, "first", "second")
    for case in cases:
        where = case_folder(folder, case)
        assert differing(where / "second", where / "first") == set()
        check_complete(where / "first", case)
        check_complete(where / "second", case)
        moved = differing(where / "whole", where / "first")
        kinds = [WEIGHT, *OPTIMIZERS[case[0]][0]]
        assert moved >= {f"{kind} of {name}" for kind in kinds for name in ("0.weight", "1.weight", "4.weight")}
    return messages


def check_next_step(cases: list[Case], folder: Path) -> None:
    """Reshard back to two ranks of the original ZeRO stage for the third step, and convert to the other precision."""
    others = [f"zero{(int(engine[4]) + 2) % 4}_{'fp32' if 'bf16' in engine else 'bf16'}" for _, engine in cases]
    run_ranks(2, continue_training, folder, cases, others)
    for case in cases:
        where = case_folder(folder, case)
        assert differing(where / "broken", where / "whole") == set()
        in_16_bits = {f"{WEIGHT} of {FROZEN}", *StateFiles(where / "first").replicated(BUFFER)}
        assert differing(where / "third", where / "first") <= in_16_bits, "these have no float32 master"
        check_complete(where / "third", case)


def check_complete(folder: Path, case: Case) -> None:
    """Check that every element is stored exactly once, and that the optimizer's state is complete."""
    kinds, scalars = OPTIMIZERS[case[0]]
    files = StateFiles(folder)
    sizes = {name: shape.numel() for name, shape in files.shapes.items()}
    assert len(sizes) == 8
    for name in sizes:
        trained = name != FROZEN
        assert files.kinds(name) == (sorted([WEIGHT, *kinds]) if trained else [WEIGHT])
        assert sorted(files.replicated(SCALAR, f"{name}/")) == (scalars if trained else [])
        assert all(value == 2 for value in files.replicated(SCALAR, f"{name}/").values())
        assert not trained or files.read(name, WEIGHT).dtype == torch.float32
    written = [
        sum(value.numel() for key, value in load_file(path).items() if not key.endswith("/whole"))
        for path in folder.glob("*.safetensors")
    ]
    assert sum(written) == sum(sizes.values()) * (1 + len(kinds)) - sizes[FROZEN] * len(kinds)
    assert max(written) <= 2 * min(written), "all ranks write"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


def test_loading_with_another_world_size_and_stage_keeps_every_bit(tmp_path: Path) -> None:
    messages = check_resharding(QUICK, 1, tmp_path)
    for missing, foreign in messages:
        assert re.match(r"rank 1 on \S+: .*cannot be read", missing)
        assert "nowhere/index.json" in missing
        assert foreign.startswith("rank 0 on ")
        assert (
            "0.weight of shape (5, 3), but this run's model contains the parameter 0.weight of shape (6, 3)" in foreign
        )


@pytest.mark.slow
@pytest.mark.parametrize("middle", [1, 3])
def test_the_step_after_resharding_is_that_of_an_uninterrupted_run(middle: int, tmp_path: Path) -> None:
    cases = [(name, engine) for name in OPTIMIZERS for engine in STAGES]
    cases += [("adamw", "zero2_bf16_offload"), ("lamb", "zero3_bf16_offload")]
    check_resharding(cases, middle, tmp_path)
    check_next_step(cases, tmp_path)
