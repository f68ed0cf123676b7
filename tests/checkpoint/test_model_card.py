"""The model card of an export: metadata that the hub reads, scores, data and recipe, and nothing of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from neuclip_ds.checkpoint import model_card as module
from neuclip_ds.checkpoint.model_card import model_card, public_name
from neuclip_ds.config import Config


def config_of(tmp_path: Path, **model: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "mine", "folder": str(tmp_path)},
            "data": {"train": f"{tmp_path}/dfn12m", "val": f"{tmp_path}/secret_val", "batch_size": 64},
            "model": model,
            "objective": {"method": "fastclip_v3"},
            "optimizer": {"lr": 1e-3},
            "budget": {"steps": 20},
        }
    )


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint of step 20 in a run with scores of three steps."""
    monkeypatch.setattr(module, "read_meta", lambda path: {"step": 20})
    run = tmp_path / "mine"
    records = [
        {"step": 10, "zero_shot_top1": 0.1},
        {"step": 20, "loss": 1.5, "lr": 0.001},
        {"step": 20, "zero_shot_top1": 0.25, "zero_shot_images": 100.0, "image_to_text_recall@1": 0.5},
    ]
    folder = run / "checkpoints" / "step_000000020"
    scores = run / "evaluation" / folder.name
    scores.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    line = {"key": "imagenet1k", "dataset": "ImageNet 1k", "metrics": {"acc1": 0.3, "main_metric": 0.3}}
    (scores / "eval_results.jsonl").write_text(f"{json.dumps(line)}\n")
    return folder


def test_scores_data_recipe_and_licence(checkpoint: Path, tmp_path: Path) -> None:
    text = model_card(config_of(tmp_path, pretrained="openai/clip-vit-base-patch32"), checkpoint, "transformers", "mit")
    assert str(tmp_path) not in text and "/" + tmp_path.name not in text
    data = ModelCard(text).data
    assert (data.license, data.library_name, data.base_model) == (
        "mit",
        "transformers",
        ["openai/clip-vit-base-patch32"],
    )
    assert data.pipeline_tag == "zero-shot-image-classification"
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found == {"zero_shot_top1": 0.25, "image_to_text_recall@1": 0.5, "task/imagenet1k": 0.3}
    of = {result.metric_type: (result.dataset_type, result.dataset_name) for result in data.eval_results}
    assert of["zero_shot_top1"] == ("zero-shot images", "zero-shot images")
    assert of["image_to_text_recall@1"] == ("held-out pairs", "secret_val")
    assert of["task/imagenet1k"] == ("imagenet1k", "imagenet1k")
    assert "| zero_shot_top1 | 0.2500 |" in text
    assert "| data | `dfn12m` |" in text
    assert "20 of 64 pairs, 1,280 pairs in all" in text
    assert "lr: 0.001" in text and "secret_val" in text and "runs" not in text
    assert "`mit`. The licence of `openai/clip-vit-base-patch32` applies too." in text


def test_a_model_from_random_weights_without_scores(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "metrics.jsonl").unlink()
    (tmp_path / "mine" / "evaluation" / checkpoint.name / "eval_results.jsonl").unlink()
    text = model_card(config_of(tmp_path), checkpoint, "onnx")
    data = ModelCard(text).data
    assert (data.license, data.base_model, data.eval_results) == ("unknown", None, None)
    assert "trained from random weights" in text and "None were measured" in text and "has stated none" in text


def test_weights_of_each_tower(checkpoint: Path, tmp_path: Path) -> None:
    towers = {"vision": {"pretrained": "openai"}, "text": {"pretrained": f"{tmp_path}/xlm-roberta-base"}}
    text = model_card(config_of(tmp_path, **towers), checkpoint, "onnx")
    assert (
        "its image tower from `vit_base_patch32_clip_224 (openai)` and its text tower from `xlm-roberta-base`" in text
    )


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("/data/dfn12m", "dfn12m"),
        ("~/weights/clip", "clip"),
        ("../weights/clip.pt", "clip.pt"),
        ("s3://bucket/cc3m/{00000..00331}.tar", "{00000..00331}.tar"),
        ("openai/clip-vit-base-patch32", "openai/clip-vit-base-patch32"),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", "open_clip:ViT-B-32/laion2b_s34b_b79k"),
        ("open_clip:ViT-B-32//weights/epoch_5.pt", "open_clip:ViT-B-32/epoch_5.pt"),
        ("open_clip:/weights/folder", "open_clip:folder"),
        ("demo:train", "demo:train"),
        ("adamw", "adamw"),
    ],
)
def test_names_without_paths(value: str, name: str) -> None:
    assert public_name(value) == name


def test_a_folder_that_is_there_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "clip").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("models/clip") == "clip"
