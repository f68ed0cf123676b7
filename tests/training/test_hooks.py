"""User hooks run around every training step in order, can stop a run, log metrics and events, and keep a state."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from small_runs import SMALL, newest_checkpoint

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse
from neuclip_ds.reporting.events import read_events
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.training import records
from neuclip_ds.training.hooks import Hook, hook_names
from neuclip_ds.training.hooks.standard import CollectGarbage
from neuclip_ds.training.trainer import Loop, StepResult, train


class Recording(Hook):
    """Hook that records its calls and the losses, and requests a stop after step `stop_after`."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[str] = []
        self.losses: list[float] = []
        self._stop_after = stop_after

    def start(self, loop: Loop) -> None:
        self.calls.append(f"start {loop.done}/{loop.total}")

    def before_step(self, loop: Loop) -> None:
        self.calls.append("before")

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self.calls.append(f"batch of {len(batch.index)}")

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self.calls.append(f"after {result.step}")
        self.losses.append(result.metrics["loss"])
        loop.stop_requested = result.step == self._stop_after

    def finish(self, loop: Loop) -> None:
        self.calls.append("finish")

    def close(self, loop: Loop, error: BaseException | None) -> None:
        self.calls.append(f"close {type(error).__name__}")


def run(shards: Path, runs: Path, *hooks: Hook) -> None:
    options = ["--data.batch_size=8", "--data.workers=0", "--data.val=", "--data.zero_shot=", "--max_steps=3"]
    where = [f"--data.train={shards}", f"--run.output_dir={runs}", "--run.name=run"]
    train(parse(["demo", *SMALL, *options, *where]).config, RankEnvironment(0, 0, 1), hooks)


STEP = ["before", "batch of 8"]


class Total(Hook):
    """Hook that adds `increment` to its state in every step."""

    def __init__(self, increment: int) -> None:
        self._increment = increment
        self.total = 0

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self.total += self._increment

    def state(self, loop: Loop) -> dict[str, Any]:
        return {"total": self.total}

    def load_state(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class WriteRecords(Total):
    """A user's hook with the name of a standard hook."""


class Forgetful(Hook):
    """Hook whose state is empty."""

    def state(self, loop: Loop) -> dict[str, Any]:
        return {}


class LogStart(Hook):
    """Hook that writes a metric and an event when it starts."""

    def start(self, loop: Loop) -> None:
        assert loop.metrics is not None  # on rank 0
        loop.metrics.write(loop.done, {"started": 1.0})
        loop.events.add(loop.done, "started", f"started after step {loop.done}")


def test_hooks_see_every_step_keep_separate_states_and_log_in_a_new_and_a_resumed_run(
    shards: Path, tmp_path: Path
) -> None:
    recording = Recording(stop_after=2)
    totals = [Total(1), Total(10), Total(100)]
    run(shards, tmp_path, recording, totals[0], LogStart(), *totals[1:], WriteRecords(1000), Forgetful())
    assert recording.calls == ["start 0/3", *STEP, "after 1", *STEP, "after 2", "close NoneType"]
    assert len(set(recording.losses)) == 2
    assert [path.name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_000000002"]
    saved_states = read_meta(newest_checkpoint(tmp_path))["data"]["hooks"]
    names = hook_names(totals)
    assert len(set(names)) == 3
    assert saved_states["Forgetful"] == {}, "so that it is restored after a rollback"
    assert [saved_states[name] for name in names] == [{"total": 2}, {"total": 20}, {"total": 200}]

    # a hook that cannot load its state costs no records, not even those of steps after the checkpoint
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    with metrics_file.open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n')
    metrics_before = metrics_file.read_text()
    with pytest.raises(KeyError, match="total"):
        run(shards, tmp_path, type("Forgetful", (Total,), {})(1))
    assert metrics_file.read_text() == metrics_before

    recording = Recording()
    totals = [Total(1), Total(10), Total(100)]
    run(shards, tmp_path, recording, LogStart(), *totals)
    assert recording.calls == ["start 2/3", *STEP, "after 3", "finish", "close NoneType"]
    assert [hook.total for hook in totals] == [3, 30, 300]
    metrics = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [record["step"] for record in metrics if "started" in record] == [0, 2]
    assert [event.step for event in read_events(tmp_path / "run") if event.kind == "started"] == [0, 2]


def test_an_error_closes_the_hooks(shards: Path, tmp_path: Path) -> None:
    class Failing(Hook):
        def on_batch(self, loop: Loop, batch: RankBatch) -> None:
            raise RuntimeError("of the user")

    hook = Recording()
    with pytest.raises(RuntimeError, match="of the user"):
        run(shards, tmp_path, hook, Failing())
    assert hook.calls == ["start 0/3", *STEP, "close RuntimeError"]


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_freed_at_the_same_steps_on_all_ranks_and_python_collects_again_after_the_loop() -> None:
    loop: Any = SimpleNamespace(done=0, resources=ExitStack())
    hook = CollectGarbage()
    assert gc.isenabled()
    with loop.resources:
        hook.start(loop)
        reference = weakref.ref(Cycle())
        freed_after = 0
        while reference() is not None:
            assert not gc.isenabled(), "no collection at a time that depends on the rank"
            loop.done += 1
            hook.after_step(loop, cast(StepResult, None))
            freed_after = loop.done
        assert 1 < freed_after <= 1000
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()  # the imported modules again, as in conftest.py


def test_a_user_who_turned_automatic_collections_off_keeps_them_off() -> None:
    loop: Any = SimpleNamespace(done=0, resources=ExitStack())
    gc.disable()
    try:
        with loop.resources:
            CollectGarbage().start(loop)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("requests", [1, 2])
def test_a_stop_that_only_some_ranks_request_is_an_error(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_STOP_LIMIT", 1.0 if requests == 2 else 0.0)
    communicator = Communicator(store=dist.HashStore())
    communicator.world_size = 2
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(records.wait_for_requests_of_all, communicator, 5) for _ in range(requests)]
    if requests == 2:
        assert [wait.result() for wait in waits] == [None, None]
    else:
        with pytest.raises(UserError, match="on 1 of 2 ranks after step 5"):
            waits[0].result()
