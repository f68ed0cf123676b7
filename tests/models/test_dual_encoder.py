import pytest
import torch
from torch import Tensor

from neuclip_ds.config import ModelConfig, TextConfig, VisionConfig
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.towers import DualEncoder

TOKENIZE = train_bpe(["a dog runs", "two cats sleep", "a dog and a cat"], vocab_size=300, context_length=12)
TEXT = TextConfig(vocab_size=300, context_length=12, width=32, layers=2, heads=2)
VIT = VisionConfig(
    name="vit_tiny_patch16_224",
    image_size=48,
    options={"patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4},
)
TINY = ModelConfig(vision=VIT, text=TEXT, embed_dim=16)
CAPTIONS = ["a dog", "two cats sleep", ""]


def images(rows: int = 3) -> Tensor:
    return torch.randint(0, 256, (rows, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def built(config: ModelConfig = TINY) -> DualEncoder:
    torch.manual_seed(0)
    return build_dual_encoder(config, TOKENIZE)


def test_features_are_float32_on_the_unit_sphere_and_near_in_bf16() -> None:
    model, inputs = built().eval(), (images(), TOKENIZE(CAPTIONS))
    with torch.no_grad():
        exact, rounded = model(*inputs), model.bfloat16()(*inputs)
    for feature in (*exact, *rounded):
        assert (feature.shape, feature.dtype) == ((3, 16), torch.float32)
        torch.testing.assert_close(feature.norm(dim=1), torch.ones(3), rtol=0, atol=1e-5)
    for a, b in zip(exact, rounded, strict=True):
        assert ((a * b).sum(dim=1) > 0.999).all()


def test_either_side_may_be_absent() -> None:
    model = built().eval()
    image, text = model(images(), TOKENIZE(CAPTIONS))
    alone, nothing = model(images(), None)
    assert nothing is None
    assert torch.equal(alone, image)
    nothing, alone = model(None, TOKENIZE(CAPTIONS))
    assert nothing is None
    assert torch.equal(alone, text)


def test_the_text_tower_runs_first() -> None:
    model, order = built(), []
    model.vision.register_forward_pre_hook(lambda *_: order.append("vision"))
    model.text.register_forward_pre_hook(lambda *_: order.append("text"))
    model(images(), TOKENIZE(CAPTIONS))
    assert order == ["text", "vision"]


@pytest.mark.parametrize(
    ("name", "activation"),
    [("vit_base_patch32_clip_224", "gelu"), ("vit_base_patch32_clip_quickgelu_224", "quick_gelu")],
)
def test_both_towers_have_the_same_activation(name: str, activation: str) -> None:
    with torch.device("meta"):
        model = build_dual_encoder(ModelConfig(vision=VisionConfig(name=name), text=TEXT), TOKENIZE)
    assert model.text.trunk.config.hidden_act == activation
    assert type(model.vision.trunk.blocks[0].mlp.act).__name__.lower() == activation.replace("_", "")


def test_a_named_tokenizer_gives_its_own_vocabulary() -> None:
    text = TEXT.model_copy(update={"tokenizer": "somewhere", "vocab_size": 49408})
    model = build_dual_encoder(TINY.model_copy(update={"text": text}), TOKENIZE)
    assert model.text.trunk.embeddings.token_embedding.num_embeddings == TOKENIZE.vocab_size
