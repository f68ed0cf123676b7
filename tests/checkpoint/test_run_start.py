"""Runs that start from other runs, at a larger image size and context length (CLIPA's second stage)."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from miniatures import CAPTIONS, TINY_TEXT, TINY_VIT, clip_tokenizer, images, save_clip
from ranks import run_ranks
from small_runs import newest_checkpoint, train_connected
from test_encoders import save_text_encoder
from transformers import CLIPModel

from neuclip_ds.checkpoint.blend import blend
from neuclip_ds.checkpoint.export_run import export_run
from neuclip_ds.checkpoint.saved_model import (
    final_logits,
    initial_source,
    open_model,
    open_run,
    read_result,
    read_start,
)
from neuclip_ds.config import ModelConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.pretrained.positions import resample_positions
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.recipe import validate

SIZES: dict[str, Any] = {"vision": {"image_size": 48}, "text": {"context_length": 24}}
# runs in the order in which they start from each other: the name of the start, and further options of the model
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("", {"vision": TINY_VIT, "embed_dim": 24}),  # and a tokenizer from a folder
    "large": ("small", SIZES),
    "adapted": ("large", {"lora": {"rank": 2}}),
    "small_clip": ("clip", {"lora": {"rank": 2}}),
    "large_clip": ("small_clip", SIZES),
    "encoder": ("", {"vision": TINY_VIT, "embed_dim": 24}),  # and a pretrained text encoder
    "large_encoder": ("encoder", {"vision": {"image_size": 48}}),
}
LARGE = ("large", "large_clip")
RESUMED = ("small", "large_clip")


def model_options(folder: Path, name: str) -> dict[str, Any]:
    start, options = STAGES[name]
    if name == "small":
        return {**options, "text": {**TINY_TEXT, "tokenizer": str(folder / "tokenizer")}}
    if name == "encoder":
        return {**options, "text": {"pretrained": str(folder / "bert"), "pooling": "mean", "context_length": 16}}
    return {**options, "pretrained": str(folder / start)} if start else options


def train_stages(communicator: Communicator, shards: Path, folder: Path) -> None:
    for name in STAGES:
        config = {
            "run": {"name": name, "output_dir": str(folder)},
            "data": {"train": str(shards), "val": "", "zero_shot": "", "batch_size": 8, "workers": 0},
            "model": model_options(folder, name),
            "objective": {"method": "openclip"},
            "optimizer": {"lr": 0.01, "warmup_steps": 0},
            "deepspeed": "zero1_fp32",
            "max_steps": 1,
        }
        train_connected(communicator, validate(config))
        if name == "small":
            communicator.on_rank_zero(lambda: shutil.rmtree(folder / "tokenizer"))
        if name in RESUMED:
            train_connected(communicator, validate({**config, "max_steps": 2}))


@pytest.fixture(scope="module")
def folder(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    clip_tokenizer().save_pretrained(folder / "tokenizer")
    save_clip(folder / "clip")
    save_text_encoder("bert", folder / "bert")
    run_ranks(2, train_stages, shards, folder)
    return folder


@pytest.mark.parametrize("name", [name for name in STAGES if STAGES[name][0] not in ("", "clip")])
def test_a_run_starts_from_the_weights_of_another(name: str, folder: Path) -> None:
    start, _ = STAGES[name]
    earlier = read_result(newest_checkpoint(folder, start))
    run = open_run(newest_checkpoint(folder, name))
    begun = read_start(newest_checkpoint(folder, name), Communicator())
    assert begun.logits.temperature == earlier.logits.temperature == run.initial_logits.temperature
    expected: Mapping[str, torch.Tensor] = resample_positions(earlier.weights, begun.weights)
    assert begun.weights.keys() == expected.keys()
    for tensor, wanted in zip(begun.weights.values(), expected.values(), strict=True):
        assert torch.equal(tensor, wanted)
    tokens = begun.tokenizer(CAPTIONS)
    assert tokens.shape[1] == (16 if name == "large_encoder" else 24)
    assert torch.equal(run.tokenizer(CAPTIONS), tokens)
    assert begun.source.preprocessing.size == run.source.preprocessing.size == 48
    result = read_result(newest_checkpoint(folder, name))
    half = blend(begun, result, 0.5).weights
    for key, tensor in half.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (begun.weights[key] + result.weights[key]) / 2)


@pytest.mark.parametrize("name", LARGE)
def test_exports_and_plans_have_the_new_sizes(name: str, folder: Path, tmp_path: Path) -> None:
    export_run(folder / name, "transformers", tmp_path / "export")
    saved = open_model(str(folder / name), Communicator())
    tokens = saved.tokenizer(CAPTIONS)
    with torch.no_grad():
        image, text = saved.model.eval()(images(48), tokens)
        exported = open_model(str(tmp_path / "export"), Communicator())
        for mine, theirs in zip((image, text), exported.model.eval()(images(48), tokens), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    config = CLIPModel.from_pretrained(tmp_path / "export").config
    assert (config.vision_config.image_size, config.text_config.max_position_embeddings) == (48, 24)
    query = MemoryQuery(validate({"model": model_options(folder, name), "data": {"batch_size": 8}}), world_size=2)
    assert (query.image_size, query.tokenizer.context_length) == (48, 24)


def test_adapters_are_added_to_the_weights_of_the_start(folder: Path) -> None:
    """`model.pretrained` can name a run or one of its checkpoints."""
    checkpoint = newest_checkpoint(folder, "small_clip")
    config = ModelConfig.model_validate({"pretrained": str(checkpoint), "lora": {"rank": 2}})
    source = initial_source(config, Communicator())
    tokenizer = source.own_tokenizer()
    model, _ = source.load(tokenizer)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    saved = open_model(str(checkpoint), Communicator())
    with torch.no_grad():
        features = model.eval()(images(32), tokenizer(CAPTIONS))
        for mine, theirs in zip(features, saved.model.eval()(images(32), tokenizer(CAPTIONS)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["bias", "tau", "theta", "temperature.theta"])
def test_state_of_a_plugin_that_is_no_scalar_is_neither_temperature_nor_bias(name: str) -> None:
    start = LogitParameters(temperature=0.03, bias=-5.0)
    for pretrained, bias in (("owner/model", -5.0), ("", None)):
        config = validate({"model": {"pretrained": pretrained}})
        expected = LogitParameters(config.objective.temperature.initial or 0.03, bias)
        assert final_logits({name: torch.zeros(4)}, config, start) == expected
    trained = {"tau": torch.tensor([0.5]), "bias": torch.tensor(2.0)}
    assert final_logits(trained, config, start) == LogitParameters(0.5, 2.0)


def test_a_run_can_be_named_from_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{tmp_path}/mine .*checkpoint"):
        open_model("~/mine", Communicator())


@pytest.mark.parametrize("name", ["small", "large"])
def test_runs_keep_a_tokenizer_from_a_folder(name: str, folder: Path, tmp_path: Path) -> None:
    """The folder was removed before the run resumed, and before another run started from it."""
    clip_tokenizer().save_pretrained(tmp_path / "named")
    tokenizer = open_model(str(folder / name), Communicator()).tokenizer
    expected = CaptionTokenizer.load(tmp_path / "named", tokenizer.context_length)
    assert torch.equal(tokenizer(CAPTIONS), expected(CAPTIONS))
