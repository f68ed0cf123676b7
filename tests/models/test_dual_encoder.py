import pytest
import torch
from torch import Tensor

from neuclip_ds.config import ModelConfig, TextConfig, VisionConfig
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder
from neuclip_ds.models.tokenizer import CaptionTokenizer, train_bpe
from neuclip_ds.models.trained_parts import Trainable

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


def test_weights_follow_the_seed() -> None:
    first, second = built().state_dict(), built().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    other = build_dual_encoder(TINY, TOKENIZE).state_dict()
    assert not torch.equal(first["vision.projection.weight"], other["vision.projection.weight"])


def test_every_parameter_has_a_gradient_which_checkpointing_keeps() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = built(TINY.model_copy(update={"activation_checkpointing": checkpointing})).train()
        assert all(parameter.ndim > 0 for parameter in model.parameters())
        image, text = model(images(), TOKENIZE(CAPTIONS))
        (image * text).sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
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
    ("name", "embed_dim", "text", "expected"),
    [  # the published numbers have one more, the logit scale
        ("vit_base_patch32_clip_224", 512, {}, 151_277_312),
        ("vit_base_patch32_clip_quickgelu_224", 512, {}, 151_277_312),
        ("vit_base_patch16_clip_224", 512, {}, 149_620_736),
        ("resnet50_clip", 1024, {}, 102_007_136),
        ("vit_huge_patch14_clip_224", 1024, {"width": 1024, "layers": 24, "heads": 16}, 986_109_440),  # open_clip's
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, embed_dim: int, text: dict[str, int], expected: int
) -> None:
    config = ModelConfig(vision=VisionConfig(name=name), text=TextConfig(**text), embed_dim=embed_dim)
    with torch.device("meta"):
        assert Trainable.of(build_dual_encoder(config, tokenizer_of_77())).total == expected


def tokenizer_of_77() -> CaptionTokenizer:
    return CaptionTokenizer(TOKENIZE.inner, 77)


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
