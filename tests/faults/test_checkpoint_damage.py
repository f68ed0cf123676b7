"""A checkpoint with a damaged, empty or missing file is never loaded; the run uses the previous checkpoint or fails."""

import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import fork
from ranks import run_ranks
from small_checkpoints import DATA, FACTS, PlainEngine, fresh, keeper, trained
from small_runs import newest_checkpoint, train

from neuclip_ds.checkpoint.checkpoints import Best, read_best
from neuclip_ds.checkpoint.integrity import read_meta, sealed
from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.checkpoint.sharded_state import StateFiles
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.files import checksum_of

FLIPS = 5  # bit flips in each file


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": flip,
    "empty": lambda path, rng: path.write_bytes(b""),
    "cut": cut,
    "remove": lambda path, rng: path.unlink(),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        keeper(folder).save(step, PlainEngine(step), trained(), FACTS, DATA)
    return folder


def files_of(folder: Path) -> list[str]:
    newest = folder / "checkpoints" / "step_000000002"
    return sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_the_checkpoint_before_is_used(
    damage: str, two: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = files_of(two)
    assert len(names) >= 5
    rng = random.Random(0)
    unreported = []
    for name in names * (FLIPS if damage == "flip" else 1):
        folder = tmp_path / "run"
        shutil.copytree(two, folder)
        DAMAGES[damage](folder / "checkpoints" / "step_000000002" / name, rng)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "neuclip_ds"):
            newest = keeper(folder).newest()
        assert newest is not None
        if newest.name != "step_000000001" or name not in caplog.text:
            unreported.append(name)
        engine = PlainEngine()
        keeper(folder).load(newest, engine, fresh())
        assert engine.value == 1.0
        shutil.rmtree(folder / "checkpoints" / "step_000000001")
        with pytest.raises(UserError, match=rf"No checkpoint in .* can be read.* oldest.*{name} "):
            keeper(folder).newest()
        shutil.rmtree(folder)
    assert not unreported, "loaded without a message, or without the file's name"


def test_readers_of_the_weights_find_damage_too(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "run")
    engine = tmp_path / "run" / "checkpoints" / "step_000000002" / "state"
    flip(engine / "00000-of-00001.safetensors", random.Random(0))
    with pytest.raises(UserError, match=r"00000-of-00001\.safetensors is damaged"):
        StateFiles(engine)


def test_a_file_that_is_not_safetensors_is_refused_although_its_checksum_matches(two: Path, tmp_path: Path) -> None:
    """Such a file could come from a program that edits a checkpoint and then updates the checksums."""
    for number, name in enumerate(name for name in files_of(two) if name.endswith(".safetensors")):
        folder = tmp_path / str(number)
        shutil.copytree(two, folder)
        newest = folder / "checkpoints" / "step_000000002"
        (newest / name).write_bytes(b"nothing of use")
        files = {**read_meta(newest)["files"], name: checksum_of(newest / name)}
        (newest / "meta.json").write_text(sealed({**read_meta(newest), "files": files}))
        assert keeper(folder).newest() == newest
        with pytest.raises(UserError, match=rf"{name} cannot be read .*restore the file"):
            keeper(folder).load(newest, PlainEngine(), fresh())
            StateFiles(newest / "state").weights()


def test_a_flipped_bit_in_the_record_of_the_best_is_found(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "run")
    best = Best(1, "recall", 0.25)
    folder = tmp_path / "run" / "checkpoints"
    keeper(tmp_path / "run").keep_best(best)
    content = (folder / "best.json").read_bytes()
    assert read_best(folder) == best
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / "best.json").write_bytes(flipped)
        with pytest.raises(UserError, match=r"best\.json is damaged"):
            read_best(folder)


def _newest_before_and_after_damage(communicator: Communicator, folder: Path) -> list[str]:
    """Save two checkpoints, damage the second, and return the newest intact checkpoint before and after the damage."""
    checkpoints = keeper(folder, communicator=communicator)
    for step in (1, 2):
        newest = checkpoints.save(step, PlainEngine(step), fresh(communicator), FACTS, DATA)
    names = []
    for damaged in (False, True):
        if damaged and communicator.rank == 0:
            flip(newest / "state" / "00001-of-00002.safetensors", random.Random(1))
        communicator.barrier()
        intact = checkpoints.newest()
        assert intact is not None
        names.append(intact.name)
    return names


def test_two_ranks_agree_on_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    names = run_ranks(2, _newest_before_and_after_damage, tmp_path)
    assert names == [["step_000000002", "step_000000001"]] * 2


@pytest.mark.slow
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(shards: Path, tmp_path: Path) -> None:
    every = ["--run.checkpoint_every=2", "--run.keep_checkpoints=3", "--run.log_every=1"]
    train(tmp_path, shards, 6, *every, ranks=2)
    expected = StateFiles(newest_checkpoint(tmp_path) / "state").weights()
    flip(newest_checkpoint(tmp_path) / "state" / "00000-of-00002.safetensors", random.Random(2))
    with pytest.raises(UserError, match=r"00000-of-00002\.safetensors is damaged"):
        open_model(str(tmp_path / "run"), Communicator())
    done = train(tmp_path, shards, 6, *every, ranks=2)
    assert done.stderr.count("00000-of-00002.safetensors is damaged") == 1
    assert ", 4 of 6 steps done" in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "damaged-step_000000006").is_dir()
    weights = StateFiles(newest_checkpoint(tmp_path) / "state").weights()
    assert all((weights[name] == weight).all() for name, weight in expected.items())
    for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
        (path / "meta.json").unlink()
    refused = train(tmp_path, shards, 6, *every, ranks=2, code=2)
    assert "No checkpoint in" in refused.stderr
    assert "Traceback" not in refused.stderr


def _killed_while_saving(folder: str, delay: float) -> None:
    checkpoints = keeper(Path(folder))
    checkpoints.save(1, PlainEngine(1.0), trained(), FACTS, DATA)
    state = trained()
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    checkpoints.save(2, PlainEngine(2.0), state, FACTS, DATA)
    time.sleep(10)


def test_a_process_killed_at_any_moment_of_a_save_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(5)
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = fork(_killed_while_saving, str(folder), rng.uniform(0, 0.02), variables=dict(os.environ))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        newest = keeper(folder).newest()
        assert newest is not None and newest.name in ("step_000000001", "step_000000002")
        keeper(folder).save(3, PlainEngine(3.0), fresh(), FACTS, DATA)
        names = {path.name for path in newest.parent.iterdir()}
        assert names == {newest.name, "step_000000003"}, "what the kill left is gone"
