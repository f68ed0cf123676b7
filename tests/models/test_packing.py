"""Compare packed captions with padded captions in float64: features and gradients, for every kind of text tower."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from neuclip_ds.config import LoraConfig, ModelConfig, TextConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.build import apply_common_options, new_text_tower
from neuclip_ds.models.compilation import compile_towers
from neuclip_ds.models.packing import PackedCaptions, pack_captions, pack_clip_text
from neuclip_ds.models.pretrained.packed_open_clip import pack_open_clip_text
from neuclip_ds.models.towers import DualEncoder, TextTower
from neuclip_ds.models.trained_parts import add_adapters
from neuclip_ds.planning.memory import StandInTokenizer
from neuclip_ds.recipe import parse
from neuclip_ds.training.checks import fingerprint

CONTEXT, VOCABULARY, WIDTH, EOS = 20, 50, 16, 49
CPU = torch.device("cpu")
# options of a text config of transformers
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "attn_implementation": "sdpa",
}


def captions_of(lengths: Sequence[int], eos_id: int = EOS, padding: int = 0) -> Tensor:
    """Return (b, CONTEXT) random ids whose EOS is the last of `lengths` tokens; a length of 0 means no EOS."""
    generator = torch.Generator().manual_seed(len(lengths))
    tokens = torch.randint(3, EOS, (len(lengths), CONTEXT), generator=generator)
    for row, length in enumerate(lengths):
        if length:
            tokens[row, length - 1] = eos_id
            tokens[row, length:] = padding
    return tokens


def clip_tower(eos_id: int = EOS, pools: bool = False, **options: Any) -> TextTower:
    """Return a text tower of transformers' CLIP, pooled by the tower if `pools`, and by the trunk otherwise."""
    config = transformers.CLIPTextConfig(**SIZES, eos_token_id=eos_id, **options)
    trunk = transformers.CLIPTextModel(config)
    pooled_id = eos_id if pools else None
    return TextTower(trunk, nn.Linear(WIDTH, 8, bias=False), pooled_id, pack_clip_text(trunk, pooled_id))


def metaclip_tower() -> TextTower:
    config = transformers.MetaClip2TextConfig(**SIZES, eos_token_id=2)
    trunk = transformers.MetaClip2TextModel(config)
    return TextTower(trunk, nn.Linear(WIDTH, 8, bias=False), pack=pack_clip_text(trunk))


def open_clip_tower(**options: Any) -> TextTower:
    open_clip = pytest.importorskip("open_clip.transformer")
    sizes = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 2, "layers": 3}
    trunk = open_clip.TextTransformer(**{**sizes, "output_dim": 8, **options})
    return TextTower(trunk, None, pack=pack_open_clip_text(trunk))


TOWERS: dict[str, tuple[Callable[[], TextTower], int]] = {  # and the id of EOS
    "clip": (clip_tower, EOS),
    "pooled by the tower": (lambda: clip_tower(2, pools=True), 2),
    "largest id": (lambda: clip_tower(2), EOS),
    "metaclip": (metaclip_tower, 2),
    "open_clip": (open_clip_tower, EOS),
    "open_clip with EOS": (lambda: open_clip_tower(pool_type="eos", eos_id=2, proj_bias=True, ls_init_value=0.3), 2),
    "open_clip without projection": (lambda: open_clip_tower(proj_type="none"), EOS),
}


def built(build: Callable[[], TextTower]) -> TextTower:
    torch.manual_seed(0)
    tower = build().double()
    for parameter in tower.parameters():  # biases and gains differ from 0 and 1
        nn.init.normal_(parameter, std=0.3)
    return tower


def features_and_gradients(tower: TextTower, inputs: Tensor | PackedCaptions) -> dict[str, Tensor]:
    tower.train()
    tower.zero_grad()
    features = tower(inputs)
    results = {"features": features.detach()}
    if features.requires_grad:
        weights = torch.linspace(-1, 1, features.numel(), dtype=torch.float64).view_as(features)
        (features * weights).sum().backward()
        results |= {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}
    return results


def compare(tower: TextTower, tokens: Tensor) -> None:
    """Check that a tower packs, and that this changes neither features nor any gradient."""
    tower.packed = False
    expected = features_and_gradients(tower, tokens)
    tower.packed = "auto"
    assert tower.packs_on(CPU)
    results = features_and_gradients(tower, tokens)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            results[name], value, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: name + text
        )


def apply_options(tower: TextTower, config: ModelConfig) -> DualEncoder:
    """Apply the options of a model that consists of this text tower and an image tower of two blocks."""
    image_tower = nn.Module()
    image_tower.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
    return apply_common_options(DualEncoder(image_tower, tower), config)  # type: ignore[arg-type]


def saved_bytes(tower: TextTower, tokens: Tensor) -> int:
    """Return the bytes of the tensors that a forward pass saves for the backward pass."""
    sizes: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        tower(tokens)
    return sum(sizes)


BATCHES = {
    "every length": list(range(1, CONTEXT + 1)),
    "without EOS": [5, 0, 9, 0],
    "full": [CONTEXT] * 3,
    "empty": [2, 2],
    "one row": [7],
    "one token": [1],
}


@pytest.mark.parametrize("name", TOWERS)
def test_packing_changes_neither_features_nor_gradients(name: str) -> None:
    build, eos_id = TOWERS[name]
    tower = built(build)
    for lengths in BATCHES.values():
        compare(tower, captions_of(lengths, eos_id))
    repeated = captions_of([4, 12], eos_id, padding=eos_id)  # padded with EOS, as CLIP's tokenizer does
    compare(tower, repeated)


def test_only_tokens_up_to_the_pooled_one_are_packed() -> None:
    tokens = captions_of([3, 9, 0, 3])
    packed = pack_captions(tokens, EOS)
    assert packed.lengths == ((1, 1), (3, 2), (9, 1))
    assert packed.positions.tolist() == [0, 0, 1, 2, 0, 1, 2, *range(9)]
    assert packed.ids.tolist() == [*tokens[2, :1], *tokens[0, :3], *tokens[3, :3], *tokens[1, :9]]
    assert packed.sorted_rows.tolist() == [1, 3, 0, 2]
    assert packed.last.tolist() == [0, 3, 6, 15]
    rows: list[int] = []
    tower = clip_tower()
    for name, layer in tower.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda layer, inputs, _, name=name: rows.append(len(inputs[0])))
    tower(tokens)
    queries, keys_and_values, after_attention = [16], [16, 16], [16] * 3
    last = [4, 16, 16, 4, 4, 4]
    assert rows == [*queries, *keys_and_values, *after_attention] * 2 + last + [4]


@pytest.mark.parametrize("name", ["clip", "open_clip with EOS"])
def test_a_packed_batch_may_be_given_instead_of_padded_captions(name: str) -> None:
    build, eos_id = TOWERS[name]
    tower = built(build)
    tokens = captions_of([3, 14, 6, 14], eos_id)
    assert tower.pack is not None
    packed = tower.pack(tokens)
    torch.testing.assert_close(tower(packed), tower(tokens), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(tower.eval()(packed), tower(packed), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["clip", "open_clip"])
def test_captions_that_are_too_long_are_refused_as_padded_ones_are(name: str) -> None:
    """Without the check, a GPU would abort the process because of positions that do not exist."""
    build, eos_id = TOWERS[name]
    tower = built(build)
    tokens = captions_of([3], eos_id)
    longer = torch.cat([tokens, tokens], dim=1)
    with pytest.raises(ValueError, match=f"padded to {2 * CONTEXT} tokens.*only {CONTEXT} positions"):
        tower(longer)


@pytest.mark.parametrize("name", ["clip", "open_clip"])
@pytest.mark.parametrize("case", ["checkpointing", "two blocks checkpointed", "frozen blocks", "frozen", "lora"])
def test_packing_is_exact_with_model_options(name: str, case: str) -> None:
    build, eos_id = TOWERS[name]
    tower = built(build)
    options: dict[str, Any] = {
        "checkpointing": {"activation_checkpointing": True},
        "two blocks checkpointed": {"activation_checkpointing": 2},
        "frozen blocks": {"text": {"trainable": 1}},
        "frozen": {"text": {"trainable": "frozen"}},
    }.get(case, {})
    config = ModelConfig.model_validate(options)
    apply_options(tower, config)
    if case == "lora":
        tower.requires_grad_(False)
        add_adapters({"text": tower}, LoraConfig(rank=2))
        for parameter in tower.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
    tokens = captions_of([3, 14, 6, 20], eos_id)
    compare(tower, tokens)
    compare(copy.deepcopy(tower), tokens)


def test_checkpointed_blocks_keep_no_activations_of_packed_captions() -> None:
    saved: dict[bool, int] = {}
    for checkpointing in (False, True):
        text = TextConfig(vocab_size=300, context_length=CONTEXT, width=WIDTH, layers=3, heads=2)
        tower = new_text_tower(text, StandInTokenizer(text), 8)
        apply_options(tower, ModelConfig(text=text, activation_checkpointing=checkpointing))
        saved[checkpointing] = saved_bytes(tower, captions_of([3, 14, 6, 20], eos_id=1))
    assert saved[True] < saved[False] / 3


def test_packing_changes_neither_the_names_of_parameters_nor_the_saved_trunk(tmp_path: Path) -> None:
    plain = clip_tower(attention_dropout=0.1).trunk  # cannot be packed
    trunk = clip_tower().trunk
    assert trunk.state_dict().keys() == plain.state_dict().keys()
    trunk.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["CLIPTextModel"]
    reloaded = transformers.CLIPTextModel.from_pretrained(tmp_path).eval()
    tokens = captions_of([3, 14])
    torch.testing.assert_close(reloaded(tokens).pooler_output, trunk.eval()(tokens).pooler_output, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_rounds_as_padded_captions_do(dtype: torch.dtype) -> None:
    tower = built(clip_tower).to(dtype)
    tokens = captions_of([3, 14, 6, 20])
    packed = tower(tokens)
    tower.packed = False
    assert packed.dtype == dtype
    tolerance = 10 * torch.finfo(dtype).eps * tower(tokens).abs().max().item()
    torch.testing.assert_close(packed, tower(tokens), rtol=0, atol=tolerance)


def test_packing_works_under_autocast() -> None:
    tower = built(clip_tower).float()
    tokens = captions_of([3, 14, 6, 20])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        packed = tower(tokens)
        tower.packed = False
        padded = tower(tokens)
    assert packed.dtype == padded.dtype
    torch.testing.assert_close(packed, padded, rtol=0, atol=0.1 * padded.abs().max().item())


@pytest.mark.parametrize(
    "build",
    [
        lambda: clip_tower(attention_dropout=0.1),
        lambda: open_clip_tower(no_causal_mask=True),
        lambda: open_clip_tower(embed_cls=True),
        lambda: open_clip_tower(pool_type="last"),
        lambda: open_clip_tower(qk_norm=True),
    ],
    ids=["dropout", "bidirectional", "class token", "last position", "custom blocks"],
)
def test_towers_that_need_padding_keep_it(build: Callable[[], TextTower]) -> None:
    tower = build()
    apply_options(tower, ModelConfig())
    assert not tower.packs_on(CPU)
    with pytest.raises(UserError, match=r"model\.text\.packed=true"):
        apply_options(tower, ModelConfig(text=TextConfig(packed=True)))


@pytest.mark.parametrize(
    ("packed", "compilation", "on_cpu", "on_gpu"),
    [
        ("auto", "false", True, False),
        (False, "false", False, False),
        (True, "false", True, True),
        ("auto", "blocks", False, False),
        (True, "blocks", True, True),
    ],
)
def test_auto_packs_on_cpus_unless_towers_are_compiled(
    packed: Any, compilation: Any, on_cpu: bool, on_gpu: bool
) -> None:
    tower = clip_tower()
    model = apply_options(tower, ModelConfig(text=TextConfig(packed=packed)))
    compile_towers(model, compilation)
    assert (tower.packs_on(CPU), tower.packs_on(torch.device("cuda"))) == (on_cpu, on_gpu)


def test_a_run_resumes_with_captions_packed_or_padded() -> None:
    """The choice changes only rounding, so it is not part of the model that a checkpoint must match."""
    packed, padded = (parse(["demo", f"--model.text.packed={value}"]).config for value in ("true", "false"))
    assert fingerprint(packed) == fingerprint(padded)
