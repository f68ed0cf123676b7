"""Check text towers around transformers encoders, in models that are built from the config."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from miniatures import CAPTIONS, TINY_VIT, images
from open_clip.hf_model import HFTextEncoder
from test_encoders import FAMILIES, LENGTH, pooled, save_sentence_transformer, save_text_encoder
from torch import Tensor
from transformers import BertConfig

from neuclip_ds.config import ModelConfig
from neuclip_ds.embedding.encoders import TrunkRecords, dual_encoders
from neuclip_ds.errors import UserError
from neuclip_ds.models.compilation import compile_towers
from neuclip_ds.models.pretrained.text_encoder import PADDING, POOLINGS, Pooling
from neuclip_ds.models.source import INITIAL_LOGITS, ModelSource, locate_model, merged, model_source, open_saved
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import learning_rate_scales
from neuclip_ds.planning.activations import count_activations
from neuclip_ds.recipe import parse

pytestmark = pytest.mark.usefixtures("quick_meta_models")

WIDTH = 24  # of all families


def model_config(folder: Path, pooling: Pooling | None = "mean", **options: Any) -> ModelConfig:
    text = {"pretrained": str(folder), "pooling": pooling, "context_length": LENGTH, **options.pop("text", {})}
    return ModelConfig.model_validate({"vision": TINY_VIT, "embed_dim": 16, "text": text, **options})


def opened(config: ModelConfig) -> tuple[ModelSource, ModelTokenizer, DualEncoder]:
    torch.manual_seed(0)
    source = model_source(config, locate_model(config))
    tokenizer = source.own_tokenizer()
    return source, tokenizer, source.load(tokenizer).model.eval()


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save a model of each family, and return its folder and the model."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_text_encoder(request.param, folder)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_features_of_padded_captions_equal_those_of_transformers_without_padding(
    saved: tuple[Path, Any], pooling: Pooling
) -> None:
    folder, encoder = saved
    _, tokenizer, model = opened(model_config(folder, pooling))
    tokens = tokenizer(CAPTIONS)
    assert tokens.shape == (len(CAPTIONS), LENGTH)
    for packed in ("auto", False):  # with `auto`, the padding that all captions share is cut
        model.text.packed = packed
        with torch.no_grad():
            features = model.text.feature(tokens)
            for row, feature in zip(tokens, features, strict=True):
                ids = row[row != PADDING].unsqueeze(0)
                expected = pooled(encoder(input_ids=ids).last_hidden_state[0], pooling)
                torch.testing.assert_close(feature, expected, rtol=0, atol=2e-6)
            projected = model.text(tokens)
        torch.testing.assert_close(projected, features @ model.text.projection.weight.T)


def test_a_run_reopens_without_the_encoders_folder(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = saved
    copy = tmp_path / "encoder"
    folder.rename(copy)
    config = model_config(copy, "eos")
    source, tokenizer, model = opened(config)
    source.save(tmp_path / "run", INITIAL_LOGITS)
    copy.rename(folder)
    again, logits = open_saved(config.model_copy(deep=True), tmp_path / "run")
    assert logits == INITIAL_LOGITS
    tokens = again.own_tokenizer()(CAPTIONS)
    assert torch.equal(tokens, tokenizer(CAPTIONS))
    rebuilt = again.build(again.own_tokenizer()).eval()
    names = dict(model.named_parameters())
    rebuilt.load_state_dict({name: value for name, value in model.state_dict().items() if name in names}, strict=True)
    with torch.no_grad():
        assert torch.equal(rebuilt(None, tokens)[1], model(None, tokens)[1])


def test_blocks_freeze_adapt_and_decay(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    options = {"text": {"trainable": 1}, "lora": {"rank": 2}, "activation_checkpointing": True}
    source, tokenizer, model = opened(model_config(folder, **options))
    model.train()
    features = model(images(32), tokenizer(CAPTIONS))
    torch.stack([feature.sum() for feature in features]).sum().backward()
    text = dict(model.text.named_parameters())
    trained = {name for name, parameter in text.items() if parameter.grad is not None}
    assert trained == {name for name, parameter in text.items() if parameter.requires_grad}
    adapted = {name for name in trained if "lora" in name}
    frozen_blocks = {name.split(".lora_")[0] for name in adapted}
    assert adapted
    assert "projection.weight" in trained
    assert not any(text[f"{name}.base_layer.weight"].requires_grad for name in frozen_blocks)

    config = parse(["demo", "--optimizer.layer_decay=0.5"]).config.optimizer
    scales = learning_rate_scales(model, config)
    assert scales["text.projection.weight"] == 1
    assert {scales[f"text.{name}"] for name in adapted} == {0.25}

    _, weights = merged(source, tokenizer, model.state_dict())
    assert not any("lora" in name for name in weights)


def test_activations_are_counted(saved: tuple[Path, Any]) -> None:
    """Twice the captions need nearly twice the memory in the text tower."""
    folder, _ = saved
    config = model_config(folder)
    source = model_source(config, locate_model(config))
    tokenizer = source.own_tokenizer()
    counts = []
    for rows in (64, 128):
        with torch.device("meta"):
            model = source.build(tokenizer)
        counts.append(count_activations(model, rows, 32, tokenizer.context_length, torch.bfloat16).alone)
    assert 1.8 < counts[1] / counts[0] <= 2.1


def test_rotary_frequencies_are_not_rounded_to_bf16(tmp_path: Path) -> None:
    save_text_encoder("modernbert", tmp_path)
    _, tokenizer, model = opened(model_config(tmp_path))
    before = {name: value.clone() for name, value in model.text.named_buffers() if "inv_freq" in name}
    tower = model.bfloat16().text
    assert before
    assert all(torch.equal(tower.get_buffer(name), value) for name, value in before.items())
    assert tower(tokenizer(CAPTIONS)).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_blocks_compute_the_same(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    save_text_encoder("bert", tmp_path)
    _, tokenizer, model = opened(model_config(tmp_path))
    inputs = images(32), tokenizer(CAPTIONS)
    with torch.no_grad():
        expected = model(*inputs)
        compile_towers(model, "blocks")
        torch.testing.assert_close(model(*inputs), expected, rtol=0, atol=1e-5)


def projected_by_open_clip(tower: Any, feature: Tensor) -> Tensor:
    config = BertConfig(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, vocab_size=10)
    encoder = HFTextEncoder("", 16, config, pooler_type="mean_pooler", proj_type="mlp")
    encoder.proj.load_state_dict(tower.projection.state_dict())
    return encoder.proj(feature)


def test_mlp_heads_are_those_of_open_clip(tmp_path: Path) -> None:
    save_text_encoder("bert", tmp_path)
    vision = {**TINY_VIT, "projection": "mlp"}
    _, tokenizer, model = opened(model_config(tmp_path, vision=vision, text={"projection": "mlp"}))
    tokens = tokenizer(CAPTIONS)
    with torch.no_grad():
        feature = model.text.feature(tokens)
        torch.testing.assert_close(model.text(tokens), projected_by_open_clip(model.text, feature))
    shapes = [tuple(parameter.shape) for parameter in model.vision.projection.parameters()]
    assert shapes == [(24, 32), (16, 24)]


def test_pooling_comes_from_sentence_transformers(tmp_path: Path) -> None:
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    folder = save_sentence_transformer(tmp_path / "encoder", **modes)
    _, _, model = opened(model_config(folder, None))
    assert model.text.pooling == "cls"
    (folder / "modules.json").unlink()
    with pytest.raises(UserError, match=r"set model\.text\.pooling to one of cls, mean, eos, last"):
        opened(model_config(folder, None))


def test_a_frozen_encoder_keeps_its_features_or_is_refused(tmp_path: Path) -> None:
    save_text_encoder("bert", tmp_path)
    _, tokenizer, model = opened(model_config(tmp_path, embed_dim=WIDTH, text={"trainable": "frozen"}))
    tokens = tokenizer(CAPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(model.text(tokens), model.text.feature(tokens))
    for options in ({}, {"embed_dim": WIDTH, "text": {"projection": "mlp"}}):
        text = {**options.pop("text", {}), "trainable": "frozen"}
        with pytest.raises(UserError, match=r"would freeze the random projection of the text tower"):
            opened(model_config(tmp_path, text=text, **options))


def test_stored_features_record_the_pooling_of_a_runs_text_encoder(tmp_path: Path) -> None:
    save_text_encoder("bert", tmp_path)
    source, tokenizer, model = opened(model_config(tmp_path, "cls"))
    encoders = dual_encoders("run", model, tokenizer, source.preprocessing, "trunk", TrunkRecords())
    assert encoders.pooling == "cls"


def test_captions_that_cannot_be_packed_or_are_too_long_are_refused(tmp_path: Path) -> None:
    save_text_encoder("bert", tmp_path)
    with pytest.raises(UserError, match=r"packed=true .*BertModel needs padded captions"):
        opened(model_config(tmp_path, text={"packed": True}))
    with pytest.raises(UserError, match=r"context_length=17 is more than the 16 tokens"):
        opened(model_config(tmp_path, text={"context_length": 17}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.text.pretrained=x", "--model.text.width=64"], r"width has no effect with model\.text\.pretrained"),
        (
            ["--model.text.pretrained=x", "--model.text.tokenizer=y"],
            r"tokenizer has no effect with model\.text\.pretrained",
        ),
        (["--model.text.pooling=mean"], r"pooling has no effect without model\.text\.pretrained"),
        (["--model.text.pretrained=x", "--model.pretrained=y"], r"omit model\.pretrained or model\.text\.pretrained"),
        (["--model.text.pretrained=x", "--model.text.width=512"], r"width has no effect with model\.text\.pretrained"),
        (["--model.vision.projection=mlp", "--model.pretrained=y"], r"determines model\.vision\.projection"),
        (["--model.text.projection=linear", "--model.pretrained=y"], r"determines model\.text\.projection"),
    ],
)
def test_options_without_effect_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(["demo", *options])


def test_a_recipes_text_transformer_gives_way_to_an_encoder() -> None:
    text = parse(["demo", "--model.text.pretrained=x"]).config.model.text
    assert (text.width, text.vocab_size) == (512, 49408), "the defaults, which are not used"
    assert text.context_length == 40, "the recipe's"
