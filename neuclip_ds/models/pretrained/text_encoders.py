"""Text towers from any transformers text encoder: its weights, its tokenizer, a pooling and a new projection."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_MAPPING,
)

from neuclip_ds.config import TextConfig
from neuclip_ds.errors import UserError, explained
from neuclip_ds.models.pretrained.attention_masks import use_static_masks
from neuclip_ds.models.pretrained.transformers_models import read_model
from neuclip_ds.models.tokenizer import CaptionTokenizer, load_tokenizer
from neuclip_ds.models.towers import TextTower, new_projection

_POSITIONS = {"position_embeddings", "position_embedding", "wpe"}  # names of learned absolute position embeddings


class TextEncoder:
    """A text encoder of transformers in a local folder.

    Args:
        folder: folder with config.json, tokenizer files, and weights if `tower` is to load them.
        text: pooling and context length.

    Raises:
        UserError: transformers has no text encoder of this type, it has fewer positions than the context, or the
            tokenizer does not fit.
    """

    def __init__(self, folder: str, text: TextConfig) -> None:
        self.folder, self._text = Path(folder), text
        fix = "name the folder of a text encoder with model.text.pretrained"
        with explained(f"transformers cannot read a config.json in {folder}", fix):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._published = config.get_text_config()
        self._published.use_cache = False
        encoder = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(self._published), None)  # T5 without its decoder
        self._kind: Any = encoder or MODEL_MAPPING.get(type(self._published), None)
        if self._kind is None or not hasattr(self._published, "vocab_size"):
            raise UserError(
                f"transformers has no text encoder of type {self._published.model_type!r} ({folder}); name another one "
                "with model.text.pretrained."
            )
        longest = self._positions()
        if longest is not None and longest < text.context_length:
            raise UserError(
                f"The text encoder in {folder} has {longest} positions; lower model.text.context_length="
                f"{text.context_length} to at most as many."
            )
        self.pooling = text.pooling or _usual_pooling(self._published.model_type)

    def tokenizer(self) -> CaptionTokenizer:
        """Return the encoder's tokenizer, which pads at the end."""
        inner = load_tokenizer(self.folder, self._published.vocab_size)
        inner.padding_side = "right"
        tokenizer = CaptionTokenizer(inner, self._text.context_length)
        if inner.pad_token_id is None or tokenizer.eos_id is None:
            raise UserError(f"The tokenizer in {self.folder} has no padding or no EOS token; add it to its files.")
        longest = tokenizer(["a " * self._text.context_length])
        if self.pooling == "eos" and not (longest == tokenizer.eos_id).any():
            raise UserError(
                f"The tokenizer in {self.folder} does not add EOS, where model.text.pooling=eos reads the feature; set "
                "model.text.pooling=last or mean."
            )
        return tokenizer

    def tower(self, tokenizer: CaptionTokenizer, embed_dim: int, weights: bool) -> TextTower:
        """Build the tower, whose encoder has the folder's weights or random ones.

        Raises:
            UserError: the weights are missing or do not fit.
        """
        if weights:
            trunk, _ = read_model(self._kind, self.folder, self._published, optional=("pooler.",))
        else:
            trunk = self._kind(self._published)
        if getattr(trunk, "pooler", None) is not None:
            trunk.pooler = None  # unused (BERT's next-sentence prediction); ZeRO would wait for its gradients
        use_static_masks(trunk)
        assert tokenizer.eos_id is not None  # ensured by `tokenizer`
        projection = new_projection(trunk.config.hidden_size, embed_dim)
        pad_id = None if self.pooling == "eos" and _is_clip(trunk.config.model_type) else tokenizer.pad_id
        return TextTower(trunk, projection, self.pooling, tokenizer.eos_id, pad_id)

    def _positions(self) -> int | None:
        """Return how many tokens the learned positions suffice for; None for relative or rotary ones."""
        with torch.device("meta"):
            trunk = self._kind(self._published)
        for name, module in trunk.named_modules():
            if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
                special = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa's positions start there
                return module.num_embeddings - special
        return None


def _is_clip(model_type: str) -> bool:
    """Whether an encoder is CLIP's: causal, and trained to be read at the EOS."""
    return model_type in ("clip_text_model", "metaclip_2_text_model")


def _usual_pooling(model_type: str) -> str:
    if _is_clip(model_type):
        return "eos"
    causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return "last" if causal else "mean"
