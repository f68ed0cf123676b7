"""What a dry run and the start of a run refuse or warn of, in the same sentences."""

import os
from pathlib import Path

import pytest
from small_runs import train

from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import UserError
from neuclip_ds.planning.dry_run import print_dry_run
from neuclip_ds.recipe import parse
from neuclip_ds.training.checks import likely_slips

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
        "optimizer.warmup_steps=50 is not shorter than the run of 3 steps: it is fitted to 0, a tenth of the run.",
        "optimizer.min_lr=1 is above optimizer.lr=0.001",
    ]
    options = ("--optimizer.warmup_steps=50", "--optimizer.min_lr=1")
    dry = train(tmp_path, shards, 3, *options, "--dry-run")
    assert (dry.returncode, [dry.stdout.count(f"warning    {slip}") for slip in slips]) == (0, [1, 1]), dry
    done = train(tmp_path, shards, 3, *options)
    assert done.returncode == 0, done
    assert [(tmp_path / "run" / "log.txt").read_text().count(slip) for slip in slips] == [1, 1]

    def slips_of(*options: str) -> list[str]:
        return likely_slips(parse(["demo", *options]).config, 3)

    assert slips_of("--optimizer.lr=0", "--optimizer.warmup_steps=50") == [
        "optimizer.lr=0: the encoders will not learn."
    ]
    assert slips_of("--optimizer.warmup_steps=2") == []
    (slip,) = slips_of("--optimizer.warmup_steps=2", "--optimizer.schedule=constant", "--optimizer.min_lr=1e-5")
    assert "min_lr has no effect with optimizer.schedule=constant" in slip
    young = ["--optimizer.warmup_steps=2", "--objective.method=amorlip", "--objective.reference=released_code"]
    (said,) = slips_of(*young)
    assert "or objective.max_ratio" in said
    for cure in ("max_ratio=10", "amortized.encoder_normalizer=combined", "reference=paper"):
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
