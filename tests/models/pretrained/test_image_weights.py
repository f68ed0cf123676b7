"""Image towers that start from weights of timm: files and tags, at their own and another resolution."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from miniatures import images
from safetensors.torch import save_file
from torch import Tensor

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.source import FromConfig, locate_model, model_source, open_saved
from neuclip_ds.models.tokenizer import CaptionTokenizer

TEXT = {"vocab_size": 300, "context_length": 16, "width": 24, "layers": 1, "heads": 2}
NAME = "test_vit"  # timm's smallest, 160 pixels in patches of 16


def bpe() -> CaptionTokenizer:
    return train_bpe(["a dog runs"], vocab_size=300, context_length=16)


def saved_timm(path: Path, name: str = NAME, **options: Any) -> Any:
    """Save a timm model with a classifier, as it is published."""
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
    model = source.load(source.tokenizer(bpe)).model.eval()
    with torch.no_grad():
        return model.vision.trunk(model.vision.normalize(images(size)))


def by_timm(model: Any, source: FromConfig, size: int) -> Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in source.preprocessing[1:3])
    with torch.no_grad():
        return model.forward_head(model.forward_features((images(size) / 255 - mean) / std), pre_logits=True)


@pytest.mark.parametrize("size", [160, 192])
def test_a_file_gives_timms_features(size: int, tmp_path: Path) -> None:
    """At another size the positions are resampled as timm does; pixel statistics are those of timm's model."""
    model = saved_timm(tmp_path / "weights.safetensors")
    config = config_of(tmp_path / "weights.safetensors", size)
    source = source_of(config)
    model.set_input_size((size, size))
    torch.testing.assert_close(trunk_feature(source, size), by_timm(model, source, size), rtol=0, atol=1e-5)
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
    torch.testing.assert_close(trunk_feature(source, 160), by_timm(model, source, 160), rtol=0, atol=1e-5)


def test_a_run_reopens_without_the_weights(tmp_path: Path) -> None:
    saved_timm(tmp_path / "weights.safetensors")
    config = config_of(tmp_path / "weights.safetensors")
    source = source_of(config)
    model, logits = source.load(source.tokenizer(bpe))
    source.save(tmp_path / "run", logits)
    (tmp_path / "weights.safetensors").unlink()
    again, _ = open_saved(config, tmp_path / "run")
    assert again.preprocessing == source.preprocessing
    again.build(bpe()).load_state_dict(model.state_dict())


def refusal(config: ModelConfig) -> str:
    with pytest.raises(UserError) as caught:
        source = source_of(config)
        source.load(source.tokenizer(bpe))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_refused(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    saved_timm(weights, "test_vit4")
    assert "do not fit timm's 'test_vit'" in refusal(config_of(weights))
    model = saved_timm(weights)
    tensors = model.state_dict()
    save_file({f"backbone.{name}": tensor for name, tensor in tensors.items()}, weights)
    assert "lack" in refusal(config_of(weights)) or "do not fit" in refusal(config_of(weights))
    save_file({name: tensor for name, tensor in tensors.items() if "blocks.5" not in name}, weights)
    assert "lack 4 tensors of timm's 'test_vit' (first blocks.5.attn.qkv.weight)" in refusal(config_of(weights))
    assert "neither a file nor a tag of timm's test_vit: r160_in1k" in refusal(config_of("openai"))
    assert "set model.vision.name=test_vit and model.vision.pretrained=r160_in1k" in refusal(
        config_of("", name="test_vit.r160_in1k")
    )


def test_image_weights_are_refused_next_to_a_checkpoint() -> None:
    with pytest.raises(ValueError, match=r"omit it or model\.vision\.pretrained"):
        ModelConfig.model_validate({"pretrained": "a/b", "vision": {"pretrained": "openai"}})
