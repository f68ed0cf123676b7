"""Test what dry runs and launches refuse or warn about; a refused launch does not change a byte of the run's folder."""

import json
import os
import shutil
from pathlib import Path

import pytest
from small_runs import newest_checkpoint, train
from tars import write_pairs

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import UserError
from neuclip_ds.planning.dry_run import print_dry_run
from neuclip_ds.recipe import parse
from neuclip_ds.training.checks import config_warnings

EVERY = ("--run.checkpoint_every=2", "--run.log_every=1")


def content(folder: Path) -> dict[Path, bytes]:
    """Map each path below a folder to the content of the file, or to b"" for a folder."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a run of 2 steps."""
    runs = tmp_path_factory.mktemp("runs")
    train(runs, shards, 2, *EVERY)
    return runs


REFUSED = {
    "method": (["--objective.method=openclip"], "method=fastclip_v3, but this run has method=openclip"),
    "two ranks": (["--model.text.width=24"], "model.text.width=16, but this run has model.text.width=24"),
    "same shapes": (["--model.text.heads=4"], "model.text.heads=2, but this run has model.text.heads=4"),
    "trained parts": (["--model.vision.trainable=0"], "model.vision.trainable=all"),
    "vocabulary": (["--model.text.vocab_size=301"], "model.text.vocab_size=300, but this run has model.text.vocab"),
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
    refused = train(trained, shards, 4, *EVERY, *options, ranks=2 if case == "two ranks" else 1, code=2)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert content(trained) == before


def test_what_it_was_trained_with_is_in_the_checkpoint(trained: Path, tmp_path: Path) -> None:
    """A checkpoint gives the same model when opened alone or from a run folder with a wrong config and no tokenizer."""
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
    """Each launch fails at its first step because the best metric is misspelled, and leaves a tokenizer behind."""
    for size in (300, 310):
        options = (f"--model.text.vocab_size={size}", "--run.best_metric=x", f"--data.val={shards.parent / 'val'}")
        train(tmp_path, shards, 2, *EVERY, *options, code=2)
        tokens = json.loads((tmp_path / "run" / "tokenizer" / "tokenizer.json").read_text())
        assert len(tokens["model"]["vocab"]) == size


ONE = RankEnvironment(0, 0, 1)


@pytest.mark.usefixtures("quick_meta_models")
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--data.val={tmp}/nothing", "nothing does not exist"),
        ("--data.zero_shot={tmp}/nothing", "nothing does not exist; name an evaluation set"),
        ("--data.evaluation_sets={tmp}/nothing", "nothing is not a folder"),
        *((f"--model.vision.std={std}", r"model\.vision\.std") for std in ("[0,1,1]", "[-1,1,1]", "[.inf,1,1]")),
    ],
)
def test_missing_held_out_sets_and_impossible_deviations_are_refused(
    option: str, words: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["demo", f"--data.train={shards}", "--data.val=", "--data.zero_shot=", option.format(tmp=tmp_path)]
    with pytest.raises(UserError, match=words):
        print_dry_run(parse(options).config, ONE, None)


def test_likely_slips_are_reported_by_run_and_dry_run(shards: Path, tmp_path: Path) -> None:
    slips = [
        "optimizer.warmup_steps=50 is not shorter than the run of 3 steps: it is shortened to 0, a tenth of the run.",
        "optimizer.min_lr=1 is above optimizer.lr=0.001",
    ]
    options = ("--optimizer.warmup_steps=50", "--optimizer.min_lr=1")
    dry = train(tmp_path, shards, 3, *options, "--dry-run")
    assert [dry.stdout.count(f"warning    {slip}") for slip in slips] == [1, 1]
    train(tmp_path, shards, 3, *options)
    assert [(tmp_path / "run" / "log.txt").read_text().count(slip) for slip in slips] == [1, 1]

    def slips_of(*options: str) -> list[str]:
        return config_warnings(parse(["demo", *options]).config, 3)

    assert slips_of("--optimizer.lr=0", "--optimizer.warmup_steps=50") == [
        "optimizer.lr=0: the encoders will not learn."
    ]
    assert slips_of("--optimizer.warmup_steps=2") == []
    (slip,) = slips_of("--optimizer.warmup_steps=2", "--optimizer.schedule=constant", "--optimizer.min_lr=1e-5")
    assert "min_lr has no effect with optimizer.schedule=constant" in slip
    young = ["--optimizer.warmup_steps=2", "--objective.method=amorlip", "--objective.reference=released_code"]
    (said,) = slips_of(*young)
    assert "encoder_normalizer=combined" in said
    for cure in ("amortized.encoder_normalizer=combined", "reference=paper"):
        assert slips_of(*young, f"--objective.{cure}") == []


def test_a_run_larger_than_the_machine_is_reported(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    config = parse(["demo", f"--data.train={shards}", f"--data.batch_size={1 << 24}"]).config
    print_dry_run(config, ONE, None)
    said = capsys.readouterr().out
    assert f"of this machine, which has {there:,.1f} GB" in said
    assert " of /dev/shm, which has " in said
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4096")
    print_dry_run(parse(["demo", f"--data.train={shards}"]).config, ONE, None)
    assert "this machine for its 4096 ranks" in capsys.readouterr().out
