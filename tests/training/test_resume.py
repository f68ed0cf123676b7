"""A killed run that is restarted with the same command ends bit-identical to an uninterrupted run."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from small_checkpoints import DATA, PlainEngine, keeper, trained
from small_runs import SMALL, TRAIN, call, lines_in, outcome, read_options, start, wait_for

from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse
from neuclip_ds.reporting.events import read_events
from neuclip_ds.reporting.history import read_launches
from neuclip_ds.training.checks import fingerprint

TINY = [
    "--data.batch_size=16",
    "--data.workers=1",
    "--data.micro_batch=8",
    *SMALL,
    "--objective.method=neuclip",
    "--objective.npn.prototypes=64",
    "--objective.npn.redraw_every=5",
    "--run.checkpoint_every=3",
    "--run.log_every=1",
    "--max_steps=12",  # into the second epoch
]


def command(shards: Path, runs: Path, name: str, *options: str) -> list[str]:
    where = [f"--data.train={shards}", f"--run.output_dir={runs}", f"--run.name={name}"]
    return [TRAIN, "demo", *where, *read_options([*TINY, *options])]


def kill_after(command: list[str], metrics: Path, steps: int, ranks: int = 1) -> None:
    """Start the command, and kill it and its workers once `steps` steps have been logged."""
    programs = start(*command, ranks=ranks)
    wait_for(lambda: lines_in(metrics) >= steps, programs)
    for program in programs:
        program.kill()


def whole_and_broken(
    shards: Path, runs: Path, *options: str, ranks: int = 1, kills: Sequence[int] = (4, 7)
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the outcomes of an uninterrupted run and of a run that is killed after each number of steps in `kills`."""
    call(*command(shards, runs, "whole", *options), ranks=ranks)
    broken_off = command(shards, runs, "broken", *options)
    for steps in kills:
        kill_after(broken_off, runs / "broken" / "metrics.jsonl", steps, ranks)
    call(*broken_off, ranks=ranks)
    return outcome(runs, "whole"), outcome(runs, "broken")


def compare(
    shards: Path, runs: Path, *options: str, tensors: int = 3 * 30, ranks: int = 1, kills: Sequence[int] = (4, 7)
) -> None:
    whole, broken = whole_and_broken(shards, runs, *options, ranks=ranks, kills=kills)
    assert len(whole["metrics"]) == 13  # type: ignore[arg-type]
    assert whole.keys() == broken.keys()
    assert sum(isinstance(value, bytes) for value in whole.values()) > tensors, "weights and both moments"
    assert whole["global_steps"] == 12
    assert [key for key in whole if whole[key] != broken[key]] == []


def test_a_killed_run_that_resumes_ends_bit_identical_to_an_uninterrupted_run(shards: Path, tmp_path: Path) -> None:
    compare(shards, tmp_path, "--deepspeed=zero1_bf16", kills=[7])


STAGES = [(f"zero{stage}_{precision}", "neuclip") for stage in range(4) for precision in ("fp32", "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "method"), [*STAGES, ("zero1_fp32", "fastclip_v3"), ("zero1_fp32", "openclip")])
def test_a_run_killed_twice_resumes_under_every_stage_precision_and_kind_of_method(
    engine: str, method: str, shards: Path, tmp_path: Path
) -> None:
    compare(shards, tmp_path, f"--deepspeed={engine}", f"--objective.method={method}")


PARTS = [
    "--model.vision.trainable=0",
    "--model.lora.rank=2",
    "--model.lora.dropout=0.1",
    "--optimizer.layer_decay=0.5",
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1_bf16", "zero3_fp32"])
def test_a_run_with_frozen_parts_and_adapters_resumes_with_the_same_options_only(
    engine: str, shards: Path, tmp_path: Path
) -> None:
    compare(shards, tmp_path, f"--deepspeed={engine}", *PARTS, tensors=30 + 2 * 15)
    changed = [f"--deepspeed={engine}", *PARTS, "--model.lora.dropout=0.2", "--max_steps=13"]
    refused = call(*command(shards, tmp_path, "whole", *changed), code=2)
    assert "model.lora=" in refused.stderr


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("neuclip", "objective.npn.network=mlp"),
        ("neuclip", "objective.npn.order=joint"),
        ("neuclip", "objective.npn.optimizer=adagrad"),
        ("neuclip", "objective.npn.prototypes=32"),
        ("neuclip_queue", "objective.queue.size=32"),
        ("amorlip", "objective.amortized.width=0.5"),
    ],
)
def test_a_run_resumes_only_with_the_options_that_shape_the_state_of_its_loss(
    method: str, option: str, tmp_path: Path
) -> None:
    before = fingerprint(parse(["demo", f"--objective.method={method}"]).config)
    after = fingerprint(parse(["demo", f"--objective.method={method}", f"--{option}"]).config)
    name = option.partition("=")[0]
    assert [key for key in before if before[key] != after[key]] == [name]
    checkpoints = keeper(tmp_path)
    checkpoint = checkpoints.save(1, PlainEngine(1.0), trained(), before, DATA)
    assert checkpoints.read(checkpoint, before)[0] == 1
    with pytest.raises(UserError, match=f"use the checkpoint's {name}"):
        checkpoints.read(checkpoint, after)


def test_a_resume_with_other_compilation_records_an_event(shards: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "uncompiled.py"
    plugin.write_text("import torch\ntorch.compile = lambda function, **_: function\n")
    for steps, compilation in ((2, "false"), (4, "blocks"), (6, "blocks")):
        options = [f"--model.compile={compilation}", f"--max_steps={steps}", "--objective.method=openclip"]
        call(*command(shards, tmp_path, "run", *options), f"--plugin={plugin}")
    events = list(read_events(tmp_path / "run"))
    assert [(event.step, event.kind) for event in events] == [(3, "compilation_changed")]

    first, second, third = read_launches(tmp_path / "run")
    assert dict(first.changes) == {}
    assert dict(second.changes) == {"model.compile": (False, "blocks"), "max_steps": (2, 4)}
    assert (second.first_step, second.last_step, dict(third.changes)) == (2, 4, {"max_steps": (4, 6)})
    assert "max_steps is 4; in the previous launch, it was 2" in (tmp_path / "run" / "log.txt").read_text()
