"""Check that exported models, loaded by transformers and open_clip, compute the trained model's features."""

from collections.abc import Callable
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

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.conversion import write_library_model
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.source import ModelSource, locate_model, merged, model_source
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer
from neuclip_ds.models.towers import DualEncoder

LOGITS = LogitParameters(0.02, None)


class Trained(NamedTuple):
    source: ModelSource
    tokenizer: ModelTokenizer
    model: DualEncoder


def trained(**config: Any) -> Trained:
    """Return a model whose weights have all been changed, as if by training."""
    torch.manual_seed(0)
    model_config = ModelConfig.model_validate(config)
    source = model_source(model_config, locate_model(model_config))
    tokenizer = source.tokenizer(bpe)
    model = source.load(tokenizer).model.eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.rand_like(tensor))
    return Trained(source, tokenizer, model)


def bpe() -> CaptionTokenizer:
    return train_bpe(["a dog runs", "two cats sleep", *CAPTIONS], vocab_size=300, context_length=16)


def exported(of: Trained, form: str, folder: Path, logits: LogitParameters = LOGITS) -> Path:
    folder.mkdir()
    write_library_model(of.source.to_library_model(of.tokenizer, of.model.state_dict(), logits), form, folder)
    return folder


def features(of: Trained) -> tuple[Tensor, Tensor]:
    size = of.source.preprocessing.size
    with torch.no_grad():
        return of.model(images(size), of.tokenizer(CAPTIONS[:2]))


def by_transformers(folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """Return features computed by transformers alone, with the folder's processor for images and captions."""
    model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    pictures = [to_pil_image(picture) for picture in images(size)]
    inputs = processor(
        text=CAPTIONS[:2], images=pictures, return_tensors="pt", padding="max_length", truncation=True, max_length=16
    )
    with torch.no_grad():
        image = model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
        text = model.get_text_features(input_ids=inputs["input_ids"]).pooler_output
    return normalize(image, dim=1), normalize(text, dim=1)


def by_open_clip(folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """Return features computed by open_clip alone."""
    model, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    model.eval()
    pictures = torch.stack([preprocess(to_pil_image(picture)) for picture in images(size)])
    with torch.no_grad():
        return model.encode_image(pictures, normalize=True), model.encode_text(tokenizer(CAPTIONS[:2]), normalize=True)


READERS: dict[str, Callable[[Path, int], tuple[Tensor, Tensor]]] = {
    "transformers": by_transformers,
    "open_clip": by_open_clip,
}


def assert_equal(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def reopened(folder: Path) -> tuple[Trained, LogitParameters]:
    config = ModelConfig(pretrained=str(folder))
    source = model_source(config, locate_model(config))
    tokenizer = source.tokenizer(bpe)
    model, logits = source.load(tokenizer)
    return Trained(source, tokenizer, model.eval()), logits


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("clip", "transformers"),
        ("clip", "open_clip"),
        ("metaclip_2", "transformers"),
        ("metaclip_2", "open_clip"),
        ("siglip", "transformers"),
        ("open_clip", "open_clip"),
    ],
)
def test_pretrained_models_go_out_and_come_back(family: str, form: str, tmp_path: Path) -> None:
    """Exported models keep their features; in their own library's format, their weights stay bit-identical."""
    SAVERS[family](tmp_path / "from")
    model = trained(pretrained=str(tmp_path / "from"))
    folder = exported(model, form, tmp_path / "out")
    assert_equal(READERS[form](folder, 32), features(model))
    again, logits = reopened(folder)
    assert_equal(features(again), features(model))
    assert logits.temperature == pytest.approx(0.02)
    assert again.source.preprocessing == model.source.preprocessing
    assert not any(str(tmp_path) in path.read_text() for path in folder.glob("*.json"))
    if (form == "open_clip") == (family == "open_clip"):
        state = again.model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in model.model.state_dict().items())


def options_of(case: str, folder: Path) -> dict[str, Any]:
    """Return the model options of a case; the model is built from the config."""
    if case == "eos of 2":  # XLM-R's ids; for EOS 2, CLIPModel would read the feature elsewhere
        xlm_roberta_tokenizer().save_pretrained(folder)
        return {"text": {**TINY_TEXT, "tokenizer": str(folder)}}
    quick_vit = {**TINY_VIT, "name": "vit_base_patch32_clip_quickgelu_224"}
    return {"new": {}, "quick gelu": {"vision": quick_vit}, "adapters": {"lora": {"rank": 2, "alpha": 3}}}[case]


@pytest.mark.parametrize("form", READERS)
@pytest.mark.parametrize("case", ["new", "quick gelu", "adapters", "eos of 2"])
def test_clip_vits_from_the_config(case: str, form: str, tmp_path: Path) -> None:
    """Export CLIP ViTs that are built from the config; CLIPModel has no parameter for SigLIP's bias."""
    tiny = {"vision": TINY_VIT, "text": TINY_TEXT, "embed_dim": 16}
    model = trained(**{**tiny, **options_of(case, tmp_path / "from")})
    source, weights = merged(model.source, model.tokenizer, model.model.state_dict())
    (tmp_path / "out").mkdir()
    library_model = source.to_library_model(model.tokenizer, weights, LogitParameters(0.1, -9.5))
    write_library_model(library_model, form, tmp_path / "out")
    assert_equal(READERS[form](tmp_path / "out", 32), features(model))
    assert reopened(tmp_path / "out")[1] == pytest.approx((0.1, -9.5) if form == "open_clip" else (0.1, None))


@pytest.mark.parametrize("family", ["clip", "scratch", "metaclip_2", "siglip"])
def test_single_towers_and_the_pipeline_of_transformers(family: str, tmp_path: Path) -> None:
    """Check projections of width 20 or 16, which differ from the default of 512 in transformers' configs.

    For MetaCLIP 2 and SigLIP, the pipeline pads captions to 64 tokens, as for the published models.
    """
    if family == "scratch":
        model = trained(vision=TINY_VIT, text=TINY_TEXT, embed_dim=16)
    else:
        SAVERS[family](tmp_path / "from", **({} if family == "clip" else {"length": 64}))
        model = trained(pretrained=str(tmp_path / "from"))
    folder = exported(model, "transformers", tmp_path / "out")
    image, text = features(model)
    if family in ("clip", "scratch"):
        with torch.no_grad():
            vision_tower = CLIPVisionModelWithProjection.from_pretrained(folder).eval()
            text_tower = CLIPTextModelWithProjection.from_pretrained(folder).eval()
            found = vision_tower(model.model.vision.normalize(images(32))).image_embeds
            torch.testing.assert_close(normalize(found, dim=1), image, rtol=0, atol=1e-5)
            found = text_tower(model.tokenizer(CAPTIONS[:2])).text_embeds
            torch.testing.assert_close(normalize(found, dim=1), text, rtol=0, atol=1e-5)
    labels, picture = ["a dog", "a cat"], images(32)[:1]
    classify = pipeline("zero-shot-image-classification", model=str(folder))
    scores = classify(to_pil_image(picture[0]), candidate_labels=labels, hypothesis_template="{}")
    with torch.no_grad():
        image, text = model.model(picture, model.tokenizer(labels))
    logits = image[0] @ text.T / 0.02
    wanted = torch.sigmoid(logits) if family == "siglip" else logits.softmax(0)
    found = torch.tensor([next(row["score"] for row in scores if row["label"] == label) for label in labels])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_a_timm_model_that_no_library_can_express() -> None:
    model = trained(vision={"name": "resnet50_clip", "image_size": 64}, text=TINY_TEXT, embed_dim=16)
    with pytest.raises(UserError, match=r"cannot express timm's image model 'resnet50_clip': .* neuclip_ds\.load"):
        model.source.to_library_model(model.tokenizer, model.model.state_dict(), LOGITS)


@pytest.mark.parametrize(
    ("family", "form", "own"), [("open_clip", "transformers", "open_clip"), ("siglip", "open_clip", "transformers")]
)
def test_models_that_stay_in_their_library(family: str, form: str, own: str, tmp_path: Path) -> None:
    SAVERS[family](tmp_path / "from")
    with pytest.raises(UserError, match=f"export it with --format={own}"):
        exported(trained(pretrained=str(tmp_path / "from")), form, tmp_path / "out")
