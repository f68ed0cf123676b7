"""Loss spikes, data stalls and skipped steps are detected, logged, and recorded in events.jsonl with their samples."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from neuclip_ds.data.stored_towers import IMAGE, TEXT
from neuclip_ds.errors import RollBack, TrainingDiverged
from neuclip_ds.reporting.events import Event, EventLog, read_events
from neuclip_ds.training.hooks.health import LoaderMonitor, LossSpikeDetector, Spike, StallDetector, WatchHealth

METRICS = {"loss": np.nan, "tau": 0.05, "feature_grad_norm": 0.3, "grad_norm": 1.5, "lr": 1e-3}


def samples(step: int) -> list[int]:
    return [*range(10 * step, 10 * step + 9), -1]


def started(folder: Path, rank: int = 0) -> tuple[WatchHealth, Any]:
    """Start the hook; return it and a fake loop with the attributes that it reads."""

    def roll_back(problem: str) -> None:
        raise RollBack(problem, folder / "step_000000005")

    manifest = SimpleNamespace(
        shards=[SimpleNamespace(path=f"{number:05d}.tar") for number in range(9)],
        locate=lambda index: (index // 100, index % 100),
    )
    config = SimpleNamespace(data=SimpleNamespace(workers=2, decoder="pil"), run=SimpleNamespace(max_skipped_steps=10))
    context = SimpleNamespace(config=config, communicator=SimpleNamespace(rank=rank), data=SimpleNamespace(tables={}))
    context.data.manifest = manifest
    order = SimpleNamespace(steps_per_epoch=1, batch=lambda epoch, step: np.array(samples(epoch + 1)))
    loop = SimpleNamespace(context=context, order=order, events=EventLog(folder, rank), done=0, roll_back=roll_back)
    hook = WatchHealth()
    hook.start(loop)  # type: ignore[arg-type]
    return hook, loop


def run_step(hook: WatchHealth, loop: Any, step: int, **changed: Any) -> None:
    usual = {
        "step": step,
        "waited": 0.01,
        "seconds": 0.5,
        "loss": 2.0,
        "is_partial_batch": False,
        "applied": True,
        "skipped": 1,
    }
    usual |= {"not_finite": [], "metrics": METRICS}
    result = SimpleNamespace(**{**usual, "batch": SimpleNamespace(index=torch.tensor([-1, 250, 17])), **changed})
    loop.done = step - 1
    hook.on_batch(loop, result.batch)
    hook.after_step(loop, result)  # type: ignore[arg-type]


def curve(steps: int = 2000, seed: int = 0) -> NDArray[np.float64]:
    """Return a noisy loss curve that falls from 8 to 2."""
    noise = np.random.default_rng(seed).normal(0, 0.03, steps)
    return 2 + 6 * np.exp(-np.arange(steps) / 150) + noise


def spikes_in(losses: NDArray[np.float64]) -> list[tuple[int, Spike]]:
    detector = LossSpikeDetector()
    found = [(step, detector.update(float(loss))) for step, loss in enumerate(losses, start=1)]
    return [(step, spike) for step, spike in found if spike is not None]


def test_noise_drift_and_heavy_tails_are_no_spikes() -> None:
    for seed in range(3):
        assert spikes_in(curve(seed=seed)) == []
        assert spikes_in(-curve(seed=seed)[::-1] / 100) == []  # losses may be negative and rise slowly
    assert spikes_in(3 + np.random.default_rng(1).laplace(0, 0.03, 2000)) == []
    assert spikes_in(4.852 + np.where(np.arange(500) % 7 == 0, 1e-4, 0)) == []  # almost constant


def test_a_spike_is_detected_once_and_a_loss_that_stays_up_becomes_the_level() -> None:
    losses = curve()
    losses[1499:1503] += [2.0, 3.0, 1.0, 0.9]
    ((first, spike),) = spikes_in(losses)
    assert first == 1500
    assert spike.level == pytest.approx(2.0, abs=0.03)
    assert spike.deviation == pytest.approx(0.03, rel=0.3)
    losses = curve()
    losses[1000:1100:10] += 2.0
    losses[1130] += 2.0  # after the 100 steps that belong to the first spike
    assert [step for step, _ in spikes_in(losses)] == [1001, 1131]
    losses = curve()
    losses[1000:] += 3.0
    losses[1600] += 3.0
    assert [step for step, _ in spikes_in(losses)] == [1001, 1601]


@pytest.mark.parametrize(
    "steps",
    [
        [(30.0, 31.0)] + [(0.01, 0.5)] * 50,  # worker processes are starting
        [(0.01, 0.5)] * 20 + [(1.5, 2.0)] + [(0.01, 0.5)] * 20,  # below the minimum duration of a stall
        [(1.0, 10.0)] * 20 + [(6.0, 16.0)] + [(1.0, 10.0)] * 20,  # less than five median steps
        [(0.0, 0.2)] * 20 + [(0.0, 60.0)] * 3,  # the step is slow, but the loader is not
    ],
)
def test_what_is_no_stall(steps: list[tuple[float, float]]) -> None:
    detector = StallDetector()
    assert {detector.update(*times) for times in steps} == {None}


def test_the_loader_limits_the_speed_if_steps_wait_for_more_than_a_tenth_of_their_time() -> None:
    monitor = LoaderMonitor()
    shares = [monitor.update(waited=0.9, seconds=1.0) for _ in range(100)]
    assert set(shares) == {None}, "the loader is still starting"
    shares = [monitor.update(waited=0.1, seconds=1.0) for _ in range(100)]
    assert set(shares) == {None}
    shares = [monitor.update(waited=0.25, seconds=1.0) for _ in range(200)]
    assert [step for step, share in enumerate(shares, 1) if share is not None] == [100, 200]
    assert shares[99] == pytest.approx(0.25)


def test_a_slow_loader_is_logged_rarely_with_the_share_and_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook, loop = started(tmp_path)
    for step in range(1, 501):
        run_step(hook, loop, step, waited=0.2, seconds=0.5)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3, "the 1st, 2nd and 4th window"
    assert "steps 101 to 200 spent 40% of their time waiting for batches" in messages[0]
    for advice in ("raise data.workers (now 2 per rank)", "data.decoder=simplejpeg", "smaller images"):
        assert advice in messages[0]
    assert [(event.step, event.kind) for event in read_events(tmp_path)] == [
        (step, "slow_loader") for step in (200, 300, 400, 500)
    ]


def test_a_slow_loader_of_stored_features_does_not_blame_the_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook, loop = started(tmp_path)
    loop.context.data.tables = {IMAGE: None, TEXT: None}
    for step in range(1, 201):
        run_step(hook, loop, step, waited=0.2, seconds=0.5)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "raise data.workers" in message
    assert "decoder" not in message and "images" not in message


def test_a_spike_is_reported_with_step_values_and_indices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hook, loop = started(tmp_path)
    losses = 2 + np.random.default_rng(0).normal(0, 0.02, 200)
    losses[149] = 5.0
    with caplog.at_level(logging.INFO, "neuclip_ds"):
        for step, loss in enumerate(losses, start=1):
            run_step(hook, loop, step, loss=float(loss))
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    for part in (
        "step 150: loss 5 is far above its usual level 2",
        "temperature 0.05",
        "learning rate 0.001",
        "[1500, 1501",
    ):
        assert part in warning.getMessage()
    assert list(read_events(tmp_path)) == [Event(150, 0, "loss_spike", warning.getMessage(), samples(150))]


def test_a_stall_of_any_rank_is_logged_and_reaches_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (_, first), (hook, loop) = started(tmp_path, 0), started(tmp_path, 1)
    for step in range(1, 44):
        run_step(hook, loop, step, **({"waited": 8.0, "seconds": 9.0} if step >= 40 else {}))
    logged = [record.getMessage() for record in caplog.records]
    assert [text.split(" waited")[0] for text in logged] == ["step 40", "step 41", "step 43"]  # the 1st, 2nd and 4th
    assert "8.0 s for its batch; the median step takes 0.5 s (stall number 1 of this launch)" in logged[0]
    assert "samples [250, 17], the first in 00002.tar. If this recurs, raise data.workers (now 2)" in logged[0]
    assert list(read_events(tmp_path)) == []
    shares: list[Any] = []
    loop.events.merge(lambda own: [shares.append(own) or own])  # type: ignore[func-returns-value]
    first.events.merge(lambda own: [own, *shares])
    assert [(event.step, event.rank, event.kind, event.indices) for event in read_events(tmp_path)] == [
        (step, 1, "data_stall", [-1, 250, 17]) for step in range(40, 44)
    ]


def test_skipped_steps_are_reported_with_their_samples_and_end_in_a_rollback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook, loop = started(tmp_path)
    applied = {1, 2, 5}
    for step in range(1, 15):
        run_step(hook, loop, step, applied=step in applied, not_finite=[30, 33] if step == 3 else [])
    found = [(event.step, event.indices) for event in read_events(tmp_path)]
    assert found == [(step, [30, 33] if step == 3 else samples(step)) for step in range(1, 15) if step not in applied]
    assert "step 3 was skipped and changed nothing: the features of samples [30, 33] were not finite (l" in caplog.text
    with pytest.raises(RollBack, match=r"^steps 6 to 15 were skipped: in the last step, the loss or .*\[150"):
        run_step(hook, loop, 15, applied=False)
    hook.close(loop, RollBack("back", tmp_path / "step_000000005"))
    back = next(event for event in read_events(tmp_path) if event.kind == "rolled_back")
    assert (back.step, back.indices) == (5, [index for step in range(6, 16) for index in samples(step)])


def test_other_ranks_leave_the_loss_to_rank_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hook, loop = started(tmp_path, rank=1)
    for step in range(1, 100):
        run_step(hook, loop, step, loss=2.0 + 1e-3 * (step % 5))
    run_step(hook, loop, 100, loss=9.0)
    run_step(hook, loop, 101, applied=False)
    hook.close(loop, TrainingDiverged("message"))
    pending: list[Any] = []
    loop.events.merge(lambda own: [pending.extend(own) or own])  # type: ignore[func-returns-value]
    assert not caplog.records and not pending


def test_events_beyond_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    events = EventLog(tmp_path, 0)
    for step in (10, 20, 30):
        events.add(step, "diverged", f"step {step}")
    EventLog(tmp_path, 1).resume(10)  # only rank 0 changes the file
    assert len(list(read_events(tmp_path))) == 3
    events.resume(20)
    assert [event.step for event in read_events(tmp_path)] == [10, 20]
    events.resume(0)  # a new run
    assert list(read_events(tmp_path)) == []
