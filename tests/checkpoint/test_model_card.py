"""An export's model card has the hub's metadata, scores, data and method, but no paths of this machine."""

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
            "run": {"name": "mine", "output_dir": str(tmp_path)},
            "data": {"train": f"{tmp_path}/dfn12m", "val": f"{tmp_path}/secret_val", "batch_size": 64},
            "model": model,
            "objective": {"method": "fastclip_v3"},
            "optimizer": {"lr": 1e-3},
            "max_steps": 20,
        }
    )


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the checkpoint of step 20 of a run that has scores at two steps."""
    monkeypatch.setattr(module, "read_meta", lambda path: {"step": 20})
    records = [
        {"step": 10, "zero_shot_top1": 0.1},
        {"step": 20, "loss": 1.5, "zero_shot_top1": 0.25, "zero_shot_images": 100.0, "ema/zero_shot_top1": 0.375},
        {
            "step": 20,
            "chance/zero_shot_top1": 0.1,
            "image_to_text_recall@1": 0.5,
            "chance/image_to_text_recall@1": 0.01,
            "prefix8/image_to_text_recall@1": 0.4,
        },
        {"step": 20, "average/vtab": 0.4, "chance/average/vtab": 0.05, "task/vtab/pets": 0.3, "task/own/x": "nan"},
    ]
    folder = tmp_path / "mine" / "checkpoints" / "step_000000020"
    folder.mkdir(parents=True)
    (tmp_path / "mine" / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def test_a_card_lists_the_scores_of_its_step_the_data_the_method_and_the_license(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, pretrained="openai/clip-vit-base-patch32")
    text = model_card(config, checkpoint, "transformers", "mit")
    assert str(tmp_path) not in text and "/" + tmp_path.name not in text
    data = ModelCard(text).data
    assert (data.license, data.library_name) == ("mit", "transformers")
    assert (data.base_model, data.pipeline_tag) == (
        ["openai/clip-vit-base-patch32"],
        "zero-shot-image-classification",
    )
    assert "| zero_shot_top1 | 0.2500 | 0.1000 |" in text and "zero_shot_images" not in text
    assert "20 steps of neuclip_ds with the method fastclip_v3 on `dfn12m`" in text
    assert "`mit`. The license of openai/clip-vit-base-patch32 applies too." in text
    assert [(one.metric_name, one.metric_value) for one in data.eval_results] == [
        ("average/vtab", 0.4),
        ("zero_shot_top1", 0.25),
        ("image_to_text_recall@1", 0.5),
        ("prefix8/image_to_text_recall@1", 0.4),
        ("task/vtab/pets", 0.3),
    ], "as the hub reads them, without chance and what is no number"
    assert {one.dataset_type for one in data.eval_results if "recall" in one.metric_name} == {"secret_val"}
    results = {one.metric_name: (one.task_type, one.dataset_name, one.metric_type) for one in data.eval_results}
    assert results["task/vtab/pets"] == ("zero-shot-image-classification", "Oxford-IIIT Pet", "mean_per_class_recall")
    assert results["image_to_text_recall@1"] == ("image-text-retrieval", "secret_val", "recall")
    zero_shot = ("zero-shot-image-classification", "zero-shot set of dfn12m", "accuracy")
    assert results["zero_shot_top1"] == zero_shot, "data.zero_shot is auto"
    of_prefix = results["prefix8/image_to_text_recall@1"]
    assert of_prefix == results["image_to_text_recall@1"], "on the same data"
    averaged = model_card(config, checkpoint, "transformers", average=True)
    assert "| zero_shot_top1 | 0.3750 | 0.1000 |" in averaged and "moving average" in averaged


def test_a_card_without_scores_names_the_initial_weights(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "metrics.jsonl").unlink()
    text = model_card(config_of(tmp_path), checkpoint, "open_clip")
    data = ModelCard(text).data
    assert (data.license, data.base_model) == ("unknown", None)
    assert "trained from random weights" in text and "None were measured" in text and "has stated none" in text
    config = config_of(tmp_path, vision={"pretrained": f"{tmp_path}/vit.safetensors"})
    text = model_card(config, checkpoint, "open_clip")
    assert "trained from `vit.safetensors` (image tower)" in text


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("/data/dfn12m", "dfn12m"),
        ("s3://bucket/cc3m/{00000..00331}.tar", "{00000..00331}.tar"),
        ("openai/clip-vit-base-patch32", "openai/clip-vit-base-patch32"),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", "open_clip:ViT-B-32/laion2b_s34b_b79k"),
        ("open_clip:ViT-B-32//weights/epoch_5.pt", "epoch_5.pt"),
        ("models/clip", "clip"),  # an existing folder
    ],
)
def test_public_names_contain_no_local_path(
    value: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "clip").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name(value) == name
