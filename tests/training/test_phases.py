"""Phases of a run and learning rates: where they begin, what they train on; a stop in or between changes nothing."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from ranks import run_ranks
from small_runs import TINY, newest_checkpoint, train_connected

from neuclip_ds.checkpoint.sharded_state import StateFiles
from neuclip_ds.config import Config, OptimizerConfig
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.models.towers import DualEncoder, VisionTower
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.loop import Loop, StepResult
from neuclip_ds.training.plan import largest_model, model_for_phases, plan_phases
from neuclip_ds.training.schedule import DataPosition, Phase, Span, fitted_warmup, learning_rate, phase_at

STEPS = 7
PHASES = (
    '--phases=[{"steps":3,"image_size":8,"context_length":6,"patch_drop":0},{"steps":2,"patch_drop":0.5},'
    '{"patch_drop":0,"lr":0.01,"warmup_steps":1}]'
)


def config_of(*options: str) -> Config:
    return parse([*TINY, *options]).config


def planned(total: int, *options: str) -> list[Phase]:
    """The phases of a run over 80 samples, which are ten steps an epoch."""
    order = GlobalOrder(np.array([0]), np.array([80]), 8, 0)
    return plan_phases(config_of(*options), DataPosition([Span(0, 0, order, 1, ())]), total)


def test_a_run_without_phases_is_one() -> None:
    (phase,) = planned(20, "--model.vision.patch_drop=0.25")
    assert (phase.start, phase.stop, phase.image_size, phase.patch_drop) == (0, 20, None, 0.25)


def test_phases_follow_each_other_to_the_end_of_the_budget() -> None:
    phases = planned(45, '--phases=[{"epochs":1.5,"image_size":8},{"epochs":2},{"patch_drop":0.5}]')
    assert [(phase.start, phase.stop) for phase in phases] == [(0, 15), (15, 35), (35, 45)]
    assert [(phase.image_size, phase.patch_drop) for phase in phases] == [(8, 0.0), (None, 0.0), (None, 0.5)]
    assert [phases.index(phase_at(phases, step)) for step in (0, 14, 15, 34, 35, 44)] == [0, 0, 1, 1, 2, 2]


def test_a_schedule_spans_phases_until_one_has_a_rate() -> None:
    given = ('--phases=[{"steps":10},{"steps":10},{"lr":0.5,"warmup_steps":4}]', "--optimizer.lr=1")
    phases = planned(30, *given, "--optimizer.warmup_steps=5")
    rates = [phase_at(phases, step).learning_rate(step) for step in range(30)]
    (whole,) = planned(20, "--optimizer.lr=1", "--optimizer.warmup_steps=5")
    assert rates[:20] == [whole.learning_rate(step) for step in range(20)]
    assert rates[20:25] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert rates[29] < 0.1


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ('[{"steps":3,"epochs":1},{}]', "each phase but the last has either epochs or steps"),
        ("[{},{}]", "each phase but the last has either epochs or steps"),
        ('[{"steps":3},{"epochs":1},{}]', "some phases have epochs and others steps"),
        ('[{"steps":3},{"steps":4}]', "the last phase takes the rest of the run"),
        ('[{"steps":3,"image_size":32},{}]', "image_size=32, above the model's 16"),
        ('[{"steps":3,"warmup_steps":2},{}]', "warmup_steps belongs to a phase with lr"),
        ('[{"steps":3,"size":8},{}]', "unknown key phases.0.size"),
        ('[{"steps":9},{}]', "the first 1 take 9 steps, and the run has 7"),
        ('[{"steps":3,"image_size":12},{}]', "not divisible into patches of 8"),
    ],
)
def test_phases_that_cannot_be_are_refused(phases: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_for_phases(config_of(f"--phases={phases}"))
        planned(STEPS, f"--phases={phases}")


def test_pretrained_models_have_one_size() -> None:
    with pytest.raises(UserError, match=r"a phase sets image_size, but the model of model\.pretrained has one"):
        parse(["demo", "--model.pretrained=somewhere", '--phases=[{"steps":3,"image_size":8},{}]'])


def test_the_account_is_that_of_the_phase_without_dropping() -> None:
    config = config_of("--model.vision.patch_drop=0.75", '--phases=[{"steps":3},{"patch_drop":0.1}]')
    assert largest_model(config).vision.patch_drop == 0.1
    assert model_for_phases(config).vision.patch_drop == 0.75


def rates(total: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, **options})
    return [learning_rate(step, total, config) for step in range(total + 1)]


CASES: dict[str, tuple[int, dict[str, object], dict[int, float]]] = {  # steps, options, rates of some steps
    "warm-up, half cosine": (12, {}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 8: 0.55, 12: 0.1}),
    "constant": (12, {"schedule": "constant"}, dict.fromkeys(range(3, 13), 1.0)),
    "cooldown": (24, {"schedule": "cooldown", "cooldown_steps": 8}, {4: 1.0, 16: 1.0, 18: 0.775, 24: 0.1}),
    "wsd": (24, {"schedule": "wsd", "cooldown_steps": 8}, {4: 1.0, 16: 1.0, 18: 0.55, 24: 0.1}),
    "a fifth by default": (40, {"schedule": "cooldown"}, {32: 1.0, 36: 0.55, 40: 0.1}),
    "after the warm-up": (10, {"schedule": "cooldown", "cooldown_steps": 100}, {0: 0.25, 3: 1.0, 4: 1.0, 7: 0.55}),
    "fitted warm-up": (100, {"warmup_steps": 500}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0}),
    "too short for one": (3, {"warmup_steps": 100}, {0: 1.0}),
    "none": (10, {"warmup_steps": 0}, {0: 1.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_rates(case: str) -> None:
    total, options, wanted = CASES[case]
    found = rates(total, **options)
    assert {step: found[step] for step in wanted} == pytest.approx(wanted)
    falling = found[fitted_warmup(int(str(options.get("warmup_steps", 4))), total) :]
    assert falling == sorted(falling, reverse=True) and falling[-1] >= 0.1


@pytest.mark.parametrize("schedule", ["constant", "cooldown", "wsd"])
def test_a_constant_run_can_be_prolonged_by_a_cooldown(schedule: str) -> None:
    """What is behind a checkpoint of the constant part does not depend on what follows."""
    assert rates(30, schedule=schedule, cooldown_steps=10)[:21] == rates(20, schedule="constant")


class Watch(Hook):
    """Notes the inputs of each step and the rate, and stops after a step."""

    def __init__(self, stop_after: int | None) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._stop_after = stop_after

    def start(self, loop: Loop) -> None:
        vision = cast(VisionTower, cast(DualEncoder, loop.context.engine.module).vision)
        vision.trunk.blocks[0].register_forward_pre_hook(lambda block, given: self.lengths.append(given[0].shape[1]))

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        (image, tokens), *_ = batch.pieces(slice(0, 1))
        self.lengths: list[int] = []  # of the sequences that the first block sees, class token included
        self._inputs = image.shape[-1], tokens.shape[-1]

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self.seen.append((*self._inputs, self.lengths[0], result.lr))
        loop.stop_requested = result.step == self._stop_after


def run(
    communicator: Communicator, shards: Path, folder: Path, stops: list[int | None], engines: list[str]
) -> dict[str, list[tuple[Any, ...]]]:
    """Start a run as often as it is stopped; what its steps saw, by engine."""
    found = {}
    for engine in engines:
        where = [f"--data.train={shards}", f"--run.output_dir={folder / engine}", "--run.name=run"]
        more = [f"--deepspeed={engine}", f"--max_steps={STEPS}", "--run.log_every=1", "--data.micro_batch=4"]
        hooks = [Watch(stop) for stop in stops]
        for hook in hooks:
            train_connected(communicator, config_of(PHASES, *where, *more), hook)
        found[engine] = [seen for hook in hooks for seen in hook.seen]
    return found


def check(engines: list[str], shards: Path, folder: Path) -> None:
    """Stops in the middle of a phase, exactly between two, and one step after."""
    (whole, _), (broken, _) = (
        run_ranks(2, run, shards, folder / name, stops, engines)
        for name, stops in (("whole", [None]), ("broken", [2, 3, 6, None]))
    )
    for engine in engines:
        inputs = [(image, tokens, length) for image, tokens, length, _ in whole[engine]]
        # one patch of 8 pixels; two of four; all four; and the class token
        assert inputs == [(8, 6, 2)] * 3 + [(16, 40, 3)] * 2 + [(16, 40, 5)] * 2
        assert broken[engine] == whole[engine]
        assert [lr for *_, lr in whole[engine]][5:] == [0.01, 0.01]
        left, right = (StateFiles(newest_checkpoint(folder / name / engine) / "state") for name in ("whole", "broken"))
        for name in left.shapes:
            for kind in left.kinds(name):
                assert torch.equal(left.read(name, kind), right.read(name, kind)), (engine, name, kind)


def test_a_stop_in_or_between_phases_changes_no_bit(shards: Path, tmp_path: Path) -> None:
    check(["zero1_fp32"], shards, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero0_fp32", "zero0_bf16", "zero1_bf16", "zero2_bf16", "zero3_bf16", "zero3_fp32"])
def test_a_stop_changes_no_bit_in_any_stage(engine: str, shards: Path, tmp_path: Path) -> None:
    check([engine], shards, tmp_path)
