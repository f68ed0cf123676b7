"""A start that is refused leaves the run's folder as it was, to the byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from small_runs import demo_shards, newest_checkpoint, train
from tars import write_pairs

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.checkpoint.sharded_state import StateFiles
from neuclip_ds.distributed.communicator import Communicator

EVERY = ("--run.checkpoint_every=2", "--run.log_every=1")


def content(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(demo_shards(tmp_path_factory.mktemp("data"), 60))


@pytest.fixture(scope="module")
def trained(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of 2 steps."""
    runs = tmp_path_factory.mktemp("runs")
    done = train(runs, shards, 2, *EVERY)
    assert done.returncode == 0, done.stderr
    return runs


REFUSED = {
    "method": (["--objective.method=openclip"], "method=fastclip_v3, but this run has method=openclip"),
    "batch": (["--data.batch_size=10"], "batch_size=8, but this run has batch_size=10"),
    "model": (["--model.text.width=24"], "model.text.width=16, but this run has model.text.width=24"),
    "same shapes": (["--model.text.heads=4"], "model.text.heads=2, but this run has model.text.heads=4"),
    "vocabulary": (["--model.text.vocab_size=301"], "model.text.vocab_size=300, but this run has model.text.vocab"),
    "data": (["--data.train={other}"], "was written with other data"),
    "damaged data": (["--data.train={damaged}"], "damaged"),
    "never": (["--run.resume=never"], "run.resume=never"),
}
CASES = [case if case == "method" else pytest.param(case, marks=pytest.mark.slow) for case in REFUSED]


@pytest.mark.parametrize("case", CASES)
def test_a_refused_start_changes_nothing(case: str, trained: Path, shards: str, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "0.tar").write_bytes(b"no tar" * 300)
    write_pairs(tmp_path / "other", [13, 13])
    options = [
        option.format(other=tmp_path / "other", damaged=tmp_path / "damaged") if "train=" in option else option
        for option in options
    ]
    before, beside = content(trained), sorted(trained.iterdir())
    refused = train(trained, shards, 4, *EVERY, *options)
    assert refused.returncode == 2, refused.stderr
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert content(trained) == before
    assert sorted(trained.iterdir()) == beside


@pytest.mark.slow
def test_two_ranks_change_nothing(trained: Path, shards: str) -> None:
    before = content(trained)
    refused = train(trained, shards, 4, *EVERY, "--model.text.width=24", ranks=2)
    assert refused.returncode == 2, refused.stderr
    assert content(trained) == before


@pytest.mark.slow
def test_what_it_was_trained_with_is_in_the_checkpoint(trained: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "step"
    shutil.copytree(newest_checkpoint(trained), moved)
    first, second = (open_model(str(path), Communicator()) for path in (trained / "run", moved))
    captions = ["a red circle", "two blue squares"]
    assert (first.model(None, first.tokenizer(captions))[1] == second.model(None, second.tokenizer(captions))[1]).all()
    assert second.config is not None and second.config.objective.method == "fastclip_v3"


def test_the_folder_of_the_run_does_not_change_what_is_opened(trained: Path, tmp_path: Path) -> None:
    """As a refused start of an earlier version left it: the config of another method, no tokenizer."""
    shutil.copytree(trained, tmp_path / "runs")
    path = tmp_path / "runs" / "run" / "config.yaml"
    path.write_text(path.read_text().replace("method: fastclip_v3", "method: openclip"))
    shutil.rmtree(path.with_name("tokenizer"))
    found = open_model(str(path.parent), Communicator())
    assert found.config is not None and found.config.objective.method == "fastclip_v3"
    assert found.tokenizer(["a red circle"]).shape == (1, 40)


@pytest.mark.slow
def test_a_tokenizer_of_a_start_without_checkpoint_is_made_anew(shards: str, tmp_path: Path) -> None:
    """The start ends at its first step, as the best metric is misspelt; it leaves a tokenizer."""
    for size in (300, 310):
        options = (f"--model.text.vocab_size={size}", "--run.best_metric=x")
        assert train(tmp_path, shards, 2, *EVERY, *options).returncode == 2
        made_from = json.loads((tmp_path / "run" / "tokenizer" / "made_from.json").read_text())
        assert made_from["vocab_size"] == size
        tokens = json.loads((tmp_path / "run" / "tokenizer" / "tokenizer.json").read_text())
        assert len(tokens["model"]["vocab"]) == size


@pytest.mark.slow
def test_an_unfinished_tokenizer_is_made_anew(shards: str, trained: Path, tmp_path: Path) -> None:
    """A folder without the record of what it was made from, as earlier versions left when they were killed."""
    place = tmp_path / "run" / "tokenizer"
    shutil.copytree(trained / "run" / "tokenizer", place)
    (place / "made_from.json").unlink()
    (place / "tokenizer.json").write_text("{")
    done = train(tmp_path, shards, 2, *EVERY)
    assert done.returncode == 0, done.stderr
    assert content(place) == content(trained / "run" / "tokenizer")
    found, expected = (StateFiles(newest_checkpoint(runs) / "engine").weights() for runs in (tmp_path, trained))
    assert all((found[name] == weight).all() for name, weight in expected.items())
