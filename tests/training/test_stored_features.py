"""Runs with a reference model and with teachers read the features of every batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarking.synthetic_profile import SyntheticSteps
from embedded_shards import IDENTITY
from ranks import run_ranks
from small_runs import TINY, newest_checkpoint, records, tensors, train_connected, weights
from tars import manifest_of, write_pairs
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.data.feature_parts import FeaturePart, job_hash, part_name, write_part
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.embedding.embed import Parts
from neuclip_ds.errors import UserError
from neuclip_ds.losses.stored_features import StoredRows
from neuclip_ds.planning.dry_run import print_dry_run
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.trainer import Loop, train

SIZES = [13, 13]  # an epoch has three batches of 8 and one of 2
WIDTHS = {"reference": 5, "teacher": 7, "second": 7, "other": 5}
FOLDERS = ("objective.reference_model", "objective.distill.features")
REFERENCE_AND_TEACHER = (
    "objective.reference_model=reference",
    "objective.distill.features=teacher",
    "objective.distill.temperature=0.1",
)


def features_of(name: str) -> StoredRows:
    """Return the (26, D) features that the table `name` stores."""
    generator = torch.Generator().manual_seed(list(WIDTHS).index(name))
    image, text = normalize(torch.randn(2, sum(SIZES), WIDTHS[name], generator=generator), dim=2)
    return image, text


def write_table(folder: Path, name: str, shards: Path, **changes: Any) -> None:
    """Write the features as `neuclip-ds embed` does; `changes` are other fields of embedding.json; None removes one."""
    image, text = features_of(name)
    identity = {
        **IDENTITY,
        "model": name,
        "image_width": image.shape[1],
        "text_width": text.shape[1],
        "format": 2,
        **changes,
    }
    manifest = manifest_of(shards)
    Parts(folder, identity).create(manifest)
    for number, shard in enumerate(manifest.shards):
        rows = slice(shard.start, shard.start + shard.n)
        captions: dict[str, Any] = {}
        if identity["text_width"] is not None:
            captions["text"] = text[rows].numpy()
            captions["text_start"] = np.arange(shard.n + 1)
            captions["first_caption"] = np.zeros(shard.n, dtype=np.int32)
        part = FeaturePart(
            job=job_hash(identity),
            shard=number,
            samples=shard.n,
            index=np.arange(rows.start, rows.stop),
            image=image[rows].unsqueeze(1).numpy(),
            **captions,
        )
        write_part(folder, part)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the shards and a table of each model."""
    folder = tmp_path_factory.mktemp("stored")
    shards = write_pairs(folder / "shards", SIZES)
    for name in WIDTHS:
        write_table(folder / name, name, shards)
    write_table(folder / "images", "reference", shards, text_width=None)
    write_table(folder / "trunk", "reference", shards, output="trunk")
    write_table(folder / "incomplete", "reference", shards)
    (folder / "incomplete" / part_name(1)).unlink()
    return folder


def options_of(workspace: Path, runs: Path, steps: int, *options: str) -> list[str]:
    """Return the options of a run; values of `options` that name a table become its path."""
    chosen: list[str] = []
    for option in options:
        name, _, value = option.partition("=")
        if name in FOLDERS:
            folders = (
                f'["{workspace}/teacher", "{workspace}/second"]' if value == "teachers" else f"{workspace}/{value}"
            )
            chosen.append(f"--{name}={folders}")
        else:
            chosen.append(f"--{option}")
    fixed = ["--deepspeed=zero1_fp32", "--run.log_every=1", f"--run.output_dir={runs}", "--run.name=run"]
    constant = ["--optimizer.schedule=constant", "--optimizer.warmup_steps=0", "--optimizer.lr=1e-3"]
    return [*TINY, *fixed, *constant, f"--data.train={workspace}/shards", f"--max_steps={steps}", *chosen]


def run(workspace: Path, runs: Path, steps: int, *options: str, hooks: tuple[Hook, ...] = ()) -> None:
    train(parse(options_of(workspace, runs, steps, *options)).config, RankEnvironment(0, 0, 1), hooks)


class RecordRows(Hook):
    """Hook that records the indices and the stored features that the loss receives in each step."""

    in_recovery = True

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor, Mapping[str, Any]]] = []

    def start(self, loop: Loop) -> None:
        begin = loop.loss.begin

        def recorded(index: Tensor, valid: Tensor, *arguments: Any, **stored: Any) -> Any:
            self.steps.append((index, valid, stored))
            return begin(index, valid, *arguments, **stored)

        loop.loss.begin = recorded  # type: ignore[method-assign]


def test_each_step_gets_the_rows_of_its_samples(workspace: Path, tmp_path: Path) -> None:
    """This includes the recovery, the last batch of an epoch, and two teachers of an ensemble, in their order."""
    hook = RecordRows()
    options = ("objective.reference_model=reference", "objective.distill.features=teachers", "recovery.epochs=1")
    run(workspace, tmp_path, 4, *options, "data.micro_batch=2", hooks=(hook,))
    assert [int(valid.sum()) for _, valid, _ in hook.steps] == [8, 8, 8, 2] * 2
    for index, valid, stored in hook.steps:
        first, second = stored["teacher"]
        for name, rows in (("reference", stored["reference"]), ("teacher", first), ("second", second)):
            for found, expected in zip(rows, features_of(name), strict=True):
                assert torch.equal(found[valid], expected[index[valid]])
                assert not found[~valid].any()

    message = "The objective.reference_model of the recovery in .* differs from this run's"
    reuse = [f"recovery.reuse={tmp_path}/run", "recovery.epochs=1"]
    with pytest.raises(UserError, match=message):
        run(workspace, tmp_path / "reused", 1, "objective.reference_model=other", *reuse)


def _train_on_rank(communicator: Communicator, arguments: list[str]) -> None:
    train_connected(communicator, parse(arguments).config)


@pytest.mark.parametrize("method", ["fastclip_v3", "neuclip_queue"])
def test_two_ranks_with_micro_batches_train_like_one_rank(workspace: Path, tmp_path: Path, method: str) -> None:
    """Seven steps include the last batch of an epoch, of which one rank has two rows and the other none."""
    options = [f"objective.method={method}", *REFERENCE_AND_TEACHER]
    if method == "neuclip_queue":
        options += ["objective.queue.size=12", "run.normalizer_anchors=10"]
    run(workspace, tmp_path / "one", 7, *options)
    micro_batches = options_of(workspace, tmp_path / "two", 7, *options, "data.micro_batch=2")
    run_ranks(2, _train_on_rank, micro_batches)

    of_one, of_two = (records(tmp_path / name / "run" / "metrics.jsonl") for name in ("one", "two"))
    names = {"loss", "distill_loss", "tau", "normalizer_mse"}
    for line, expected in zip(of_two, of_one, strict=True):
        assert {name: line[name] for name in names & line.keys()} == pytest.approx(
            {name: expected[name] for name in names & expected.keys()}, rel=1e-4
        )
    assert sum("distill_loss" in line for line in of_one) == 6  # the losses of small batches are not logged
    expected_weights = weights(newest_checkpoint(tmp_path / "one"))
    for name, weight in weights(newest_checkpoint(tmp_path / "two")).items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-3, atol=1e-4)


def test_a_run_resumes_bit_identically_and_with_the_same_features_only(workspace: Path, tmp_path: Path) -> None:
    options = ("objective.method=neuclip_queue", "objective.queue.size=12")
    both = (*options, *REFERENCE_AND_TEACHER)
    run(workspace, tmp_path / "whole", 6, *both)
    run(workspace, tmp_path / "resumed", 3, *both)
    for changed, message in (
        (("objective.distill.weight=0.5", *both), r"objective\.distill\.weight=1\.0, but this run uses .*=0\.5"),
        ((*options, *REFERENCE_AND_TEACHER[:2]), r"distill\.temperature=\[0\.1\], but this run uses .*=\[0\.01\]"),
        ((*options, REFERENCE_AND_TEACHER[0]), r"objective\.distill\.features=.*this run uses .*=None"),
        ((*options, *REFERENCE_AND_TEACHER[1:]), r"objective\.reference_model=a folder, but this run uses .*=None"),
        (
            (*options, "objective.reference_model=other", *REFERENCE_AND_TEACHER[1:]),
            "no longer contains the features with which the run started",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(workspace, tmp_path / "resumed", 6, *changed)
    run(workspace, tmp_path / "resumed", 6, *both)
    whole, resumed = (tensors(newest_checkpoint(tmp_path / name)) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if whole[name] != resumed[name]] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["objective.reference_model=images"], "images contains no features of texts.*on the training data"),
        (["objective.distill.features=trunk"], "trunk contains features from before the projection"),
        (["objective.distill.features=incomplete"], "lacks the features of 1 of 2 shards"),
        (["objective.reference_model=nothing"], "nothing cannot be read"),
        (["objective.distill.weight=2"], r"objective\.distill\.weight has no effect without a teacher"),
        (["objective.distill.temperature=0.1"], r"objective\.distill\.temperature has no effect without a teacher"),
        (
            [
                "objective.reference_model=reference",
                "objective.distill.features=teacher",
                "objective.distill.contrastive_weight=0",
            ],
            "contrastive_weight above 0",
        ),
        (["objective.reference_model=reference", "recovery.epochs=1", "recovery.loss=hgcl"], r"set recovery\.loss=gcl"),
        (["optimizer.name=sgd", "optimizer.momentum=0", "ema.decay=0.9"], r"ema\.decay needs an optimizer with state"),
        (["objective.method=siglip", "objective.reference_model=nothing"], "does not support a reference model"),
    ],
)
def test_mistakes_end_the_run_before_its_first_step(
    workspace: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(workspace, tmp_path, 1, *options)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def _traffic_of_a_step(communicator: Communicator, arguments: list[str]) -> dict[str, int]:
    steps = SyntheticSteps(parse(arguments).config, communicator, batches=1)
    assert steps.run(0).applied
    return {purpose: traffic.bytes_sent for purpose, traffic in communicator.traffic.items()}


def test_profiles_and_dry_runs_count_the_rows_that_are_gathered(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a dry run stores manifests in .cache
    arguments = options_of(workspace, tmp_path, 1, *REFERENCE_AND_TEACHER)
    traffic = run_ranks(2, _traffic_of_a_step, arguments)[0]
    assert traffic["stored_features"] == 2 * 4 * 4 * (WIDTHS["reference"] + WIDTHS["teacher"])

    print_dry_run(parse(arguments).config, RankEnvironment(0, 0, 2), None)
    printed = capsys.readouterr().out
    assert f"reference  {workspace}/reference, torch.float32 of width 5" in printed
    assert f"teacher    {workspace}/teacher, torch.float32 of width 7" in printed
    assert "stored features" in printed
    wrong = options_of(workspace, tmp_path, 1, "objective.reference_model=trunk")
    with pytest.raises(UserError, match="features from before the projection"):
        print_dry_run(parse(wrong).config, RankEnvironment(0, 0, 2), None)
