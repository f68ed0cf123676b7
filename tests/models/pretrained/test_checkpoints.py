"""Load miniatures of every family that their libraries have saved, and check published sizes on the meta device."""

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import open_clip
import pytest
import timm
import torch
from host_reads import HostReads
from miniatures import (
    CAPTIONS,
    OPEN_CLIP_CONFIG,
    SAVERS,
    clip_tokenizer,
    images,
    save_clip,
    save_open_clip,
    siglip_tokenizer,
    small,
    xlm_roberta_tokenizer,
)
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import XLMRobertaConfig, XLMRobertaModel

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.pretrained.base import LogitParameters, Preprocessing, read_start_preprocessing
from neuclip_ds.models.pretrained.locate import locate, open_checkpoint
from neuclip_ds.models.recompute import checkpoint_activations
from neuclip_ds.models.source import FromConfig, locate_model, model_source, open_saved, resumed_source
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.models.trained_parts import TOWERS, Parameters

Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Saved:
    folder: Path
    encode: Encode  # the library's function: (normalized pixels, ids) -> features on the unit sphere
    mean: list[float]
    std: list[float]
    ids: Callable[[list[str]], Tensor]  # the library's tokenizer


HALF = [0.5] * 3
STATISTICS = {"open_clip": ([0.4, 0.5, 0.6], [0.2, 0.25, 0.3]), "siglip": (HALF, HALF)}
CLIP_STATISTICS = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
TOKENIZERS = {
    "clip": clip_tokenizer,
    "metaclip_2": xlm_roberta_tokenizer,
    "siglip": siglip_tokenizer,
}


def save(family: str, folder: Path) -> Saved:
    ids = open_clip.SimpleTokenizer(context_length=16) if family == "open_clip" else padded(TOKENIZERS[family]())
    encode = partial(library_encode, family, SAVERS[family](folder))
    mean, std = STATISTICS.get(family, CLIP_STATISTICS)
    return Saved(folder=folder, encode=encode, mean=mean, std=std, ids=ids)


def library_encode(family: str, model: Any, pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    if family == "open_clip":
        return model.encode_image(pixels, normalize=True), model.encode_text(ids, normalize=True)
    image = model.get_image_features(pixel_values=pixels).pooler_output
    return normalize(image, dim=1), normalize(model.get_text_features(input_ids=ids).pooler_output, dim=1)


def padded(tokenizer: Any) -> Callable[[list[str]], Tensor]:
    options = {"padding": "max_length", "truncation": True, "max_length": 16, "return_tensors": "pt"}
    return lambda captions: tokenizer(captions, **options).input_ids


@pytest.fixture(scope="module", params=SAVERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp(request.param) / "model")


def opened(folder: Path) -> Any:
    return open_checkpoint(pickle.loads(pickle.dumps(locate(str(folder)))))  # references can be pickled


def test_features_are_the_librarys_own(saved: Saved) -> None:
    """Features equal the library's in float32, and are close to them in bf16."""
    model = opened(saved.folder).load().model.eval()
    shape = (1, 3, 1, 1)
    pixels = (images(32) / 255 - torch.tensor(saved.mean).reshape(shape)) / torch.tensor(saved.std).reshape(shape)
    ids = saved.ids(CAPTIONS)
    with torch.no_grad():
        with HostReads() as reads:
            features = model(images(32), ids)
        assert reads.count == 0
        rounded = model.bfloat16()(images(32), ids)
        for mine, near, wanted in zip(features, rounded, saved.encode(pixels, ids), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)
            assert near.dtype == torch.float32
            assert ((near * wanted).sum(dim=1) > 0.999).all()


def test_a_text_encoder_of_transformers_in_open_clip(tmp_path: Path) -> None:
    """The encoder's masks are built without reading from the device."""
    tokenizer = xlm_roberta_tokenizer()
    config = small(32, vocab_size=len(tokenizer), max_position_embeddings=66, bos_token_id=0, pad_token_id=1)
    XLMRobertaModel(XLMRobertaConfig(**config, eos_token_id=2, type_vocab_size=1)).save_pretrained(tmp_path / "text")
    tokenizer.save_pretrained(tmp_path / "text")
    text = {"hf_model_name": str(tmp_path / "text"), "hf_pooler_type": "mean_pooler", "hf_proj_type": "linear"}
    library = save_open_clip(tmp_path / "model", {**OPEN_CLIP_CONFIG, "custom_text": True, "text_cfg": text})
    model, ids = opened(tmp_path / "model").load().model.eval(), padded(tokenizer)(CAPTIONS)
    with torch.no_grad():
        with HostReads() as reads:
            features = model(images(32), ids)
        assert reads.count == 0
        assert torch.equal(features[1], library.encode_text(ids, normalize=True))


def test_tokenizer_preprocessing_and_logits_come_from_the_checkpoint(saved: Saved) -> None:
    checkpoint = opened(saved.folder)
    siglip = saved.folder.parent.name.startswith("siglip")
    tokenizer = pickle.loads(pickle.dumps(checkpoint.own_tokenizer()))  # as when sent to a loader process
    assert torch.equal(tokenizer(CAPTIONS), saved.ids(CAPTIONS))
    assert tokenizer([]).shape == (0, 16)
    assert checkpoint.embed_dim == (32 if siglip else 20)
    squash = siglip or saved.folder.parent.name.startswith("open_clip")
    assert checkpoint.preprocessing == Preprocessing(
        size=32, mean=tuple(saved.mean), std=tuple(saved.std), squash=squash
    )
    expected = LogitParameters(math.exp(-4.75), -12.5) if siglip else LogitParameters(math.exp(-4), None)
    before = torch.get_rng_state()
    logits = checkpoint.load().logits
    if not saved.folder.parent.name.startswith("open_clip"):  # open_clip builds a random model first
        assert torch.equal(torch.get_rng_state(), before), "what is random in a run would change"
    assert logits.temperature == pytest.approx(expected.temperature, rel=1e-6)
    assert logits.bias == expected.bias


def test_a_saved_source_can_build_the_model_without_the_weights(saved: Saved, tmp_path: Path) -> None:
    opened(saved.folder).save(tmp_path / "kept", LogitParameters(None, None))
    kept = opened(tmp_path / "kept")
    assert (kept.preprocessing, kept.embed_dim) == (opened(saved.folder).preprocessing, opened(saved.folder).embed_dim)
    words = CAPTIONS[:2]
    mask = saved.ids(words) != saved.ids([""])[0, -1]  # open_clip's files may pad with a different token
    assert torch.equal(kept.own_tokenizer()(words)[mask], saved.ids(words)[mask])
    assert shapes(kept.build()) == shapes(opened(saved.folder).load().model)


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def test_each_parameter_is_trained_under_checkpointing(saved: Saved) -> None:
    model = opened(saved.folder).load().model.train()
    assert all(parameter.ndim > 0 for parameter in model.parameters())
    for name in TOWERS:
        checkpoint_activations(model.get_submodule(name), name, True)
    image, text = model(images(32), saved.ids(CAPTIONS))
    (image * text).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_an_open_clip_file_takes_its_architecture_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    open_clip.factory._MODEL_CONFIGS["miniature"] = json.loads(json.dumps(OPEN_CLIP_CONFIG))
    try:
        model = open_clip.create_model("miniature").eval()
        torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "epoch_1.pt")
        checkpoint = open_checkpoint(locate(f"open_clip:miniature/{tmp_path}/epoch_1.pt"))
        ids = checkpoint.own_tokenizer()(CAPTIONS)
        with torch.no_grad():
            _, text = checkpoint.load().model.eval()(None, ids)
            torch.testing.assert_close(text, model.encode_text(ids, normalize=True), rtol=0, atol=1e-6)
        torch.save({f"clip.{name}": value for name, value in model.state_dict().items()}, tmp_path / "epoch_1.pt")
        with pytest.raises(UserError, match=r"The weights of \S+/epoch_1.pt do not match"):
            checkpoint.load()
    finally:
        del open_clip.factory._MODEL_CONFIGS["miniature"]


@pytest.mark.parametrize("family", ["clip", "open_clip"])
def test_a_hub_name_is_served_from_the_cache(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name is found in a cache folder that has the layout of the hub's cache after a download."""
    repository = tmp_path / "models--someone--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    SAVERS[family](repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    checkpoint = locate("someone/something")
    assert Path(checkpoint.path) == repository / "snapshots" / ("0" * 40)
    assert open_checkpoint(checkpoint).load().logits.temperature is not None


@pytest.mark.parametrize(
    ("name", "vision", "total"),
    [
        ("ViT-B-16-quickgelu/openai", 86_192_640, 149_620_736),
        ("ViT-B-32/laion2b_s34b_b79k", 87_849_216, 151_277_312),
        ("ViT-B-16-SigLIP/webli", 92_884_224, 203_155_968),
        ("ViT-H-14-quickgelu/dfn5b", 632_076_800, 986_109_440),  # 986,109,441 with the logit scale
        ("ViT-B-16-SigLIP2/webli", 92_884_224, 375_187_968),
        ("PE-Core-B-16/meta", 93_673_984, 447_660_544),
        ("ViT-H-14-worldwide-quickgelu/metaclip2_worldwide", 632_076_800, 1_858_783_744),
    ],
)
def test_published_sizes_of_open_clip_models(name: str, vision: int, total: int) -> None:
    checkpoint = open_checkpoint(locate(f"open_clip:{name}", weights=False))
    with torch.device("meta"):
        model = checkpoint.build()
    assert Parameters.of(model.vision).total == vision
    assert Parameters.of(model).total == total
    widths = {87_849_216: 512, 86_192_640: 512, 92_884_224: 768, 632_076_800: 1024, 93_673_984: 1024}
    assert checkpoint.embed_dim == widths[vision]
    assert checkpoint.preprocessing.squash == any(part in name for part in ("SigLIP", "dfn5b", "PE-Core"))


TEXT = {"vocab_size": 300, "context_length": 16, "width": 24, "layers": 1, "heads": 2}
NAME = "test_vit"  # timm's smallest ViT, for 160-pixel images with patches of 16 pixels


def bpe() -> CaptionTokenizer:
    return train_bpe(["a dog runs"], vocab_size=300, context_length=16)


def saved_timm(path: Path, name: str = NAME, **options: Any) -> Any:
    """Save a timm model with a classifier, as timm's models are published, and return the model."""
    torch.manual_seed(1)
    model = timm.create_model(name, num_classes=10, **options).eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path)
    return model


def config_of(pretrained: Path | str, size: int = 160, name: str = NAME) -> ModelConfig:
    vision = {"name": name, "image_size": size, "pretrained": str(pretrained)}
    return ModelConfig.model_validate({"vision": vision, "text": TEXT, "embed_dim": 16})


def source_of(config: ModelConfig) -> FromConfig:
    source = model_source(config, locate_model(config))
    assert isinstance(source, FromConfig)
    return source


def trunk_feature(source: FromConfig, size: int) -> Tensor:
    model = source.load(source.own_tokenizer() or bpe()).model.eval()
    with torch.no_grad():
        return model.vision.trunk(model.vision.normalize(images(size)))


def timm_feature(model: Any, source: FromConfig, size: int) -> Tensor:
    mean = torch.tensor(source.preprocessing.mean)[:, None, None]
    std = torch.tensor(source.preprocessing.std)[:, None, None]
    with torch.no_grad():
        return model.forward_head(model.forward_features((images(size) / 255 - mean) / std), pre_logits=True)


@pytest.mark.parametrize("size", [160, 192])
def test_a_file_gives_timms_features(size: int, tmp_path: Path) -> None:
    """At a different size, positions are resampled as in timm; pixel statistics are those of timm's model."""
    model = saved_timm(tmp_path / "weights.safetensors")
    config = config_of(tmp_path / "weights.safetensors", size)
    source = source_of(config)
    model.set_input_size((size, size))
    torch.testing.assert_close(trunk_feature(source, size), timm_feature(model, source, size), rtol=0, atol=1e-5)
    assert source.preprocessing.mean == timm.get_pretrained_cfg(NAME).mean
    vision = config.vision.model_copy(update={"mean": (0.5, 0.5, 0.5)})
    named = source_of(config.model_copy(update={"vision": vision}))
    assert named.preprocessing.mean == (0.5, 0.5, 0.5), "those that are named come first"


def test_a_tag_comes_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--timm--test_vit.r160_in1k"
    snapshot = repository / "snapshots" / ("0" * 40)
    model = saved_timm(snapshot / "model.safetensors")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    source = source_of(config_of("r160_in1k"))
    assert source.preprocessing.mean == timm.get_pretrained_cfg(f"{NAME}.r160_in1k").mean
    torch.testing.assert_close(trunk_feature(source, 160), timm_feature(model, source, 160), rtol=0, atol=1e-5)


def test_a_run_reopens_without_the_weights(tmp_path: Path) -> None:
    saved_timm(tmp_path / "weights.safetensors")
    config = config_of(tmp_path / "weights.safetensors")
    source = source_of(config)
    model, logits = source.load(source.own_tokenizer() or bpe())
    source.save(tmp_path / "run", logits)
    (tmp_path / "weights.safetensors").unlink()
    again, _ = open_saved(config, tmp_path / "run")
    assert again.preprocessing == source.preprocessing
    again.build(bpe()).load_state_dict(model.state_dict())


def test_a_resumed_run_keeps_the_preprocessing_of_its_checkpoint(tmp_path: Path) -> None:
    saved_timm(tmp_path / "weights.safetensors")
    config = config_of(tmp_path / "weights.safetensors")
    source = source_of(config)
    _, logits = source.load(source.own_tokenizer() or bpe())
    source.save(tmp_path / "run", logits)
    preprocessing = read_start_preprocessing(tmp_path / "run")
    assert resumed_source(source, preprocessing, tmp_path) is source

    without_weights = source_of(config_of(""))
    assert without_weights.preprocessing.mean != source.preprocessing.mean
    resumed = resumed_source(without_weights, preprocessing, tmp_path)
    assert resumed.preprocessing == source.preprocessing
    normalized = [one.build(bpe()).vision.normalize(images(160)) for one in (source, resumed)]
    assert torch.equal(*normalized)
    resumed.load(resumed.own_tokenizer() or bpe())  # without weights, with random ones

    save_clip(tmp_path / "clip")
    clip_config = ModelConfig(pretrained=str(tmp_path / "clip"))
    clip = model_source(clip_config, locate_model(clip_config))
    of_clip = {**asdict(clip.preprocessing), "mean": list(clip.preprocessing.mean)}
    del of_clip["std"], of_clip["interpolation"]  # as if an earlier version had not recorded them
    assert resumed_source(clip, of_clip, tmp_path) is clip
    with pytest.raises(UserError, match=r"mean=\[0\.1, 0\.2, 0\.3\], but .* set model\.pretrained to the model from"):
        resumed_source(clip, {**of_clip, "mean": [0.1, 0.2, 0.3]}, tmp_path)
    with pytest.raises(UserError, match=r"size=64, but .* set model\.vision\.image_size=64, or give the run"):
        resumed_source(clip, {**of_clip, "size": 64}, tmp_path)


def refusal(config: ModelConfig) -> str:
    with pytest.raises(UserError) as caught:
        source = source_of(config)
        source.load(source.own_tokenizer() or bpe())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_image_weights_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    saved_timm(weights, "test_vit4")
    assert "do not fit timm's 'test_vit'" in refusal(config_of(weights))
    model = saved_timm(weights)
    tensors = model.state_dict()
    save_file({f"backbone.{name}": tensor for name, tensor in tensors.items()}, weights)
    message = refusal(config_of(weights))
    assert "lack" in message or "do not fit" in message
    save_file({name: tensor for name, tensor in tensors.items() if "blocks.5" not in name}, weights)
    assert "lack 4 tensors of timm's 'test_vit' (first: blocks.5.attn.qkv.weight)" in refusal(config_of(weights))
    assert "tag of timm's test_vit: use one of r160_in1k" in refusal(config_of("openai"))
    assert "set model.vision.name=test_vit and model.vision.pretrained=r160_in1k" in refusal(
        config_of("", name="test_vit.r160_in1k")
    )


def test_image_weights_are_refused_next_to_a_checkpoint() -> None:
    with pytest.raises(ValueError, match=r"omit model\.pretrained or model\.vision\.pretrained"):
        ModelConfig.model_validate({"pretrained": "a/b", "vision": {"pretrained": "openai"}})
