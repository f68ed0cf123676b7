"""Check that exports of any image tower with any text tower compute the trained model's features in each library.

The tests of sentence-transformers are skipped without that package (`pip install '.[sentence_transformers]'`), which
the fast suite has no time for; they were run with version 6.2.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
import torch
from miniatures import (
    CAPTIONS,
    OPEN_CLIP_CONFIG,
    TINY_TEXT,
    TINY_VIT,
    images,
    save_open_clip,
    xlm_roberta_tokenizer,
)
from test_encoders import save_text_encoder
from test_model_export import LOGITS, TrainedModel, assert_close, bpe, export, features, open_clip_features, trained
from torch import Tensor
from torch.nn.functional import normalize
from torchvision.transforms.functional import to_pil_image
from transformers import AutoModel, AutoProcessor

from neuclip_ds.errors import UserError
from neuclip_ds.models.source import open_saved

pytestmark = pytest.mark.usefixtures("quick_meta_models")

TEST_VIT = {"name": "test_vit", "image_size": 160}  # timm's own size
IMAGE_TOWERS: dict[str, dict[str, Any]] = {
    "clip_vit": TINY_VIT,
    "oblong_patches": {**TINY_VIT, "options": {**TINY_VIT["options"], "patch_size": [8, 4]}},
    "vit": TEST_VIT,
    "small_vit": {"name": "test_vit", "image_size": 32},
    "resnet": {"name": "test_resnet", "image_size": 64},
    "vit_mlp": {**TEST_VIT, "projection": "mlp"},
}
POOLINGS = {"bert": "cls", "xlm_roberta": "mean", "qwen": "eos", "t5": "mean", "modernbert": "last", "gemma": "mean"}
LIBRARIES = ("transformers", "open_clip", "sentence_transformers")


class Case(NamedTuple):
    """An image tower, a text tower, the formats that express both, and the reason that the others give."""

    image: str
    text: str
    libraries: tuple[str, ...]
    refused: str = ""


CASES = (
    Case("clip_vit", "clip", LIBRARIES),
    Case("oblong_patches", "clip", ("transformers", "sentence_transformers"), r"with model\.vision\.options"),
    Case("vit", "clip", LIBRARIES),
    Case("resnet", "clip", LIBRARIES),
    Case("small_vit", "clip", ("transformers", "sentence_transformers"), "images of 32 instead of 160 pixels"),
    Case("vit_mlp", "clip", ("open_clip", "sentence_transformers"), r"cannot express model\.vision\.projection=mlp"),
    Case("clip_vit", "clip_mlp", ("sentence_transformers",), r"model\.(text\.projection=mlp|vision\.options)"),
    Case("vit", "clip_eos_2", ("open_clip", "sentence_transformers"), "cannot pool at EOS id 2"),
    Case("resnet", "bert", ("transformers", "sentence_transformers"), "the text encoder in the folder"),
    Case("clip_vit", "bert", ("transformers", "sentence_transformers"), r"with model\.vision\.options"),
    Case("vit", "xlm_roberta", ("sentence_transformers",), r"pooling=mean|the text encoder in the folder"),
    Case("small_vit", "qwen", ("sentence_transformers",), r"pooling=eos|images of 32"),
    Case("resnet", "modernbert", ("sentence_transformers",), r"pooling=last|transformers' modernbert"),
    Case("vit", "gemma", ("sentence_transformers",), r"pooling=mean|transformers' gemma3_text"),
    Case("vit", "t5", ("sentence_transformers",), r"pooling=mean|transformers' t5"),
)


def trained_case(image: str, text: str, folder: Path) -> TrainedModel:
    if text == "clip":
        text_tower = TINY_TEXT
    elif text == "clip_mlp":
        text_tower = {**TINY_TEXT, "projection": "mlp"}
    elif text == "clip_eos_2":
        xlm_roberta_tokenizer().save_pretrained(folder)
        text_tower = {**TINY_TEXT, "tokenizer": str(folder)}
    else:
        save_text_encoder(text, folder)
        text_tower = {"pretrained": str(folder), "pooling": POOLINGS[text], "context_length": 16}
    return trained(vision=IMAGE_TOWERS[image], text=text_tower, embed_dim=40)


def transformers_features(folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """Return features computed by transformers alone, with the attention mask of the folder's tokenizer."""
    model = AutoModel.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    pictures = [to_pil_image(picture) for picture in images(size)]
    inputs = processor(text=CAPTIONS[:2], images=pictures, return_tensors="pt", padding=True, truncation=True)
    pixels = inputs.pop("pixel_values")
    with torch.no_grad():
        image = model.get_image_features(pixel_values=pixels).pooler_output
        text = model.get_text_features(**inputs).pooler_output
    return normalize(image, dim=1), normalize(text, dim=1)


def sentence_features(folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """Return features computed by sentence-transformers alone."""
    sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    pictures = [to_pil_image(picture) for picture in images(size)]
    return model.encode(pictures, convert_to_tensor=True), model.encode(CAPTIONS[:2], convert_to_tensor=True)


LIBRARY_FEATURES: dict[str, Callable[[Path, int], tuple[Tensor, Tensor]]] = {
    "transformers": transformers_features,
    "open_clip": open_clip_features,
    "sentence_transformers": sentence_features,
}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.image}-{case.text}")
def case_and_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, quick_meta_models: None
) -> tuple[Case, TrainedModel]:
    """Return a case and its trained model, which is exported to all libraries."""
    case = request.param
    return case, trained_case(case.image, case.text, tmp_path_factory.mktemp("case") / "from")


@pytest.mark.parametrize("library", LIBRARIES)
def test_exports_keep_their_features_or_are_refused(
    case_and_model: tuple[Case, TrainedModel], library: str, tmp_path: Path
) -> None:
    case, model = case_and_model
    if library not in case.libraries:
        with pytest.raises(UserError, match=rf"({case.refused}).*--format=sentence_transformers"):
            export(model, library, tmp_path / library)
        return
    folder = export(model, library, tmp_path / library)
    assert not any(str(tmp_path) in path.read_text() for path in folder.rglob("*.json"))
    assert_close(LIBRARY_FEATURES[library](folder, model.source.preprocessing.size), features(model))


def to_hub_cache(folder: Path, name: str, cache: Path) -> None:
    """Move a folder to the place of the repository `name` in a cache of the hub."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / ("0" * 40))


@pytest.mark.parametrize(("family", "head"), [("xlm_roberta", "linear"), ("bert", "mlp")])
def test_open_clip_names_an_encoder_on_the_hub(
    family: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_text_encoder(family, tmp_path / "encoder")
    to_hub_cache(tmp_path / "encoder", "someone/tiny", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    text = {"pretrained": "someone/tiny", "pooling": POOLINGS[family], "context_length": 16, "projection": head}
    model = trained(vision=IMAGE_TOWERS["resnet"], text=text, embed_dim=40)
    folder = export(model, "open_clip", tmp_path / "out")
    config = json.loads((folder / "open_clip_config.json").read_text())
    assert config["model_cfg"]["text_cfg"]["hf_model_name"] == "someone/tiny"
    assert_close(open_clip_features(folder, 64), features(model))


def test_attention_pooling_is_exported_to_sentence_transformers(tmp_path: Path) -> None:
    """Its projection has a bias, which the other formats lack."""
    options = {"width_factor": 0.125, "stem_chs": 16}
    model = trained(
        vision={"name": "resnet50_clip", "image_size": 32, "options": options}, text=TINY_TEXT, embed_dim=40
    )
    for library in ("transformers", "open_clip"):
        with pytest.raises(UserError, match=r"resnet50_clip.*--format=sentence_transformers"):
            export(model, library, tmp_path / library)
    folder = export(model, "sentence_transformers", tmp_path / "out")
    assert_close(sentence_features(folder, 32), features(model))


def test_an_open_clip_model_with_an_encoder_in_a_folder_keeps_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's folder is gone when the run is reopened and when open_clip loads the export."""
    save_text_encoder("xlm_roberta", tmp_path / "encoder")
    config = {
        **OPEN_CLIP_CONFIG,
        "custom_text": True,
        "text_cfg": {
            "hf_model_name": str(tmp_path / "encoder"),
            "hf_model_pretrained": False,
            "hf_tokenizer_name": "tokenizer",
            "hf_pooler_type": "mean_pooler",
            "hf_proj_type": "linear",
            "context_length": 16,
        },
    }
    save_open_clip(tmp_path / "from", config)
    xlm_roberta_tokenizer().save_pretrained(tmp_path / "from")
    model = trained(pretrained=f"open_clip:{tmp_path}/from")
    model.source.save(tmp_path / "run", LOGITS)
    expected = features(model)
    weights = model.model.state_dict()
    (tmp_path / "encoder").rename(tmp_path / "moved")
    (tmp_path / "from").rename(tmp_path / "moved_too")

    source, _ = open_saved(model.source.config, tmp_path / "run")
    tokenizer = source.own_tokenizer() or bpe()
    rebuilt = source.build(tokenizer).eval()
    rebuilt.load_state_dict(weights)
    assert_close(features(TrainedModel(source, tokenizer, rebuilt)), expected)
    folder = export(TrainedModel(source, tokenizer, rebuilt), "open_clip", tmp_path / "out")
    assert not any(str(tmp_path) in path.read_text() for path in folder.rglob("*.json"))
    monkeypatch.chdir(folder)
    assert_close(open_clip_features(Path(), 32), expected)
