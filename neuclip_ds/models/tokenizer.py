"""ModelTokenizer captions with any transformers tokenizer, or with a byte-level BPE trained on the captions themselves.

A row is BOS, the caption's tokens, EOS, padding. The text tower reads its feature at the first EOS, so there is exactly
one before the padding: special tokens spelled in a caption are treated as plain text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from neuclip_ds.errors import UserError

# Loader processes are forked after the tokenizer's threads may have started; without this, each one warns.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
_SMALLEST_BPE = 258  # every byte and the two special tokens, so that no caption is out of vocabulary


class ModelTokenizer(Protocol):
    """Turn captions into token ids for a text tower; can be pickled.

    Attributes:
        context_length: number T of tokens per row.
    """

    context_length: int

    def __call__(self, captions: list[str]) -> Tensor:
        """Return (b, T) int64 ids."""

    def save(self, folder: Path | str) -> None:
        """Save the tokenizer's files for `transformers.AutoTokenizer`."""

    @property
    def special_ids(self) -> dict[str, int | None]:
        """Ids of BOS, EOS and padding under the names in transformers' configs."""


class CaptionTokenizer:
    """A transformers tokenizer whose rows are BOS, caption, EOS, padding; can be pickled.

    Raises:
        UserError: the tokenizer has neither an EOS nor a SEP token.

    Attributes:
        context_length: number T of tokens per row.
        vocab_size: number of rows that an embedding of these ids needs.
        bos_id: first token of a row; None if the tokenizer has none, or the same one as EOS (GPT-2).
        eos_id: token after a caption.
        pad_id: token that fills the row after EOS; EOS itself if the tokenizer has no padding token.

    Example:
        >>> tokenize = train_bpe(["a dog", "a cat"], vocab_size=300, context_length=8)
        >>> tokenize(["a dog"]).shape
        torch.Size([1, 8])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        eos = _first_present(tokenizer.eos_token_id, tokenizer.sep_token_id)
        if eos is None:
            raise UserError(
                f"Tokenizer {tokenizer.name_or_path!r} has neither an EOS nor a SEP token, at which the text tower "
                "reads its feature; add `eos_token` to its tokenizer_config.json or choose another."
            )
        bos = _first_present(tokenizer.bos_token_id, tokenizer.cls_token_id)
        self.context_length = context_length
        self.vocab_size: int = max(tokenizer.get_vocab().values()) + 1  # ids may have holes
        self.eos_id: int = eos
        self.bos_id: int | None = None if bos == eos else bos
        self.pad_id: int = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._tokenizer = tokenizer

    def __call__(self, captions: list[str]) -> Tensor:
        """Return (b, context_length) int64 ids; long captions are truncated before EOS, an empty one is BOS and EOS."""
        rows = torch.full((len(captions), self.context_length), self.pad_id, dtype=torch.int64)
        start = [] if self.bos_id is None else [self.bos_id]
        room = self.context_length - len(start) - 1
        for row, ids in zip(rows, token_ids(self._tokenizer, captions, room, add_special_tokens=False), strict=True):
            row[: len(start) + len(ids) + 1] = torch.tensor([*start, *ids, self.eos_id])
        return rows

    def of_length(self, context_length: int) -> CaptionTokenizer:
        """Return the same tokenizer with rows of another length."""
        return CaptionTokenizer(self._tokenizer, context_length)

    @property
    def special_ids(self) -> dict[str, int | None]:
        return {"bos_token_id": self.bos_id, "eos_token_id": self.eos_id, "pad_token_id": self.pad_id}

    def save(self, folder: Path | str) -> None:
        """Save the tokenizer's files for `load` and `transformers.AutoTokenizer`; raise OSError if that fails."""
        self._tokenizer.model_max_length = self.context_length
        try:
            self._tokenizer.save_pretrained(folder)
        except Exception as error:
            if type(error) is Exception:  # what the tokenizers library raises for errors of the file system
                raise OSError(str(error)) from error
            raise

    @classmethod
    def load(cls, name_or_folder: Path | str, context_length: int) -> CaptionTokenizer:
        """Load a saved tokenizer, or one from the hub; raise UserError if there is none, or it has no EOS token."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(name_or_folder))
        except (OSError, ValueError, ImportError) as error:
            raise UserError(_not_loaded(name_or_folder, error)) from error
        return cls(tokenizer, context_length)


def train_bpe(captions: Iterable[str], vocab_size: int, context_length: int) -> CaptionTokenizer:
    """Train a byte-level BPE on captions in NFC and lower case, deterministically.

    Args:
        captions: read once as a stream.
        vocab_size: maximum number of tokens; few captions give fewer.
        context_length: number of tokens per row.

    Raises:
        UserError: no caption has text, or the vocabulary is too small for 256 bytes, BOS and EOS.
    """
    if vocab_size < _SMALLEST_BPE:
        raise UserError(f"A byte-level BPE of {vocab_size} tokens is too small; use at least {_SMALLEST_BPE}.")
    with_text = (caption for caption in captions if caption.strip())
    first = next(with_text, None)
    if first is None:
        raise UserError(
            "There is no caption with text to train a BPE on; check data.train or name model.text.tokenizer."
        )
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # a word has one token at any position
    backend.decoder = decoders.ByteLevel()
    # for other users of the saved tokenizer; here `CaptionTokenizer` assembles the rows
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],  # ids 0 and 1
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(chain([first], with_text), trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    return CaptionTokenizer(tokenizer, context_length)


def token_ids(tokenizer: Any, captions: list[str], length: int, **options: Any) -> list[list[int]]:
    """Return each caption's ids, `length` at most; special tokens spelled in a caption are treated as plain text."""
    if not captions:  # transformers raises IndexError
        return []
    options |= {"truncation": True, "split_special_tokens": True, "return_attention_mask": False}
    return tokenizer(captions, max_length=length, **options)["input_ids"]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the ids of BOS, EOS and padding under the names in transformers' configs."""
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def _first_present(*ids: int | None) -> int | None:
    return next((token for token in ids if token is not None), None)


def _not_loaded(name_or_folder: Path | str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0]
    if Path(name_or_folder).is_dir():
        return (
            f"Folder {str(name_or_folder)!r} holds no tokenizer that transformers can read ({reason}); it needs the "
            "files that `save_pretrained` writes, tokenizer.json and tokenizer_config.json."
        )
    return (
        f"Tokenizer {str(name_or_folder)!r} was found neither as a local folder nor on the hub ({reason}). Give "
        "model.text.tokenizer the folder of a tokenizer saved on a machine with network, or omit it to train a BPE "
        "on the captions."
    )
