"""Compiled towers give the features of uncompiled ones, share graphs between blocks, and survive a broken compiler."""

import logging
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.compilation import compile_towers, resolve_compilation
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.section import merge

pytestmark = pytest.mark.usefixtures("quick_meta_models")

TREE: dict[str, Any] = {
    "vision": {
        "name": "vit_tiny_patch16_224",
        "image_size": 16,
        "options": {"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2},
    },
    "text": {"width": 32, "layers": 2, "heads": 2, "context_length": 16, "vocab_size": 300},
    "embed_dim": 8,
}
TOKENS: Any = SimpleNamespace(vocab_size=300, bos_id=0, eos_id=1, pad_id=1, context_length=16)
ALL_OPTIONS = {"vision": {"patch_drop": 0.5}, "lora": {"rank": 2}, "activation_checkpointing": True}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()
    counters.clear()


def built(options: Mapping[str, Any] = {}) -> DualEncoder:
    torch.manual_seed(0)
    return build_dual_encoder(ModelConfig.model_validate(merge(TREE, options)), TOKENS).train()


def features_and_gradients(model: DualEncoder, length: int) -> list[Tensor]:
    """Return features and gradients of a batch with captions of `length` tokens, which is also the seed of dropout."""
    torch.manual_seed(length)
    image = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    tokens = torch.randint(2, 300, (3, length))
    tokens[:, -1] = TOKENS.eos_id
    model.zero_grad()
    features = model(image, tokens)
    torch.autograd.backward(features, [torch.linspace(-1, 1, x.numel()).view_as(x) for x in features])
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [features[0].detach(), features[1].detach(), *gradients]


def assert_equal_features(compiled: DualEncoder, plain: DualEncoder, length: int) -> None:
    wanted = features_and_gradients(plain, length)
    for actual, expected in zip(features_and_gradients(compiled, length), wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_blocks_share_three_graphs_over_captions_of_every_length(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph is for image blocks, one for the last image block (class token only), and one for text blocks."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = built()
    names = list(model.state_dict())
    compile_towers(model, "blocks")
    for length in (16, 12, 7, 5, 9):
        assert_equal_features(model, built(), length)
    assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]
    assert list(model.state_dict()) == names


def test_blocks_are_compiled_with_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    options = merge(ALL_OPTIONS, {"vision": {"options": {"depth": 2}}, "text": {"layers": 1}})
    model = built(options)
    compile_towers(model, "blocks")
    for _ in range(2):
        assert_equal_features(model, built(options), 16)
    assert not counters["graph_break"]


def test_every_block_is_compiled_although_the_rates_of_stochastic_depth_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    depth = 3
    options = {"vision": {"options": {"depth": depth, "drop_path_rate": 0.2}}}
    model = built(options)
    image = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    with torch._dynamo.config.patch(cache_size_limit=2):  # less than the graphs of these blocks
        compile_towers(model, "blocks")
        with torch.no_grad():
            model(image, None)
        model(image, None)
    assert counters["stats"]["unique_graphs"] == 2 * depth


@pytest.mark.parametrize("compilation", ["blocks", "towers"])
def test_without_a_working_compiler_the_towers_run_uncompiled(
    compilation: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand its whole log")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    model = built()
    compile_towers(model, compilation)
    with caplog.at_level(logging.WARNING, logger="neuclip_ds"):
        for length in (16, 12):
            assert_equal_features(model, built(), length)
    (record,) = [record for record in caplog.records if record.name.startswith("neuclip_ds")]
    assert "no C++ compiler" in record.getMessage()


def test_a_mistake_in_the_input_is_reported_as_without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = built()
    compile_towers(model, "towers")
    with pytest.raises(TypeError, match="uint8"):
        model(torch.zeros(1, 3, 16, 16), None)


def test_a_tower_without_blocks_is_compiled_as_a_whole_only() -> None:
    model = built()
    model.text.trunk = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"text tower has no list of blocks .*model.compile to towers"):
        compile_towers(model, "blocks")


def test_auto_means_blocks_on_gpus_with_a_compiler_and_without_zero_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "python")  # any program
    assert resolve_compilation("auto", "cuda", 1) == "blocks"
    assert resolve_compilation("auto", "cuda", 3) == "false"
    assert resolve_compilation("auto", "cpu", 1) == "false"
    assert resolve_compilation("towers", "cpu", 0) == "towers"
    assert resolve_compilation(False, "cuda", 1) == "false"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert resolve_compilation("auto", "cuda", 1) == "false"


def test_bools_have_the_meaning_that_they_had_in_version_0_1() -> None:
    for true in (True, "true"):
        assert ModelConfig.model_validate({"compile": true}).compile == "towers"
    for false in (False, "false"):
        assert ModelConfig.model_validate({"compile": false}).compile is False
