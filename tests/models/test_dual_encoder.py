import pytest
import torch
from torch import Tensor

from neuclip_ds.config import ModelConfig, TextConfig, VisionConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder, parameter_count
from neuclip_ds.models.tokenizer import CaptionTokenizer, train_bpe

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_float32_on_the_unit_sphere(dtype: torch.dtype) -> None:
    features = built().to(dtype)(images(), TOKENIZE(CAPTIONS))
    for feature in features:
        assert feature.shape == (3, 16)
        assert feature.dtype == torch.float32
        assert feature.isfinite().all()
        torch.testing.assert_close(feature.norm(dim=1), torch.ones(3), rtol=0, atol=1e-5)


def test_bf16_is_near_float32() -> None:
    model, inputs = built().eval(), (images(), TOKENIZE(CAPTIONS))
    with torch.no_grad():
        exact, rounded = model(*inputs), model.bfloat16()(*inputs)
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


def test_every_parameter_has_a_gradient_and_a_dimension() -> None:
    model = built()
    image, text = model(images(), TOKENIZE(CAPTIONS))
    (image * text).sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []
    assert all(parameter.ndim > 0 for parameter in model.parameters())


def test_weights_follow_the_seed() -> None:
    first, second = built().state_dict(), built().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    other = build_dual_encoder(TINY, TOKENIZE).state_dict()
    assert not torch.equal(first["vision.projection.weight"], other["vision.projection.weight"])


def test_checkpointing_of_both_towers_keeps_the_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = built(TINY.model_copy(update={"activation_checkpointing": checkpointing})).train()
        image, text = model(images(), TOKENIZE(CAPTIONS))
        (image * text).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["resnet50", "resnet50_clip"])
def test_resnets_in_bf16(name: str) -> None:
    vision = VisionConfig(name=name, image_size=48)
    model = built(ModelConfig(vision=vision, text=TEXT, embed_dim=16)).bfloat16()
    image, _ = model(images(), None)
    torch.testing.assert_close(image.norm(dim=1), torch.ones(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_base_patch32_clip_224", 151_277_312),  # OpenAI's 151,277,313 and 149,620,737 have the logit scale
        ("vit_base_patch32_clip_quickgelu_224", 151_277_312),
        ("vit_base_patch16_clip_224", 149_620_736),
    ],
)
def test_parameter_counts_are_openais(name: str, expected: int) -> None:
    with torch.device("meta"):
        model = build_dual_encoder(ModelConfig(vision=VisionConfig(name=name)), tokenizer_of_77())
    assert parameter_count(model) == expected


def test_rn50_has_openais_parameter_count() -> None:
    with torch.device("meta"):
        config = ModelConfig(vision=VisionConfig(name="resnet50_clip"), embed_dim=1024)
        model = build_dual_encoder(config, tokenizer_of_77())
    assert parameter_count(model) == 102_007_136  # 102,007,137 with the logit scale


def test_vit_h_has_the_published_parameter_counts() -> None:
    """open_clip's ViT-H-14: 986,109,441 with the logit scale."""
    text = TextConfig(width=1024, layers=24, heads=16)
    config = ModelConfig(vision=VisionConfig(name="vit_huge_patch14_clip_224"), text=text, embed_dim=1024)
    with torch.device("meta"):
        model = build_dual_encoder(config, tokenizer_of_77())
    assert parameter_count(model.vision) == 632_076_800
    assert parameter_count(model) == 986_109_440


def tokenizer_of_77() -> CaptionTokenizer:
    return CaptionTokenizer(TOKENIZE._tokenizer, 77)


@pytest.mark.parametrize(
    ("name", "activation"),
    [("vit_base_patch32_clip_224", "gelu"), ("vit_base_patch32_clip_quickgelu_224", "quick_gelu")],
)
def test_both_towers_have_the_same_activation(name: str, activation: str) -> None:
    with torch.device("meta"):
        model = build_dual_encoder(ModelConfig(vision=VisionConfig(name=name), text=TEXT), TOKENIZE)
    assert model.text.trunk.config.hidden_act == activation
    assert type(model.vision.trunk.blocks[0].mlp.act).__name__.lower() == activation.replace("_", "")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    words = ["elephant mountain umbrella", "chocolate paragraph something"]
    tokenizer = train_bpe(words * 9, vocab_size=310, context_length=12)
    with pytest.raises(UserError, match=f"set it to at least {tokenizer.vocab_size}"):
        build_dual_encoder(TINY, tokenizer)


def test_a_named_tokenizer_gives_its_own_vocabulary() -> None:
    text = TEXT.model_copy(update={"tokenizer": "somewhere", "vocab_size": 49408})
    model = build_dual_encoder(TINY.model_copy(update={"text": text}), TOKENIZE)
    assert model.text.trunk.embeddings.token_embedding.num_embeddings == TOKENIZE.vocab_size


def test_a_longer_tokenizer_context_is_refused() -> None:
    with pytest.raises(UserError, match=r"rows of 77 tokens, more than model.text.context_length=12"):
        build_dual_encoder(TINY, tokenizer_of_77())
