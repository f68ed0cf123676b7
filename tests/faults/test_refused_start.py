"""A start that is refused leaves the run's folder as it was, to the byte."""

import json
import shutil
from pathlib import Path

import pytest
from small_runs import newest_checkpoint, train
from tars import write_pairs

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.distributed.communicator import Communicator

EVERY = ("--run.checkpoint_every=2", "--run.log_every=1")


def content(folder: Path) -> dict[Path, bytes]:
    """Every folder and file below a folder."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of 2 steps."""
    runs = tmp_path_factory.mktemp("runs")
    done = train(runs, shards, 2, *EVERY)
    assert done.returncode == 0, done.stderr
    return runs


REFUSED = {
    "method": (["--objective.method=openclip"], "method=fastclip_v3, but this run has method=openclip"),
    "two ranks": (["--model.text.width=24"], "model.text.width=16, but this run has model.text.width=24"),
    "same shapes": (["--model.text.heads=4"], "model.text.heads=2, but this run has model.text.heads=4"),
    "trained parts": (["--model.vision.trainable=0"], "model.vision.trainable=all"),
    "vocabulary": (["--model.text.vocab_size=301"], "model.text.vocab_size=300, but this run has model.text.vocab"),
    "data": (["--data.train={other}"], "was written with other data"),
    "damaged data": (["--data.train={damaged}"], "damaged"),
    "never": (["--run.resume=never"], "run.resume=never"),
}
CASES = [case if case == "method" else pytest.param(case, marks=pytest.mark.slow) for case in REFUSED]


@pytest.mark.parametrize("case", CASES)
def test_a_refused_start_changes_nothing(case: str, trained: Path, shards: Path, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "0.tar").write_bytes(b"no tar" * 300)
    write_pairs(tmp_path / "other", [13, 13])
    options = [
        option.format(other=tmp_path / "other", damaged=tmp_path / "damaged") if "train=" in option else option
        for option in options
    ]
    before = content(trained)
    refused = train(trained, shards, 4, *EVERY, *options, ranks=2 if case == "two ranks" else 1)
    assert refused.returncode == 2, refused.stderr
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert content(trained) == before


def test_what_it_was_trained_with_is_in_the_checkpoint(trained: Path, tmp_path: Path) -> None:
    """Opened alone, and in a run's folder with the config of another method and without the tokenizer."""
    shutil.copytree(trained, tmp_path / "runs")
    path = tmp_path / "runs" / "run" / "config.yaml"
    path.write_text(path.read_text().replace("method: fastclip_v3", "method: openclip"))
    shutil.rmtree(path.with_name("tokenizer"))
    alone = shutil.copytree(newest_checkpoint(trained), tmp_path / "elsewhere" / "step")
    whole, *others = (open_model(str(opened), Communicator()) for opened in (trained / "run", path.parent, alone))
    captions = ["a red circle", "two blue squares"]
    wanted = whole.model(None, whole.tokenizer(captions))[1]
    for found in others:
        assert found.config is not None and found.config.objective.method == "fastclip_v3"
        assert (found.model(None, found.tokenizer(captions))[1] == wanted).all()


@pytest.mark.slow
def test_a_tokenizer_of_a_start_without_checkpoint_is_made_anew(shards: Path, tmp_path: Path) -> None:
    """The start ends at its first step, as the best metric is misspelled; it leaves a tokenizer."""
    for size in (300, 310):
        options = (f"--model.text.vocab_size={size}", "--run.best_metric=x")
        assert train(tmp_path, shards, 2, *EVERY, *options).returncode == 2
        tokens = json.loads((tmp_path / "run" / "tokenizer" / "tokenizer.json").read_text())
        assert len(tokens["model"]["vocab"]) == size
