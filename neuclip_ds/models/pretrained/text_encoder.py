"""Text encoders of the transformers library, such as BERT, XLM-R, T5's encoder and Qwen3, as towers.

Captions are padded on the right, whichever side the tokenizer pads: no token then attends to padding, and the positions
count from the caption's first token, as a model without padding counts them. In token ids, padding is PADDING, so the
ids alone give the attention mask, even if the tokenizer pads with its EOS token.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoConfig, AutoModel, AutoModelForTextEncoding
from transformers.utils import logging

from neuclip_ds.errors import UserError, explained
from neuclip_ds.models.pretrained.base import raise_on_mismatch
from neuclip_ds.models.pretrained.files import SMALL_FILES, download, first_file, read_json
from neuclip_ds.models.pretrained.transformers_models import WEIGHT_PATTERNS, WEIGHTS
from neuclip_ds.models.tokenizer import load_tokenizer
from neuclip_ds.models.towers import Encoder

Pooling = Literal["cls", "mean", "eos", "last"]
"""The feature of a caption: the first token's hidden state, the mean over tokens, that of the EOS token, which is added
if the tokenizer does not end captions with it, or that of the last token, whichever it is."""

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
PADDING = -1  # id of positions after the end of a caption
_POOLING_OF_SENTENCE_TRANSFORMERS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, whose effect is known here
_NO_LIMIT = 1_000_000  # transformers' `model_max_length` is larger if a tokenizer has no limit


class PretrainedTextTower(Encoder):
    """Text tower around a transformers encoder without a projection.

    Args:
        trunk: an encoder that takes `input_ids` and `attention_mask`, and returns `last_hidden_state`.
        pooling: how a caption's feature is computed from its hidden states.
    """

    def __init__(self, trunk: Any, pooling: Pooling) -> None:
        super().__init__(trunk, None)
        self.pooling = pooling

    def feature(self, x: Tensor) -> Tensor:
        """Return the (b, width) features of int64 ids (b, T), which end with PADDING in rows of fewer than T tokens."""
        is_token = x != PADDING
        hidden = self.trunk(input_ids=x.clamp_min(0), attention_mask=is_token.long()).last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "mean":
            weight = is_token.unsqueeze(2)
            total = (hidden.float() * weight).sum(dim=1)
            return (total / weight.sum(dim=1)).to(hidden.dtype)
        last = is_token.sum(dim=1) - 1  # (b,) positions; the tokenizer has made sure that EOS is there
        rows = torch.arange(len(x), device=x.device)
        return hidden[rows, last]


class TextEncoderTokenizer:
    """The tokenizer of a transformers text encoder; can be pickled.

    Args:
        tokenizer: the transformers tokenizer.
        context_length: maximum number of tokens per caption, including special tokens.
        ends_with_eos: whether the last token of every caption must be EOS (or BERT's SEP), also if it is truncated.

    Raises UserError if captions must end with EOS, but the tokenizer has no such token.
    """

    def __init__(self, tokenizer: Any, context_length: int, ends_with_eos: bool) -> None:
        self.context_length = context_length
        self.inner = tokenizer
        self._last_id: int | None = None
        if ends_with_eos:
            eos_id = tokenizer.eos_token_id
            self._last_id = tokenizer.sep_token_id if eos_id is None else eos_id
            if self._last_id is None:
                raise UserError(
                    f"Tokenizer {tokenizer.name_or_path!r} has no EOS or SEP token: choose another --pooling."
                )

    def __call__(self, captions: list[str]) -> Tensor:
        """Return (b, T) int64 ids, padded on the right with PADDING to the longest caption; T is 1 without captions."""
        rows: list[list[int]] = []
        if captions:  # transformers raises IndexError for an empty list
            options = {"truncation": True, "split_special_tokens": True, "return_attention_mask": False}
            rows = self.inner(captions, max_length=self.context_length, padding=False, **options)["input_ids"]
        rows = [self._ended(row) for row in rows]
        width = max(map(len, rows), default=1)
        padded = [row + [PADDING] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)

    def _ended(self, row: Sequence[int]) -> list[int]:
        """Return a caption's ids, of which there is at least one, with EOS at the end if it is required."""
        ids = list(row)
        if self._last_id is not None and (not ids or ids[-1] != self._last_id):
            ids = [*ids[: self.context_length - 1], self._last_id]
        if not ids:  # a caption without known characters, from a tokenizer without special tokens
            ids = [self.inner.unk_token_id or 0]
        return ids

    def save(self, folder: Path | str) -> None:
        """Save the tokenizer's files for `transformers.AutoTokenizer`."""
        self.inner.save_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class PretrainedTextEncoder:
    """A text encoder with float32 weights, and its tokenizer."""

    tower: PretrainedTextTower
    tokenizer: TextEncoderTokenizer


def locate_text_encoder(name: str) -> Path:
    """Return the folder of a text encoder, downloading its files from the hub if needed; call on one rank only.

    `name` is a folder, or a name on the hub. Raises UserError if there is neither.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = download(name, SMALL_FILES, "MODEL")
        for pattern in WEIGHT_PATTERNS:
            if any(download(name, [pattern], "MODEL").glob(pattern)):
                break
    return folder.resolve()


def open_text_encoder(folder: Path, pooling: Pooling | None = None) -> PretrainedTextEncoder:
    """Load a text encoder from a folder, without running code from the folder.

    By default, the pooling is the one in the folder's sentence-transformers config. Raises UserError if there is no
    such config, or if the weights or the tokenizer are missing or unsupported.
    """
    chosen = pooling or _read_pooling(folder)
    tower = PretrainedTextTower(_load_trunk(folder), chosen)
    vocabulary = tower.trunk.get_input_embeddings().num_embeddings
    inner = load_tokenizer(folder, vocabulary)
    tokenizer = TextEncoderTokenizer(inner, _context_length(folder, inner, tower.trunk), chosen == "eos")
    return PretrainedTextEncoder(tower=tower, tokenizer=tokenizer)


def _read_pooling(folder: Path) -> Pooling:
    """Return the pooling in a sentence-transformers config."""
    fix = f"set --pooling to one of {', '.join(POOLINGS)}"
    modules = folder / "modules.json"
    if not modules.is_file():
        raise UserError(f"{folder} has no modules.json of sentence-transformers, which gives the pooling: {fix}.")
    with explained(f"The pooling in {modules} cannot be read", fix):
        config: dict[str, Any] = {}
        for module in json.loads(modules.read_text(encoding="utf-8")):
            kind = module["type"].rpartition(".")[2]
            if kind not in _MODULES:
                raise UserError(
                    f"{folder} has a module {kind} ({module['path']}), which is not computed. To use the encoder "
                    f"without it, {fix}."
                )
            if kind == "Pooling":
                config = read_json(folder / module["path"] / "config.json")
        modes = [mode for mode, value in config.items() if mode.startswith("pooling_mode_") and value is True]
        if len(modes) != 1 or modes[0] not in _POOLING_OF_SENTENCE_TRANSFORMERS:
            raise UserError(f"{folder} pools with {', '.join(modes) or 'nothing'}, which is not supported: {fix}.")
        return _POOLING_OF_SENTENCE_TRANSFORMERS[modes[0]]


def _load_trunk(folder: Path) -> Any:
    """Load the encoder, without the decoder of an encoder-decoder model and without BERT's pooler."""
    if first_file(folder, WEIGHTS) is None:
        raise UserError(f"{folder} has no weights; put {WEIGHTS[0]} (or pytorch_model.bin) there.")
    logging.disable_progress_bar()  # one bar per rank would flood the log
    with explained(f"transformers cannot load a text encoder from {folder}", "name another model"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if hasattr(config, "vision_config"):
            raise UserError(f"{folder} encodes images too: name it without hf:.")
        has_text_encoder = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
        model_class = AutoModelForTextEncoding if has_text_encoder else AutoModel
        trunk, info = model_class.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            weights_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    if config.is_encoder_decoder and not has_text_encoder:
        raise UserError(f"{folder} has an encoder and a decoder, of which the encoder cannot be loaded separately.")
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    raise_on_mismatch(str(folder), missing, [], [])
    if getattr(trunk, "pooler", None) is not None:
        trunk.pooler = None  # not used, and often absent from the weights
    trunk.config.use_cache = False
    return trunk


def _context_length(folder: Path, tokenizer: Any, trunk: Any) -> int:
    """Return the maximum number of tokens: the smallest limit in the folder's configs."""
    limits = [_NO_LIMIT, int(min(tokenizer.model_max_length, _NO_LIMIT))]
    sentence_config = folder / "sentence_bert_config.json"
    if sentence_config.is_file():
        limits.append(int(read_json(sentence_config).get("max_seq_length") or _NO_LIMIT))
    positions = getattr(trunk.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        embeddings = getattr(getattr(trunk, "embeddings", None), "position_embeddings", None)
        unused = getattr(embeddings, "padding_idx", None)  # RoBERTa's positions start after it
        limits.append(positions if unused is None else positions - unused - 1)
    return min(limits)
