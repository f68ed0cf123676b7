"""Recovery accumulates moments and u while the weights stay fixed, and training then starts from this state."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from small_runs import log_u, newest_checkpoint, read_options, records, train, weights
from tars import write_pairs
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import SCALAR, StateFiles
from neuclip_ds.errors import UserError
from neuclip_ds.training.recovery import check_temperature

TUNE = ["--objective.method=tuneclip", "--optimizer.warmup_steps=0", "--objective.temperature.initial=0.05"]
ENGINES = ["zero0_bf16", "zero1_fp32", "zero2_bf16_offload", "zero3_fp32", "zero3_bf16_offload"]
FULL = ["--recovery.epochs=2"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_pairs(tmp_path_factory.mktemp("recovery") / "shards", [13, 13]))


def run(runs: Path, shards: str, steps: int, *options: str, ranks: int = 1) -> str:
    done = train(runs, shards, steps, *TUNE, *options, ranks=ranks)
    return done.stderr


def recovered(runs: Path) -> Path:
    return max((runs / "run" / "recovery" / "checkpoints").glob("step_*"))


def moments(checkpoint: Path) -> dict[str, Tensor]:
    files = StateFiles(checkpoint / "state")
    return {f"{kind} {name}": files.read(name, kind) for name in files.shapes for kind in ("exp_avg", "exp_avg_sq")}


def counts(checkpoint: Path) -> set[float]:
    files = StateFiles(checkpoint / "state")
    return {float(value) for name in files.shapes for value in files.replicated(SCALAR, f"{name}/").values()}


def test_weights_stand_still_while_moments_and_u_gather(shards: str, tmp_path: Path) -> None:
    stands_still("zero1_bf16", 1, shards, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_stand_still_on_two_ranks(engine: str, shards: str, tmp_path: Path) -> None:
    stands_still(engine, 2, shards, tmp_path)


def stands_still(engine: str, ranks: int, shards: str, tmp_path: Path) -> None:
    """Check two epochs of recovery, of 4 steps each, and the training step that follows."""
    chosen = f"--deepspeed={engine}"
    run(tmp_path / "tuned", shards, 1, *FULL, chosen, ranks=ranks)
    # a run with a learning rate of 0 gives the initial weights
    run(tmp_path / "start", shards, 1, chosen, "--optimizer.lr=0", ranks=ranks)
    before, after = weights(newest_checkpoint(tmp_path / "start")), weights(recovered(tmp_path / "tuned"))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.isfinite(log_u(recovered(tmp_path / "tuned"))).all()
    assert all(value.abs().max() > 0 for name, value in moments(recovered(tmp_path / "tuned")).items())
    assert counts(recovered(tmp_path / "tuned")) == {8.0}
    assert counts(newest_checkpoint(tmp_path / "tuned")) == {9.0}, "the count of steps is carried on"
    trained = weights(newest_checkpoint(tmp_path / "tuned"))
    assert any(not torch.equal(trained[name], before[name]) for name in before)


def test_training_starts_without_the_moments_that_restore_omits(shards: str, tmp_path: Path) -> None:
    run(tmp_path, shards, 1, "--recovery.epochs=1", "--recovery.restore=[]")
    assert counts(recovered(tmp_path)) == {4.0}
    assert counts(newest_checkpoint(tmp_path)) == {1.0}


@pytest.mark.slow
def test_restore_chooses_the_state_that_training_starts_from(shards: str, tmp_path: Path) -> None:
    def after(name: str, *options: str) -> Path:
        run(tmp_path / name, shards, 1, *FULL, *options)
        return newest_checkpoint(tmp_path / name)

    both = after("both")
    again = after("again", f"--recovery.reuse={tmp_path}/both/run")
    assert not (tmp_path / "again" / "run" / "recovery").exists()
    for found, wanted in ((weights(again), weights(both)), (moments(again), moments(both))):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(log_u(again), log_u(both))

    only_u = after("u", f"--recovery.reuse={tmp_path}/both/run", '--recovery.restore=["statistics"]')
    assert counts(only_u) == {1.0}
    assert torch.isfinite(log_u(only_u)).all()
    own_u = after("own_u", '--recovery.restore=["statistics"]')
    assert all(torch.equal(weights(own_u)[name], value) for name, value in weights(only_u).items())
    only_moments = after("moments", f"--recovery.reuse={tmp_path}/both/run", '--recovery.restore=["moments"]')
    assert counts(only_moments) == {9.0}
    assert torch.isneginf(log_u(only_moments)).any()


@pytest.mark.slow
def test_an_interrupted_recovery_resumes(shards: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", shards, 2, *FULL)
    train(tmp_path / "broken", shards, 2, *TUNE, "--recovery.epochs=1")
    shutil.rmtree(tmp_path / "broken" / "run" / "checkpoints")  # as if the run had stopped during its recovery
    said = run(tmp_path / "broken", shards, 2, *FULL)
    assert ", 4 of 8 steps done" in said
    for part in (weights, moments):
        found, wanted = (part(newest_checkpoint(tmp_path / name)) for name in ("broken", "whole"))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_other_weights_are_refused(shards: str, tmp_path: Path) -> None:
    run(tmp_path / "first", shards, 1, *FULL)
    reuse = [f"--recovery.reuse={tmp_path}/first/run", "--recovery.epochs=2"]
    for options, message in (
        ([f"--recovery.reuse={tmp_path}/absent"], "contains no complete checkpoint"),
        (["--recovery.epochs=0"], "set recovery.epochs to its value in the reused run"),
        (["--recovery.epochs=3"], "ended after 8 steps, but recovery.epochs=3 is 12 steps: finish this recovery"),
        (["--run.seed=1"], "was recovered with weights that differ"),
        (["--objective.epoch_steps=5"], "objective.epoch_steps cannot be combined with recovered statistics"),
        (["--objective.temperature.initial=0.06"], "contains u at the temperature 0.05, but this run starts at 0.06"),
        (["--optimizer.name=lion"], "contains moments of optimizer.name=adamw"),
    ):
        done = train(tmp_path / "second", shards, 1, *TUNE, *reuse, *options, code=2)
        assert message in done.stderr and "Traceback" not in done.stderr


def test_u_at_another_temperature_is_refused() -> None:
    check_temperature(Path("recovered"), torch.tensor(0.05).log().exp(), float(torch.tensor(0.05)))
    for recovered_tau, fix in (
        (torch.tensor(0.06), "set objective.temperature.initial=0.06"),
        (None, "recover again with recovery.loss=gcl"),
    ):
        with pytest.raises(UserError, match=fix):
            check_temperature(Path("recovered"), recovered_tau, 0.05)


def moments_of_a_method(method: str, shards: str, folder: Path, *options: str) -> None:
    """Check that recovery accumulates moments for an epoch at fixed weights and temperature; then train one step."""
    recovery = ["--recovery.epochs=1", "--recovery.loss=method", "--run.log_every=1"]
    chosen = [f"--objective.method={method}", *recovery]
    said = run(folder, shards, 1, *read_options([*chosen, *options]))
    assert re.search("loaded moments( and statistics)? from the recovery in ", said)
    assert counts(recovered(folder)) == {4.0}
    assert counts(newest_checkpoint(folder)) == {5.0}
    assert all(value.abs().max() > 0 for value in moments(recovered(folder)).values())
    lines = records(folder / "run" / "recovery" / "metrics.jsonl")
    assert len({line["tau"] for line in lines if "tau" in line}) == 1, "the temperature stands still"
    run(folder / "still", shards, 1, *read_options([f"--objective.method={method}", *options]), "--optimizer.lr=0")
    before, after = weights(newest_checkpoint(folder / "still")), weights(recovered(folder))
    assert all(torch.equal(after[name], before[name]) for name in before)


NEUCLIP = ("--objective.npn.prototypes=8", "--objective.npn.redraw_every=4", "--objective.temperature.lr=1e-2")


def test_a_method_without_u_recovers_moments(shards: str, tmp_path: Path) -> None:
    moments_of_a_method("neuclip", shards, tmp_path, *NEUCLIP)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["openclip", "siglip", "amorlip", "neuclip_queue", "isogclr", "fastclip_v3"])
def test_every_kind_of_method_recovers_moments(method: str, shards: str, tmp_path: Path) -> None:
    moments_of_a_method(method, shards, tmp_path, "--objective.queue.size=8")


@pytest.mark.slow
def test_moments_of_a_method_without_u_bring_no_u(shards: str, tmp_path: Path) -> None:
    run(tmp_path / "first", shards, 1, "--objective.method=openclip", "--recovery.epochs=1")
    assert counts(recovered(tmp_path / "first")) == {4.0}
    reuse = f"--recovery.reuse={tmp_path}/first/run"
    done = train(tmp_path / "second", shards, 1, *TUNE, reuse, "--recovery.epochs=1", code=2)
    assert "was recovered with the loss of openclip, which does not keep u" in done.stderr
    run(tmp_path / "second", shards, 1, reuse, '--recovery.restore=["moments"]')
    assert counts(newest_checkpoint(tmp_path / "second")) == {5.0}
