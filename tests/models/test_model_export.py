"""Check that exported models, loaded by transformers and open_clip, compute the trained model's features."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import open_clip
import pytest
import torch
from miniatures import (
    CAPTIONS,
    SAVERS,
    TINY_TEXT,
    TINY_VIT,
    images,
    xlm_roberta_tokenizer,
)
from torch import Tensor
from torch.nn.functional import normalize
from torchvision.transforms.functional import to_pil_image
from transformers import (
    AutoModel,
    AutoProcessor,
    CLIPTextModelWithProjection,
    CLIPVisionModelWithProjection,
    pipeline,
)
from transformers_4 import needs_transformers_4, run_transformers_4

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.conversion import write_library_model
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.source import ModelSource, locate_model, merged, model_source
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer, named_tokenizer
from neuclip_ds.models.towers import DualEncoder

pytestmark = pytest.mark.usefixtures("quick_meta_models")

LOGITS = LogitParameters(0.02, None)


class TrainedModel(NamedTuple):
    source: ModelSource
    tokenizer: ModelTokenizer
    model: DualEncoder


def trained(**config: Any) -> TrainedModel:
    """Return a model whose weights have all been changed, as if by training."""
    torch.manual_seed(0)
    model_config = ModelConfig.model_validate(config)
    source = model_source(model_config, locate_model(model_config))
    text = model_config.text
    new_tokenizer = bpe if text.tokenizer is None else partial(named_tokenizer, text)
    tokenizer = source.own_tokenizer() or new_tokenizer()
    model = source.load(tokenizer).model.eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.rand_like(tensor))
    return TrainedModel(source, tokenizer, model)


def bpe() -> CaptionTokenizer:
    return train_bpe(["a dog runs", "two cats sleep", *CAPTIONS], vocab_size=300, context_length=16)


def export(trained: TrainedModel, library: str, folder: Path, logits: LogitParameters = LOGITS) -> Path:
    """Write a model to a new folder in a library's format, with its adapters merged."""
    folder.mkdir()
    source, weights = merged(trained.source, trained.tokenizer, trained.model.state_dict())
    write_library_model(source.to_library_model(trained.tokenizer, weights, logits), library, folder)
    return folder


def features(trained: TrainedModel) -> tuple[Tensor, Tensor]:
    size = trained.source.preprocessing.size
    with torch.no_grad():
        return trained.model(images(size), trained.tokenizer(CAPTIONS[:2]))


def transformers_features(folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """Return features computed by transformers alone, with the folder's processor for images and captions."""
    model = AutoModel.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    pictures = [to_pil_image(picture) for picture in images(size)]
    inputs = processor(
        text=CAPTIONS[:2], images=pictures, return_tensors="pt", padding="max_length", truncation=True, max_length=16
    )
    with torch.no_grad():
        image = model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
        text = model.get_text_features(input_ids=inputs["input_ids"]).pooler_output
    return normalize(image, dim=1), normalize(text, dim=1)


def open_clip_features(folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """Return features computed by open_clip alone."""
    model, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    model.eval()
    pictures = torch.stack([preprocess(to_pil_image(picture)) for picture in images(size)])
    with torch.no_grad():
        return model.encode_image(pictures, normalize=True), model.encode_text(tokenizer(CAPTIONS[:2]), normalize=True)


LIBRARY_FEATURES: dict[str, Callable[[Path, int], tuple[Tensor, Tensor]]] = {
    "transformers": transformers_features,
    "open_clip": open_clip_features,
}


def assert_close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for actual_features, expected_features in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_features, expected_features, rtol=0, atol=1e-5)


def reopened(folder: Path) -> tuple[TrainedModel, LogitParameters]:
    config = ModelConfig(pretrained=str(folder))
    source = model_source(config, locate_model(config))
    tokenizer = source.own_tokenizer() or bpe()
    model, logits = source.load(tokenizer)
    return TrainedModel(source, tokenizer, model.eval()), logits


FORMATS = {  # the libraries in whose format models of a family can be exported
    "clip": ("transformers", "open_clip"),
    "metaclip_2": ("transformers", "open_clip"),
    "siglip": ("transformers",),
    "open_clip": ("open_clip",),
}


@pytest.mark.parametrize("family", FORMATS)
def test_exported_pretrained_models_keep_their_features(family: str, tmp_path: Path) -> None:
    """In the format of the model's own library, weights stay bit-identical, too."""
    SAVERS[family](tmp_path / "from")
    model = trained(pretrained=str(tmp_path / "from"))
    own_library = "open_clip" if family == "open_clip" else "transformers"
    for library in FORMATS[family]:
        folder = export(model, library, tmp_path / library)
        assert_close(LIBRARY_FEATURES[library](folder, 32), features(model))
        exported, logits = reopened(folder)
        assert_close(features(exported), features(model))
        assert logits.temperature == pytest.approx(0.02)
        assert exported.source.preprocessing == model.source.preprocessing
        assert not any(str(tmp_path) in path.read_text() for path in folder.glob("*.json"))
        if library == own_library:
            state = exported.model.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in model.model.state_dict().items())


PROGRAM_OF_TRANSFORMERS_4 = """
import sys
import torch
from torchvision.transforms.functional import to_pil_image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
options = {"padding": "max_length", "truncation": True, "max_length": 16, "return_tensors": "pt"}
for folder in sys.argv[1:]:
    inputs = torch.load(folder + "/inputs.pt")
    pictures = [to_pil_image(picture) for picture in inputs["images"]]
    pixels = AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt")["pixel_values"]
    ids = AutoTokenizer.from_pretrained(folder)(inputs["captions"], **options)["input_ids"]
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        features = [model.get_image_features(pixel_values=pixels), model.get_text_features(input_ids=ids)]
    torch.save([torch.nn.functional.normalize(feature, dim=1) for feature in features], folder + "/features.pt")
"""


@pytest.mark.slow
@needs_transformers_4
def test_transformers_4_computes_the_same_features_from_exports(tmp_path: Path) -> None:
    expected: dict[Path, tuple[Tensor, Tensor]] = {}
    for family in ("scratch", "clip", "metaclip_2", "siglip"):
        if family == "scratch":
            model = trained(vision=TINY_VIT, text=TINY_TEXT, embed_dim=16)
        else:
            SAVERS[family](tmp_path / "from" / family)
            model = trained(pretrained=str(tmp_path / "from" / family))
        folder = export(model, "transformers", tmp_path / family)
        torch.save({"images": images(32), "captions": CAPTIONS[:2]}, folder / "inputs.pt")
        expected[folder] = features(model)
    run_transformers_4(PROGRAM_OF_TRANSFORMERS_4, *map(str, expected))
    for folder, model_features in expected.items():
        assert_close(tuple(torch.load(folder / "features.pt")), model_features)


def options_of(case: str, folder: Path) -> dict[str, Any]:
    """Return the model options of a case; the model is built from the config."""
    if case == "eos of 2":  # XLM-R's ids; for EOS 2, CLIPModel would read the feature elsewhere
        xlm_roberta_tokenizer().save_pretrained(folder)
        return {"text": {**TINY_TEXT, "tokenizer": str(folder)}}
    if case == "quick gelu with adapters":
        vision = {**TINY_VIT, "name": "vit_base_patch32_clip_quickgelu_224"}
        return {"vision": vision, "lora": {"rank": 2, "alpha": 3}}
    return {}


@pytest.mark.parametrize("case", ["new", "quick gelu with adapters", "eos of 2"])
def test_exported_clip_vits_from_the_config_keep_their_features(case: str, tmp_path: Path) -> None:
    """CLIPModel has no parameter for SigLIP's bias."""
    options = {"vision": TINY_VIT, "text": TINY_TEXT, "embed_dim": 16, **options_of(case, tmp_path / "from")}
    model = trained(**options)
    biases = {"transformers": None, "open_clip": -9.5}
    for library, bias in biases.items():
        folder = export(model, library, tmp_path / library, LogitParameters(0.1, -9.5))
        assert_close(LIBRARY_FEATURES[library](folder, 32), features(model))
        assert reopened(folder)[1] == pytest.approx((0.1, bias))


@pytest.mark.parametrize("family", ["scratch", "metaclip_2", "siglip"])
def test_single_towers_and_the_pipeline_of_transformers_load_exports(family: str, tmp_path: Path) -> None:
    """The projection's width of 16 differs from the default of 512 in transformers' configs.

    For MetaCLIP 2 and SigLIP, the pipeline pads captions to 64 tokens, as for the published models.
    """
    if family == "scratch":
        model = trained(vision=TINY_VIT, text=TINY_TEXT, embed_dim=16)
    else:
        SAVERS[family](tmp_path / "from", length=64)
        model = trained(pretrained=str(tmp_path / "from"))
    folder = export(model, "transformers", tmp_path / "out")
    image, text = features(model)
    if family == "scratch":
        with torch.no_grad():
            vision_tower = CLIPVisionModelWithProjection.from_pretrained(folder).eval()
            text_tower = CLIPTextModelWithProjection.from_pretrained(folder).eval()
            tower_image = vision_tower(model.model.vision.normalize(images(32))).image_embeds
            tower_text = text_tower(model.tokenizer(CAPTIONS[:2])).text_embeds
        assert_close((normalize(tower_image, dim=1), normalize(tower_text, dim=1)), (image, text))
    labels = ["a dog", "a cat"]
    picture = images(32)[:1]
    classify = pipeline("zero-shot-image-classification", model=str(folder))
    scores = classify(to_pil_image(picture[0]), candidate_labels=labels, hypothesis_template="{}")
    with torch.no_grad():
        image, text = model.model(picture, model.tokenizer(labels))
    logits = image[0] @ text.T / 0.02
    expected = torch.sigmoid(logits) if family == "siglip" else logits.softmax(0)
    score_of_label = {row["label"]: row["score"] for row in scores}
    actual = torch.tensor([score_of_label[label] for label in labels])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "library"),
    [("open_clip", "transformers"), ("siglip", "open_clip"), ("clip", "sentence_transformers")],
)
def test_a_model_that_a_format_cannot_express_is_refused_with_its_own_format(
    family: str, library: str, tmp_path: Path
) -> None:
    SAVERS[family](tmp_path / "from")
    own_library = "open_clip" if family == "open_clip" else "transformers"
    with pytest.raises(UserError, match=f"--format={own_library}"):
        export(trained(pretrained=str(tmp_path / "from")), library, tmp_path / "out")


def test_open_clip_cannot_resize_to_more_pixels_than_it_crops_to(tmp_path: Path) -> None:
    SAVERS["clip"](tmp_path / "from")
    path = tmp_path / "from" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "size": {"shortest_edge": 40}}))
    with pytest.raises(UserError, match=r"resizes images to 40 pixels and crops them to 32, .*--format=transformers"):
        export(trained(pretrained=str(tmp_path / "from")), "open_clip", tmp_path / "out")
