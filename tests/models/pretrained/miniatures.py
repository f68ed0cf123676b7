"""Miniature models of every family, with random weights and saved in the formats of their libraries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    MetaClip2Config,
    MetaClip2Model,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    XLMRobertaTokenizer,
)

# towers of a model that is built from the config: a CLIP ViT for 32-pixel images, and a text tower
TINY_VIT: dict[str, Any] = {
    "name": "vit_base_patch32_clip_224",
    "image_size": 32,
    "options": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
}
TINY_TEXT: dict[str, Any] = {"vocab_size": 300, "context_length": 16, "width": 24, "layers": 2, "heads": 2}
CAPTIONS = ["a dog runs on grass", "Two cats, sleeping!", "", "a photo of a very long caption that goes on " * 4]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.!?'"


def images(size: int, rows: int = 4) -> Tensor:
    return torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def clip_tokenizer() -> CLIPTokenizer:
    symbols = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "do", "dog</w>"]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=[("d", "o"), ("do", "g</w>")], model_max_length=16)


def siglip_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like T5's: it has no BOS, and `</s>` is both EOS and padding."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    backend = Tokenizer(models.Unigram([*pieces, ("▁dog", -1.0)], unk_id=2))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="</s>", unk_token="<unk>", model_max_length=16
    )


def xlm_roberta_tokenizer() -> XLMRobertaTokenizer:
    """Return a tokenizer like XLM-R's: ids 0 to 3 are BOS, padding, EOS and the unknown token."""
    specials = ("<s>", "<pad>", "</s>", "<unk>")
    pieces = [*((name, 0.0) for name in specials), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return XLMRobertaTokenizer(vocab=[*pieces, ("▁dog", -1.0), ("<mask>", 0.0)], model_max_length=16)


def small(hidden: int, **over: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, **over}


def save_clip(folder: Path) -> CLIPModel:
    return _save_clip(folder, CLIPConfig, CLIPModel, clip_tokenizer())


def save_metaclip_2(folder: Path, length: int = 16) -> MetaClip2Model:
    """Save a MetaCLIP 2 model, whose text feature is read at XLM-R's EOS (id 2)."""
    return _save_clip(folder, MetaClip2Config, MetaClip2Model, xlm_roberta_tokenizer(), length)


def _save_clip(folder: Path, config: Any, kind: Any, tokenizer: Any, length: int = 16) -> Any:
    torch.manual_seed(0)
    specials = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = small(24, vocab_size=len(tokenizer), max_position_embeddings=length, **specials)
    vision = small(32, image_size=32, patch_size=8)
    model = kind(config(text_config=text, vision_config=vision, projection_dim=20)).eval()
    _save(model, folder, logit_scale=4.0)
    CLIPProcessor(CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32), tokenizer).save_pretrained(folder)
    flat_processor(folder)
    return model


def save_siglip(folder: Path, length: int = 16) -> SiglipModel:
    torch.manual_seed(0)
    tokenizer = siglip_tokenizer()
    text = small(
        32,
        vocab_size=len(tokenizer),
        max_position_embeddings=length,
        projection_size=32,
        bos_token_id=1,
        eos_token_id=1,
    )
    config = SiglipConfig(text_config=text, vision_config=small(32, image_size=32, patch_size=8))
    model = SiglipModel(config).eval()
    _save(model, folder, logit_scale=4.75, logit_bias=-12.5)
    tokenizer.save_pretrained(folder)
    SiglipImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(
        folder
    )
    return model


OPEN_CLIP_CONFIG: dict[str, Any] = {
    "embed_dim": 20,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 24, "heads": 2, "layers": 2},
}


PE_CONFIG: dict[str, Any] = {  # like Perception Encoder's, with its smallest image tower
    **OPEN_CLIP_CONFIG,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 384,
        "timm_model_name": "vit_pe_core_tiny_patch16_384",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": None,
    },
}


def save_open_clip(folder: Path, config: dict[str, Any] | None = None) -> Any:
    """Save a folder with open_clip_config.json and open_clip_model.safetensors, as on the hub."""
    torch.manual_seed(0)
    tree = json.loads(json.dumps(config or OPEN_CLIP_CONFIG))
    folder.mkdir(parents=True, exist_ok=True)
    preprocess = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3], "interpolation": "bicubic", "resize_mode": "squash"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": tree, "preprocess_cfg": preprocess}))
    kind = open_clip.CustomTextCLIP if tree.pop("custom_text", False) else open_clip.CLIP
    model = kind(**tree).eval()
    _disturb(model)
    with torch.no_grad():
        model.logit_scale.fill_(4.0)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return model


def flat_processor(folder: Path) -> None:
    """Move the image processor from transformers 5's processor_config.json to its own file, as in published models."""
    nested = folder / "processor_config.json"
    if nested.is_file():
        tree = json.loads(nested.read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps(tree["image_processor"]))
        nested.unlink()


def _save(model: Any, folder: Path, **logits: float) -> None:
    """Save a model after changing its biases and gains, and setting the logit scale and bias to `logits`."""
    _disturb(model)
    with torch.no_grad():
        for name, value in logits.items():
            getattr(model, name).fill_(value)
    model.save_pretrained(folder)


def _disturb(model: torch.nn.Module) -> None:
    """Add noise to biases and gains, whose initial values 0 and 1 would hide a wrong mapping of weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


SAVERS: dict[str, Callable[[Path], Any]] = {
    "clip": save_clip,
    "metaclip_2": save_metaclip_2,
    "siglip": save_siglip,
    "open_clip": save_open_clip,
}
