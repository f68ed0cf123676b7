"""Captions to token ids: a byte-level BPE trained on the captions, or any transformers tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from neuclip_ds.errors import UserError

# the loaders' workers are forks; tokenizers' own threads would warn about each and add nothing
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BOS, EOS = "<|startoftext|>", "<|endoftext|>"  # CLIP's; EOS also pads
_LEGACY_EOS = 2  # transformers pools CLIP models with this id at the largest id instead of the first EOS


class CaptionTokenizer:
    """BOS, the caption's tokens cut so that EOS fits, EOS, padding; picklable."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        """
        Raises:
            UserError: the tokenizer has no end token, or one whose id makes transformers pool elsewhere.
        """
        self._tokenizer = tokenizer
        self.context_length = context_length
        eos = _first(tokenizer.eos_token_id, tokenizer.sep_token_id)
        if eos is None:
            raise UserError("The tokenizer has neither an end-of-text nor a separator token to pool at; use another.")
        if eos == _LEGACY_EOS:
            raise UserError(
                f"The tokenizer's end token has id {_LEGACY_EOS}, which transformers' CLIP pools at the wrong place; "
                "use another tokenizer, or leave model.text.tokenizer empty to train one."
            )
        self.eos_id: int = eos
        self.bos_id: int = _first(tokenizer.bos_token_id, tokenizer.cls_token_id, eos)  # type: ignore[assignment]
        self.pad_id: int = _first(tokenizer.pad_token_id, eos)  # type: ignore[assignment]
        self.vocab_size = len(tokenizer)

    def __call__(self, captions: list[str]) -> Tensor:
        """Captions -> (b, context_length) int64."""
        room = self.context_length - 2
        ids = self._tokenizer(captions, add_special_tokens=False, truncation=True, max_length=room)["input_ids"]
        rows = torch.full((len(captions), self.context_length), self.pad_id, dtype=torch.int64)
        for row, caption in zip(rows, ids, strict=True):
            tokens = [self.bos_id, *caption, self.eos_id]
            row[: len(tokens)] = torch.tensor(tokens)
        return rows

    def save(self, folder: Path) -> None:
        """Keeps the tokenizer in a folder that `load` reads."""
        self._tokenizer.save_pretrained(str(folder))

    @classmethod
    def load(cls, name: str | Path, context_length: int) -> CaptionTokenizer:
        """A transformers tokenizer from a folder or the hub.

        Raises:
            UserError: it is in neither place, or has no usable end token.
        """
        try:
            return cls(AutoTokenizer.from_pretrained(str(name)), context_length)
        except (OSError, ValueError) as error:
            raise UserError(
                f"model.text.tokenizer={name} was found neither as a folder nor on the hub: name a folder saved by "
                "transformers, or leave it empty to train one on the captions."
            ) from error


def train_bpe(captions: Iterable[str], vocab_size: int, context_length: int) -> CaptionTokenizer:
    """A lower-casing byte-level BPE with `<|startoftext|>` = 0 and `<|endoftext|>` = 1; deterministic.

    Raises:
        UserError: there are no captions.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    seen = 0

    def counted() -> Iterable[str]:
        nonlocal seen
        for caption in captions:
            seen += 1
            yield caption

    tokenizer.train_from_iterator(counted(), trainer)
    if seen == 0:
        raise UserError(
            "There are no captions to train a tokenizer on; check data.train, or name model.text.tokenizer."
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    return CaptionTokenizer(fast, context_length)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
