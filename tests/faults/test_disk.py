"""Test full, read-only and missing disks: errors are short, no partial checkpoint stays, and the next launch resumes.

The disks are real in-memory file systems, which only root can mount.
"""

import json
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import DATA, FACTS, PlainEngine, fresh, keeper, trained
from small_runs import newest_checkpoint, train

from neuclip_ds.checkpoint.integrity import SaveFailed, verify
from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.dataset import BadSample
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.models.pretrained.base import save_weights
from neuclip_ds.reporting.events import EventLog, read_events
from neuclip_ds.reporting.metrics import MetricsLog

EVERY = ("--run.checkpoint_every=2", "--run.log_every=1")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB, and yield its folder."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount_point)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount file systems")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Fill a disk until only `left` bytes are free, and return the file that fills it."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - left)))
    return filler


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_that_the_disk_has_no_space_for_is_refused_before_it_is_written(disk: Path) -> None:
    first = keeper(disk).save(1, PlainEngine(1.0), trained(), FACTS, DATA)
    filler = fill(disk, 1000)
    with pytest.raises(SaveFailed, match=r"A checkpoint in .* needs .* GB, but the disk has only"):
        keeper(disk).save(2, PlainEngine(2.0), trained(), FACTS, DATA)
    assert names(disk) == [first.name]
    filler.unlink()
    keeper(disk, keep=1).save(2, PlainEngine(2.0), trained(), FACTS, DATA)
    assert names(disk) == ["step_000000002"]


@pytest.mark.parametrize("reason", ["No space left on device", "Read-only file system", "No such file or directory"])
def test_a_checkpoint_that_cannot_be_written_leaves_no_trace(disk: Path, reason: str) -> None:
    """The check for free space counts only tensors, so with 8 KB free it passes and writing the file headers fails."""
    (disk / "run").mkdir()
    checkpoints = keeper(disk / "run", keep=1)
    first = checkpoints.save(1, PlainEngine(1.0), trained(), FACTS, DATA)
    if reason.startswith("No space"):
        fill(disk, 8192)
    elif reason.startswith("Read-only"):
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        shutil.rmtree(disk / "run")
    with pytest.raises(SaveFailed, match=f"could not be written: {reason}"):
        checkpoints.save(2, PlainEngine(2.0), trained(), FACTS, DATA)
    if reason.startswith("No such"):
        assert not (disk / "run").exists()
    else:
        assert names(disk / "run") == [first.name], "the old one stays, the new one leaves no trace"
        verify(first)


def _save_with_a_limit(communicator: Communicator, folder: Path) -> list[str]:
    """Save twice; in the first save, rank 1 cannot write files of more than 100 bytes, as if its disk were full."""
    checkpoints = keeper(folder, communicator=communicator)
    objective = fresh(communicator)
    if communicator.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    messages = []
    for step in (1, 2):
        try:
            checkpoints.save(step, PlainEngine(1.0), objective, FACTS, DATA)
        except SaveFailed as error:
            messages.append(str(error))
            messages += [path.name for path in (folder / "checkpoints").iterdir()]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return messages


def test_a_save_fails_on_all_ranks_if_the_disk_of_one_rank_is_full(tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_with_a_limit, tmp_path)
    assert first == second and len(first) == 1, "both raise the same, and nothing is left"
    assert "could not be written: File too large" in first[0]
    assert names(tmp_path) == ["step_000000002"]


def test_weights_that_do_not_fit_are_an_os_error(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        save_weights({"weight": torch.zeros(3_000_000)}, disk / "model.safetensors")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_metrics_on_a_full_disk_raise_an_error(disk: Path) -> None:
    fill(disk, 0)
    with pytest.raises(OSError, match="No space left on device"):
        MetricsLog(disk)


def test_a_full_disk_leaves_no_partial_line(disk: Path) -> None:
    lists = [disk / "bad_samples.jsonl", disk / "events.jsonl"]
    bad_samples = BadSampleLog(disk, 1.0)
    events = EventLog(disk, rank=0)

    def add(step: int) -> None:
        samples = tuple(BadSample(index=100 * step + i, shard="s.tar", key="k" * 99, reason="none") for i in range(99))
        bad_samples.merge([[99, [asdict(sample) for sample in samples], None]])
        events.add(step, "kind", "message" * 2000)

    add(1)
    filler = fill(disk, 4096)
    add(2)
    filler.unlink()
    add(3)
    for path in lists:
        assert all(json.loads(line) for line in path.read_text().splitlines())
    assert [event.step for event in read_events(disk)] == [1, 3]
    assert len(lists[0].read_text().splitlines()) == 2 * 99


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_continues_on_a_full_disk_and_resumes_once_there_is_space(
    ranks: int, disk: Path, shards: Path
) -> None:
    """Writing checkpoints 4, 6 and 8, metrics and the log fails; once there is space, the run resumes from step 2."""
    train(disk, shards, 2, *EVERY, ranks=ranks)
    filler = fill(disk, 20_000)
    done = train(disk, shards, 20, *EVERY, ranks=ranks, code=2)
    assert "Traceback" not in done.stderr and "Logging error" not in done.stderr, done.stderr
    assert done.stderr.count("Training continues without this checkpoint") == 2
    assert "3 saves in a row have failed." in done.stderr.splitlines()[-1]
    assert names(disk / "run") == ["step_000000002"]
    filler.unlink()
    done = train(disk, shards, 20, *EVERY, ranks=ranks)
    assert ", 2 of 20 steps done" in done.stderr
    verify(newest_checkpoint(disk))


@pytest.mark.slow
def test_a_start_on_a_full_disk_is_refused_with_a_message(disk: Path, shards: Path) -> None:
    for left in (0, 16_384, 40_960):
        filler = fill(disk, left)
        done = train(disk, shards, 2, *EVERY, code=2)
        assert "Traceback" not in done.stderr, done.stderr
        filler.unlink()
    train(disk, shards, 2, *EVERY)


def test_a_start_on_a_read_only_disk_is_refused_with_a_message(disk: Path, shards: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = train(disk, shards, 2, *EVERY, code=2)
    assert done.stderr.count("cannot be written (Read-only file system") == 1
    assert "Traceback" not in done.stderr
