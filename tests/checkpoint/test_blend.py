"""Blends of a run's start and its result, and soups of runs, in files that the exports write."""

import json
import math
import shutil
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from miniatures import save_clip, save_siglip
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from small_runs import call, newest_checkpoint, records, train_connected
from torch import Tensor
from transformers import CLIPModel

from neuclip_ds.checkpoint.blend import blend, soup, weighted_mean
from neuclip_ds.checkpoint.export_run import export_run, export_soup
from neuclip_ds.checkpoint.saved_model import ModelWeights, read_result
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.recipe import validate
from neuclip_ds.section import merge

METRIC = "image_to_text_recall@1"


def fine_tune(communicator: Communicator, shards: Path, folder: Path, runs: Mapping[str, dict[str, Any]]) -> None:
    """Train runs of two steps that start from the checkpoint FOLDER/clip, given the options in which they differ."""
    for name, options in runs.items():
        config = {
            "run": {"name": name, "output_dir": str(folder), "best_metric": METRIC, "evaluate_every": 1},
            "data": {
                "train": str(shards),
                "val": str(shards.parent / "val"),
                "zero_shot": "",
                "batch_size": 8,
                "workers": 0,
            },
            "model": {"pretrained": str(folder / "clip")},
            "objective": {"method": "openclip"},
            "optimizer": {"lr": 0.01, "warmup_steps": 0},
            "deepspeed": "zero0_fp32",
            "max_steps": 2,
        }
        train_connected(communicator, validate(merge(config, options)))


RUNS: dict[str, dict[str, Any]] = {
    "zero3": {"deepspeed": "zero3_fp32", "ema": {"decay": 0.5}},
    "lora": {"model": {"lora": {"rank": 2}}, "data": {"val": 20}},  # pairs held out of the training data
}


@pytest.fixture(scope="module")
def folder(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint, `clip`, and runs that two ranks have fine-tuned from it."""
    folder = tmp_path_factory.mktemp("blends")
    save_clip(folder / "clip")
    run_ranks(2, fine_tune, shards, folder, RUNS)
    return folder


def exported(path: Path, out: Path, **options: Any) -> dict[str, Tensor]:
    export_run(path, "transformers", out, **options)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("run", RUNS)
def test_a_blend_is_between_the_start_and_the_result(run: str, folder: Path, tmp_path: Path) -> None:
    start = load_file(folder / "clip" / "model.safetensors")
    result = exported(folder / run, tmp_path / "result")
    blends = {
        fraction: exported(folder / run, tmp_path / f"{fraction}", fraction=fraction) for fraction in (0, 0.25, 1)
    }
    changed = [name for name in start if not torch.equal(start[name], result[name])]
    assert len(changed) > 10
    for name in start:
        assert torch.equal(blends[0][name], start[name]), name
        assert torch.equal(blends[1][name], result[name]), name
        expected = (0.75 * start[name].double() + 0.25 * result[name].double()).float()
        # logit_scale is log(1/tau), so that tau is averaged in log space
        assert torch.allclose(blends[0.25][name], expected, rtol=1e-6, atol=0), name
    CLIPModel.from_pretrained(tmp_path / "0.25")
    assert "a blend of `clip` (0.75) and this run (0.25)" in (tmp_path / "0.25/README.md").read_text()
    assert METRIC not in (tmp_path / "0.25/README.md").read_text(), "the scores are those of the result"


def test_the_average_and_the_best_checkpoint_can_be_blended(folder: Path, tmp_path: Path) -> None:
    start = load_file(folder / "clip" / "model.safetensors")
    for options in ({"average": True}, {"best": True}):
        name = next(iter(options))
        result = exported(folder / "zero3", tmp_path / name, **options)
        blended = exported(folder / "zero3", tmp_path / f"{name} blend", fraction=0.5, **options)
        for key in start:
            middle = (start[key].double() + result[key].double()) / 2
            assert torch.allclose(blended[key], middle.float(), rtol=1e-6, atol=0), key


def test_a_soup_is_the_mean_of_its_runs(folder: Path, tmp_path: Path) -> None:
    call("tools/export.py", "--soup", str(folder / "zero3"), str(folder / "lora"), f"--out={tmp_path}/soup")
    tensors = load_file(tmp_path / "soup" / "model.safetensors")
    first = exported(folder / "zero3", tmp_path / "zero3")
    second = exported(folder / "lora", tmp_path / "lora")
    for name, tensor in tensors.items():
        mean = (first[name].double() + second[name].double()) / 2
        assert torch.allclose(tensor, mean.float(), rtol=1e-6, atol=0), name


def test_blends_are_scored_and_plotted(folder: Path, shards: Path) -> None:
    """The scores at 0 and 1 are those of the start and of the run."""
    data = ["--data", str(shards.parent / "zero_shot"), "--batch-size=20", "--workers=0"]
    run = folder / "lora"
    printed = call("tools/evaluate.py", str(run), "--blend=0,0.5,1", *data).stdout
    assert "| blend | 0 | 0.5 | 1 |" in printed
    contents = json.loads((run / "evaluation/step_000000002/blends.json").read_text())
    assert contents["start"] == str(folder / "clip")
    assert [scores["fraction"] for scores in contents["blends"]] == [0, 0.5, 1]
    during = {line["step"]: line for line in records(run / "metrics.jsonl") if METRIC in line}
    for scores, step in ((contents["blends"][0], 0), (contents["blends"][2], 2)):
        recalls = [during[step][METRIC], during[step]["text_to_image_recall@1"]]
        assert scores["target"] == pytest.approx(sum(recalls) / 2, abs=1e-12)
        assert scores["scores"]["own/validation"] == scores["target"]
        assert scores["others"] == scores["scores"]["own/zero_shot"]
    call("tools/evaluate.py", str(folder / "clip"), *data, f"--out={folder}/scores")
    (line,) = records(folder / "scores/eval_results.jsonl")
    assert line["metrics"]["main_metric"] == contents["blends"][0]["others"]
    assert (run / "report.html").read_text().count("<circle") == 3


@pytest.mark.slow
def test_the_scores_of_blends_do_not_depend_on_the_number_of_ranks(folder: Path, shards: Path) -> None:
    options = ["--blend=0,0.5", "--target=zero_shot", "--data", str(shards.parent / "zero_shot"), "--batch-size=8"]
    contents = []
    for ranks in (1, 2):
        out = folder / f"scores of {ranks}"
        call("tools/evaluate.py", str(folder / "zero3"), *options, "--workers=0", f"--out={out}", ranks=ranks)
        contents.append((out / "blends.json").read_text())
    assert contents[0] == contents[1]


def test_options_without_effect_are_refused(folder: Path, shards: Path) -> None:
    data = ["--data", str(shards.parent / "val")]
    out = f"--out={folder}/none"
    mistakes = {
        ("evaluate", str(folder / "zero3"), "--target=val", *data): "--target has no effect without --blend",
        ("evaluate", str(folder / "zero3"), "--blend=0,2", *data): "'2' is not a number from 0 to 1",
        ("evaluate", str(folder / "clip"), "--blend=0", *data, out): "is not a run of neuclip_ds",
        ("evaluate", str(folder / "zero3"), "--blend=0", "--target=x", *data, out): "--target=x matches 0 tasks",
        ("export", out): "Pass one run, or several runs after --soup",
        ("export", "--soup", str(folder / "lora"), "--blend=0.5", out): "--blend applies only to a single run",
    }
    for (command, *options), message in mistakes.items():
        assert message in call(f"tools/{command}.py", *options, code=2).stderr


def test_a_start_that_is_random_missing_or_replaced_is_refused(folder: Path, shards: Path, tmp_path: Path) -> None:
    text = {"vocab_size": 300, "context_length": 16, "width": 16, "layers": 1, "heads": 2}
    vision = {"name": "test_vit", "image_size": 32}
    model = {"vision": vision, "text": text, "embed_dim": 16}
    save_clip(tmp_path / "clip")
    run_ranks(1, fine_tune, shards, tmp_path, {"random": {"model": {**model, "pretrained": ""}}, "tuned": {}})
    with pytest.raises(UserError, match="did not start from a trained model"):
        export_run(tmp_path / "random", "transformers", tmp_path / "out", fraction=0.5)
    with pytest.raises(UserError, match="did not start from a trained model"):
        export_soup([tmp_path / "random", folder / "lora"], "transformers", tmp_path / "out")
    (tmp_path / "clip").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"The model from which .*step_000000002 started cannot be opened: restore it"):
        export_run(tmp_path / "tuned", "transformers", tmp_path / "out", fraction=0.5)
    save_siglip(tmp_path / "clip")
    with pytest.raises(
        UserError,
        match=r"is no longer the one .* its temperature or bias differs\. Restore the original model",
    ):
        export_run(tmp_path / "tuned", "transformers", tmp_path / "out", fraction=0.5)
    shutil.rmtree(tmp_path / "clip")
    shutil.copytree(tmp_path / "moved", tmp_path / "clip")
    weights = load_file(tmp_path / "clip" / "model.safetensors")
    weights["visual_projection.weight"] += 1e-6
    save_file(weights, tmp_path / "clip" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"is no longer the one from which .* started: its weights differ"):
        export_run(tmp_path / "tuned", "transformers", tmp_path / "out", fraction=0.5)
    # a run that resumes with the replaced start still knows the original one
    weights["logit_scale"] += 1
    save_file(weights, tmp_path / "clip" / "model.safetensors", {"format": "pt"})
    run_ranks(1, fine_tune, shards, tmp_path, {"tuned": {"max_steps": 3}})
    assert newest_checkpoint(tmp_path, "tuned").name == "step_000000003"
    with pytest.raises(UserError, match=r"is no longer the one from which .* its temperature or bias differs"):
        export_run(tmp_path / "tuned", "transformers", tmp_path / "out", fraction=0.5)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def result(folder: Path) -> ModelWeights:
    return read_result(newest_checkpoint(folder, "zero3"))


def test_models_that_differ_cannot_be_averaged(result: ModelWeights) -> None:
    @dataclass
    class Upper:
        """The run's tokenizer, on captions in upper case."""

        context_length: int

        def __call__(self, captions: list[str]) -> Tensor:
            return result.tokenizer([f"A{caption}" for caption in captions])

        def save(self, folder: Path | str) -> None:
            raise NotImplementedError

    wider = {name: torch.cat([weight, weight]) for name, weight in result.weights.items()}
    with pytest.raises(UserError, match="they differ in the parameter"):
        weighted_mean([result, replace(result, weights=wider)], [0.5, 0.5])
    with pytest.raises(UserError, match="they differ in their tokenizers"):
        weighted_mean([result, replace(result, tokenizer=Upper(16))], [0.5, 0.5])


def test_runs_with_different_starts_are_no_soup(result: ModelWeights) -> None:
    """Starts are compared by the hash of their weights, if it is known, because their folders may have been moved."""

    def from_start(path: str, start_hash: str | None) -> ModelWeights:
        source = copy(result.source)
        source.config = source.config.model_copy(update={"pretrained": path})
        return replace(result, source=source, start_hash=start_hash)

    first = from_start("/a/clip", result.start_hash)
    assert result.start_hash is not None
    soup([first, from_start("/b/moved", result.start_hash)])
    soup([first, from_start("/b/clip", None)])  # a run of an earlier version
    with pytest.raises(UserError, match=r"was fine-tuned from /a/clip, but .* from /b/clip"):
        soup([first, from_start("/b/clip", "another")])
    with pytest.raises(UserError, match="from other weights in /a/clip"):
        soup([first, from_start("/a/clip", "another")])
    with pytest.raises(UserError, match="from /b/siglip"):
        soup([first, from_start("/b/siglip", None)])


def test_temperature_is_averaged_in_log_space_and_bias_linearly(result: ModelWeights) -> None:
    def with_logits(temperature: float | None, bias: float | None) -> ModelWeights:
        return replace(result, logits=LogitParameters(temperature, bias))

    middle = blend(with_logits(0.01, -10.0), with_logits(0.04, -6.0), 0.5).logits
    assert middle.temperature == pytest.approx(0.02)
    assert middle.bias == -8
    unknown = blend(with_logits(None, None), with_logits(0.04, -6.0), 0.5).logits
    assert unknown == pytest.approx((0.04, -6.0)), "the start has neither"
    assert soup([with_logits(tau, None) for tau in (0.01, 0.02, 0.04)]).logits.bias is None


def test_batch_norm_is_averaged_and_equal_weights_are_kept(result: ModelWeights) -> None:
    generator = torch.Generator().manual_seed(0)
    same = torch.randn(1000, generator=generator)
    first = {"same": same, "mean": torch.tensor([1.0, -0.0]), "batches": torch.tensor(3)}
    second = {"same": same, "mean": torch.tensor([2.0, 4.0]), "batches": torch.tensor(7)}
    models = [replace(result, weights=first), replace(result, weights=second)]
    for fraction in (0.1, 1 / 3, 0.7):
        assert torch.equal(blend(*models, fraction).weights["same"], same)
    quarter = blend(*models, 0.25).weights
    assert torch.equal(quarter["mean"], torch.tensor([1.25, 1.0]))
    assert quarter["batches"] == 7
    start = blend(*models, 0).weights
    assert math.copysign(1, start["mean"][1]) == -1, "bit for bit"
    assert start["batches"] == 3
