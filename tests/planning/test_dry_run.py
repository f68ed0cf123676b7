"""Check the plans that `--dry-run` prints for the recipes, and its errors for invalid hostfiles and data."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from tars import write_pairs

from neuclip_ds.config import dump
from neuclip_ds.data.manifest import Shard, from_shards
from neuclip_ds.data.manifest_file import write_shards
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.launch import read_hostfile
from neuclip_ds.errors import UserError
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.planning import memory
from neuclip_ds.planning.activations import Activations
from neuclip_ds.planning.dry_run import print_dry_run
from neuclip_ds.recipe import parse, recipe_names

pytestmark = pytest.mark.usefixtures("quick_meta_models")
ONE = RankEnvironment(0, 0, 1)
ROOT = Path(__file__).parents[2]
QUICK = ("demo", "cc12m_neuclip", "vitb32_tuneclip")


def no_activations(model: DualEncoder, *_: object) -> Activations:
    """Return constants: counting takes seconds per model, and tests/planning/test_memory.py tests the counting."""
    return Activations(10**9, 10**9)


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(recipe_names()), marks=pytest.mark.slow)], ids=len)
def test_a_recipe_of_every_model_is_planned_on_eight_nodes(
    names: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is printed even if the data or the pretrained model is missing, which an error then reports."""
    monkeypatch.setattr(memory, "count_activations", no_activations)
    configs = (parse([name, f"--data.train={tmp_path}/nothing"]).config for name in names)
    by_model = {config.model.model_dump_json(): config for config in configs}
    assert len(by_model) == len(QUICK) or len(by_model) > 8
    for config in by_model.values():
        with pytest.raises(UserError, match=r"nothing|cannot be downloaded from the hub") as caught:
            print_dry_run(config, ONE, ROOT / "hostfiles" / "8node")
        printed = capsys.readouterr().out
        assert f"method     {config.objective.method}" in printed
        assert f"batch      {config.data.batch_size} = 64 ranks x {config.data.batch_size // 64}" in printed
        if "cannot be downloaded from the hub" in str(caught.value):
            assert f"model      {config.model.pretrained}: see the error below" in printed
        else:
            assert "parameters" in printed
            assert "of features received per rank and step" in printed
            assert "  peak, in the " in printed


@pytest.mark.parametrize(
    ("recovery", "wanted"),
    [
        ([], None),
        (["--recovery.epochs=5"], "10 steps with frozen weights"),
        (["--recovery.reuse=other", "--recovery.epochs=5"], "taken from other"),
    ],
)
def test_the_report_counts_samples_and_steps(
    recovery: list[str],
    wanted: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # a dry run stores manifests in .cache
    monkeypatch.setattr(memory, "count_activations", no_activations)
    write_pairs(tmp_path / "data", [10, 6])
    write_checkpoint(tmp_path / "other")
    options = [f"--data.train={tmp_path}/data", "--data.batch_size=8", "--epochs=3", *recovery]
    print_dry_run(parse(["demo", *options]).config, ONE, None)
    printed = capsys.readouterr().out
    assert "16 samples in 2 shards, 0 incomplete" in printed
    assert "evaluation no pairs" in printed, "data this small give none"
    assert "6 (2 per epoch" in printed
    assert f"recovery   {wanted}" in printed if wanted else "recovery" not in printed


def write_checkpoint(run: Path) -> None:
    """Write what marks a checkpoint of a run as complete."""
    (run / "checkpoints/step_000000001").mkdir(parents=True)
    (run / "checkpoints/step_000000001/meta.json").touch()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--run.best_metric=zero_shot_top1"], r"run\.best_metric=zero_shot_top1 needs an evaluation"),
        (["--run.best_metric=recall", "--data.val=2"], r"not a metric of .* one of image_to_text_recall@1, "),
        (["--run.best_metric=ema/text_to_image_recall@5", "--data.val=2"], "not a metric"),
        (["--run.best_metric=ema/text_to_image_recall@5", "--data.val=2", "--ema.decay=0.9"], ""),
        (
            ["--run.best_metric=loss", "--run.normalizer_anchors=4", "--objective.method=sogclr"],
            "one of .*normalizer_mse",
        ),
        (["--run.best_metric=normalizer_mse", "--run.normalizer_anchors=4", "--objective.method=sogclr"], ""),
        (["--run.normalizer_anchors=4", "--objective.method=siglip"], "measures normalizers, but .*siglip"),
        (["--recovery.reuse=nothing", "--recovery.epochs=1"], "nothing contains no complete checkpoint"),
        (["--recovery.reuse=nothing", "--recovery.epochs=1", "--run.name=resumed"], ""),
    ],
)
def test_what_training_would_refuse_is_refused(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "count_activations", no_activations)
    write_pairs(tmp_path / "data", [10, 6])
    write_checkpoint(tmp_path / "runs/resumed")
    config = parse(["demo", f"--data.train={tmp_path}/data", "--data.batch_size=4", "--data.val=", *options]).config
    with pytest.raises(UserError, match=words) if words else nullcontext():
        print_dry_run(config, ONE, None)


def test_a_cache_that_is_too_small_for_remote_shards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "count_activations", no_activations)
    shards = [Shard(path=f"s3://bucket/{number}.tar", start=0, n=1000, bytes=45_000_000) for number in range(500)]
    write_shards(from_shards(shards), tmp_path)
    options = ["demo", f"--data.train={tmp_path}", "--data.batch_size=512", "--data.val=", "--data.zero_shot="]
    too_large = ["--data.cache_gb=2", "--data.shard_streams=64", "--data.shuffle_block_size=100000"]
    with pytest.raises(UserError, match=r"set data.cache_gb=\d+ or more, or lower data.shuffle_block_size"):
        print_dry_run(parse([*options, *too_large]).config, ONE, None)


def test_the_report_says_whether_the_run_fits_the_gpus_and_which_stage_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "count_activations", no_activations)
    config = parse(["models/vitb32", f"--data.train={tmp_path}/nothing", "--deepspeed=zero1_bf16"]).config
    cases = [
        (80, "fits", "zero0_bf16 is "),
        (2, "does not fit", "zero2_bf16_offload is "),
        (1, "does not fit", "no ZeRO stage fits: use a smaller data.micro_batch"),
    ]
    for gigabytes, verdict, lowest in cases:
        with pytest.raises(UserError, match="nothing"):
            print_dry_run(config, ONE, ROOT / "hostfiles" / "1node8gpu", gigabytes)
        printed = capsys.readouterr().out
        assert f"zero1_bf16 {verdict} 8 x {gigabytes} GB" in printed
        assert f"lowest     {lowest}" in printed


def test_only_rank_zero_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "count_activations", no_activations)
    config = parse(["demo", f"--data.train={tmp_path}/nothing"]).config
    with pytest.raises(UserError):
        print_dry_run(config, RankEnvironment(1, 1, 2), None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", sorted((ROOT / "hostfiles").glob("[0-9]*")), ids=lambda path: path.name)
def test_hostfiles_have_as_many_nodes_as_their_names_say(path: Path) -> None:
    assert str(len(read_hostfile(path))) == path.name[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node1 8\n", "node1 8"),
        ("", "is empty"),
        ("\ufeffnode1 slots=8\n", "byte order mark"),
        (None, "not exist"),
    ],
)
def test_hostfile_mistakes(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_hostfile(path)


def write_measured(folder: Path, steps: int, options: Sequence[str]) -> Path:
    """Write the files of a run on two ranks with 1,000 samples/s after slow first steps."""
    folder.mkdir()
    lines = []
    for step in range(1, steps + 1):
        speed = 10.0 if step < steps / 2 else 1000.0
        if step == steps - 2:  # as in the first step after a rollback
            speed = math.nan
        lines.append(json.dumps({"step": step, "samples_per_second": speed}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "environment.json").write_text('{"ranks": 2}')
    (folder / "config.yaml").write_text(dump(parse(list(options)).config))
    return folder


def test_hours_follow_from_a_measured_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "count_activations", no_activations)
    shards = write_pairs(tmp_path / "shards", [32, 32])
    options = ["demo", f"--data.train={shards}", "--data.batch_size=32"]
    config = parse([*options, "--max_steps=36000"]).config
    measured = write_measured(tmp_path / "short", 40, options)
    hours = {}
    for ranks in (2, 4):
        print_dry_run(config, RankEnvironment(0, 0, ranks), None, measured=measured)
        printed = capsys.readouterr().out
        found = re.search(r"time +([\d.]+) to ([\d.]+) hours, ([\d.]+) to", printed)
        assert found is not None
        hours[ranks] = [float(number) for number in found.groups()]
    seconds = 36000 * 32 / 1000
    assert hours[2] == pytest.approx(
        [seconds / 3600 / 1.05, seconds / 3600 / 0.95, 2 * seconds / 3600 / 1.05], rel=0.01
    )
    assert hours[4][0] == pytest.approx(hours[2][0] / 2, rel=0.01)
    assert hours[4][1] > hours[2][1] / 2, "with the time of communication"
    for folder, others, words in (
        ("few", options, "logged too few steps"),
        ("other", [*options, "--model.embed_dim=64"], "have different model options"),
    ):
        unusable = write_measured(tmp_path / folder, 10, others)
        with pytest.raises(UserError, match=words):
            print_dry_run(config, ONE, None, measured=unusable)
