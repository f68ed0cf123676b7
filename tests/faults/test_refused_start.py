"""Test what dry runs and launches refuse or warn about; a refused launch does not change a byte of the run's folder."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from evaluation_sets import labeled_set
from small_runs import SMALL, newest_checkpoint, train, training
from tars import write_pairs

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import UserError
from neuclip_ds.planning.dry_run import print_dry_run
from neuclip_ds.recipe import parse
from neuclip_ds.training.checks import config_warnings

pytestmark = pytest.mark.usefixtures("quick_meta_models")
ONE_RANK = RankEnvironment(rank=0, local_rank=0, world_size=1)
OPTIONS = ("--run.checkpoint_every=2", "--run.log_every=1", "--optimizer.warmup_steps=50", "--optimizer.min_lr=1")
WARNINGS = (  # about the last two of OPTIONS
    "optimizer.warmup_steps=50 is not shorter than the run of 2 steps: it is shortened to 0, a tenth of the run.",
    "optimizer.min_lr=1 is above optimizer.lr=0.001",
)


def content(folder: Path) -> dict[Path, bytes]:
    """Map each path below a folder to the content of the file, or to b"" for a folder."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a run of 2 steps."""
    runs = tmp_path_factory.mktemp("runs")
    train(runs, shards, 2, *OPTIONS)
    return runs


REFUSED = {
    "method": (
        ["--objective.method=openclip"],
        "objective.method=fastclip_v3, but this run uses objective.method=openclip",
    ),
    "temperature": (
        ["--objective.temperature.optimizer=lion"],
        "another optimizer (adam) than objective.temperature.optimizer=lion",
    ),
    "two ranks": (["--model.text.width=24"], "model.text.width=16, but this run uses model.text.width=24"),
    "same shapes": (["--model.text.heads=4"], "model.text.heads=2, but this run uses model.text.heads=4"),
    "trained parts": (["--model.vision.trainable=0"], "model.vision.trainable=all"),
    "vocabulary": (["--model.text.vocab_size=301"], "model.text.vocab_size=300, but this run uses model.text.vocab"),
    "data": (["--data.train={other}"], "was written with different data"),
    "damaged data": (["--data.train={damaged}"], "damaged"),
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
    refused = train(trained, shards, 4, *OPTIONS, *options, ranks=2 if case == "two ranks" else 1, code=2)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert content(trained) == before


def test_a_checkpoint_contains_its_config_and_tokenizer(trained: Path, tmp_path: Path) -> None:
    """A checkpoint gives the same model when opened alone or from a run folder with a wrong config and no tokenizer."""
    shutil.copytree(trained, tmp_path / "runs")
    path = tmp_path / "runs" / "run" / "config.yaml"
    path.write_text(path.read_text().replace("method: fastclip_v3", "method: openclip"))
    shutil.rmtree(path.with_name("tokenizer"))
    alone = shutil.copytree(newest_checkpoint(trained), tmp_path / "elsewhere" / "step")
    captions = ["a red circle", "two blue squares"]
    original = open_model(str(trained / "run"), Communicator())
    expected = original.model(None, original.tokenizer(captions))[1]
    for opened in (path.parent, alone):
        saved = open_model(str(opened), Communicator())
        assert saved.config is not None and saved.config.objective.method == "fastclip_v3"
        assert (saved.model(None, saved.tokenizer(captions))[1] == expected).all()


@pytest.mark.slow
def test_a_run_without_a_checkpoint_trains_its_tokenizer_again(shards: Path, tmp_path: Path) -> None:
    """Each launch fails at its first step because the best metric is misspelled, and leaves a tokenizer behind."""
    for size in (300, 310):
        options = (f"--model.text.vocab_size={size}", "--run.best_metric=x", f"--data.val={shards.parent / 'val'}")
        train(tmp_path, shards, 2, *OPTIONS, *options, code=2)
        tokens = json.loads((tmp_path / "run" / "tokenizer" / "tokenizer.json").read_text())
        assert len(tokens["model"]["vocab"]) == size


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--data.val={tmp}/nothing", "nothing does not exist"),
        ("--data.zero_shot={tmp}/nothing", "nothing does not exist; pass an evaluation set"),
        ("--data.evaluation_sets={tmp}/nothing", "nothing is neither a folder nor an evaluation set"),
        ("--model.vision.std=[0,1,1]", r"model\.vision\.std"),
        ("--model.vision.std=[-1,1,1]", r"model\.vision\.std"),
        ("--model.vision.std=[.inf,1,1]", r"model\.vision\.std"),
    ],
)
def test_missing_held_out_sets_and_impossible_deviations_are_refused(
    option: str, words: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [
        "demo",
        *SMALL,
        f"--data.train={shards}",
        "--data.val=",
        "--data.zero_shot=",
        option.format(tmp=tmp_path),
    ]
    with pytest.raises(UserError, match=words):
        print_dry_run(parse(options).config, ONE_RANK, None)


SETS = {
    "a damaged shard": ("0.tar is damaged at byte", lambda folder: damage(folder / "test/0.tar")),
    "a template": (
        "lacks {c}",
        lambda folder: (folder / "zeroshot_classification_templates.txt").write_text("a photo"),
    ),
    "the last shard": ("2.tar is missing", lambda folder: (folder / "test/nshards.txt").write_text("3")),
}


def damage(path: Path) -> None:
    """Overwrite the header of the second member of a tar."""
    data = bytearray(path.read_bytes())
    second = data.index(b"s0000000.cls")
    data[second : second + 512] = b"x" * 512
    path.write_bytes(data)


@pytest.mark.parametrize("option", ["zero_shot", "evaluation_sets"])
@pytest.mark.parametrize("case", SETS)
def test_a_set_that_cannot_be_scored_is_found_before_the_first_step(
    option: str, case: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, spoil = SETS[case]
    labeled_set(tmp_path / "sets/good", 6)
    labeled_set(tmp_path / "sets/spoiled", 6)
    spoil(tmp_path / "sets/spoiled")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sets" if option == "evaluation_sets" else tmp_path / "sets/spoiled"
    options = ["demo", *SMALL, f"--data.train={shards}", "--data.val=", "--data.zero_shot=", f"--data.{option}={path}"]
    with pytest.raises(UserError, match=re.escape(message)):
        print_dry_run(parse(options).config, ONE_RANK, None)


def test_runs_and_dry_runs_warn_about_likely_mistakes(
    trained: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = (trained / "run" / "log.txt").read_text()
    print_dry_run(parse([*training(tmp_path, shards, 2), *OPTIONS]).config, ONE_RANK, None)
    dry_run = capsys.readouterr().out
    for warning in WARNINGS:
        assert log.count(warning) == 1
        assert dry_run.count(f"warning    {warning}") == 1


def test_each_likely_mistake_has_a_warning() -> None:
    def warnings_of(*options: str) -> list[str]:
        return config_warnings(parse(["demo", *options]).config, 3)

    assert warnings_of("--optimizer.lr=0", "--optimizer.warmup_steps=50") == [
        "optimizer.lr=0: the encoders will not learn."
    ]
    assert warnings_of("--optimizer.warmup_steps=2") == []
    (warning,) = warnings_of("--optimizer.warmup_steps=2", "--optimizer.schedule=constant", "--optimizer.min_lr=1e-5")
    assert "min_lr has no effect with optimizer.schedule=constant" in warning
    amorlip = ["--optimizer.warmup_steps=2", "--objective.method=amorlip", "--objective.reference=released_code"]
    (warning,) = warnings_of(*amorlip)
    assert "encoder_normalizer=combined" in warning
    for fix in ("amortized.encoder_normalizer=combined", "reference=paper"):
        assert warnings_of(*amorlip, f"--objective.{fix}") == []


def test_a_run_larger_than_the_machine_is_reported(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    options = ["demo", *SMALL, f"--data.train={shards}"]
    print_dry_run(parse([*options, f"--data.batch_size={1 << 24}"]).config, ONE_RANK, None)
    printed = capsys.readouterr().out
    assert f"but this machine has {memory:,.2f} GB" in printed
    assert "but /dev/shm has " in printed
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4096")
    print_dry_run(parse(options).config, ONE_RANK, None)
    assert "this machine with 4096 ranks" in capsys.readouterr().out
