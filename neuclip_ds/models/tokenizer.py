"""Tokenize captions with a transformers tokenizer.

Special tokens that are spelled out in a caption are treated as plain text.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import normalizers, processors
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from neuclip_ds.config import TextConfig
from neuclip_ds.errors import UserError, explained, install_command, require_package

# Loader processes are forked after the tokenizer's threads may have started; without this setting, each process warns.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CLEAN_CAPTIONS = "clean_captions"  # key in tokenizer_config.json: whether captions are cleaned as open_clip does
_CONFIG_FILE = "tokenizer_config.json"
_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
# Tokenizer classes of transformers 5 that transformers 4 lacks or loads with different special tokens.
_CLASSES_OF_VERSION_5 = ("TokenizersBackend", "GemmaTokenizer", "LlamaTokenizer", "Siglip2Tokenizer")


class ModelTokenizer(Protocol):
    """Interface of picklable tokenizers that convert captions to token ids for a text tower.

    Attributes:
        context_length: number T of tokens per caption, including special tokens and padding.
    """

    context_length: int

    def __call__(self, captions: list[str]) -> Tensor:
        """Return the (b, T) int64 token ids of b captions."""

    def save(self, folder: Path | str) -> None:
        """Save the tokenizer's files for `transformers.AutoTokenizer`; raise OSError if that fails."""


class CaptionTokenizer:
    """Picklable wrapper of a transformers tokenizer that pads or truncates captions to a fixed number of tokens.

    Captions are padded and truncated on the right, whichever side the tokenizer's config names, because the text towers
    expect this.

    Args:
        tokenizer: the transformers tokenizer; if it lacks a `pad_token`, its EOS or SEP token becomes the `pad_token`.
        context_length: number T of tokens per caption, including special tokens and padding.

    Raises:
        UserError: the tokenizer's config has `clean_captions`, and ftfy is not installed.

    Example:
        >>> tokenize = train_bpe(["a dog", "a cat"], vocab_size=300, context_length=8)
        >>> tokenize(["a dog"]).shape
        torch.Size([1, 8])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        self.context_length = context_length
        self.inner = tokenizer
        self._cleans_captions = bool(tokenizer.init_kwargs.get(CLEAN_CAPTIONS))
        if self._cleans_captions:
            require_package("ftfy", "model.text.tokenizer=clip_bpe", "open_clip")
        tokenizer.padding_side = "right"
        tokenizer.truncation_side = "right"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token

    def __call__(self, captions: list[str]) -> Tensor:
        """Return (b, context_length) int64 ids; long captions are truncated, but their special tokens are kept."""
        ids: list[list[int]] = []
        if self._cleans_captions:
            captions = [clean_caption(caption) for caption in captions]
        if captions:  # transformers raises IndexError for an empty list
            options = {"truncation": True, "split_special_tokens": True, "return_attention_mask": False}
            ids = self.inner(captions, max_length=self.context_length, padding="max_length", **options)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64).reshape(len(captions), self.context_length)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a caption, BOS or BERT's CLS; None if there is none or it equals EOS (GPT-2)."""
        bos = self.inner.bos_token_id
        if bos is None:
            bos = self.inner.cls_token_id
        return None if bos == self.eos_id else bos

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a caption, EOS or BERT's SEP; None if the tokenizer has neither."""
        eos = self.inner.eos_token_id
        return self.inner.sep_token_id if eos is None else eos

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token; None if the tokenizer has no padding, EOS or SEP token."""
        return self.inner.pad_token_id

    @property
    def vocab_size(self) -> int:
        """Number of rows in an embedding table for the ids: the largest id plus 1, because ids may have gaps."""
        return max(self.inner.get_vocab().values()) + 1

    def save(self, folder: Path | str) -> None:
        self.inner.model_max_length = self.context_length
        if self.inner.is_fast:  # clear the options of earlier calls, so that equal tokenizers give equal files
            self.inner.backend_tokenizer.no_truncation()
            self.inner.backend_tokenizer.no_padding()
        # text towers take no padding mask, and SigLIP's features would change with one
        self.inner.model_input_names = self.inner.init_kwargs["model_input_names"] = ["input_ids"]
        # some classes pad or truncate on the left by default
        self.inner.init_kwargs["padding_side"] = self.inner.padding_side
        self.inner.init_kwargs["truncation_side"] = self.inner.truncation_side
        save_tokenizer(self.inner, folder)
        make_readable_by_transformers_4(self.inner, Path(folder))

    @classmethod
    def load(cls, name_or_folder: Path | str, context_length: int) -> CaptionTokenizer:
        """Load a tokenizer from a folder or the hub; its output is BOS (if it has one), the caption, EOS and padding.

        The text tower pools at the first EOS. Raises `UserError` if the tokenizer cannot be loaded, and as in `closed`.
        """
        return cls.closed(load_tokenizer(name_or_folder), context_length)

    @classmethod
    def closed(cls, tokenizer: PreTrainedTokenizerBase, context_length: int) -> CaptionTokenizer:
        """Wrap a tokenizer so that it returns BOS (if it has one), the caption, EOS and padding.

        A fast tokenizer that adds other special tokens, or none, is changed in place. Raises `UserError` if a slow one
        does so, if the tokenizer has neither an EOS nor a SEP token, or if its config has `clean_captions` and ftfy is
        not installed.
        """
        closed = cls(tokenizer, context_length)
        if closed.eos_id is None:
            raise UserError(
                f"Tokenizer {tokenizer.name_or_path!r} has no EOS or SEP token, so the text tower has no token to pool "
                "at; add `eos_token` to its tokenizer_config.json, or choose a tokenizer with an EOS or SEP token."
            )
        start_ids = [] if closed.bos_id is None else [closed.bos_id]
        caption_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        if tokenizer("a")["input_ids"] != [*start_ids, *caption_ids, closed.eos_id]:
            if not tokenizer.is_fast:
                raise UserError(
                    f"Tokenizer {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) cannot be made to end captions "
                    "with EOS, the token at which the text tower pools; choose one that has a tokenizer.json."
                )
            add_special_tokens(tokenizer, start_ids, closed.eos_id)
        return closed


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, start_ids: Sequence[int], end_id: int) -> None:
    """Make a fast tokenizer begin every caption with the start tokens and end it with the end token, in place."""
    special_ids = [*start_ids, end_id]
    names = tokenizer.convert_ids_to_tokens(special_ids)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*names[:-1], "$A", names[-1]], special_tokens=list(zip(names, special_ids, strict=True))
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path | str) -> None:
    """Save the files of a transformers tokenizer; raise OSError if that fails."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is Exception:  # the tokenizers library raises this for file-system errors
            raise OSError(str(error)) from error
        raise


def named_tokenizer(text: TextConfig) -> CaptionTokenizer:
    """Load the tokenizer that `model.text.tokenizer` names, from a folder or the hub; raise UserError if that fails."""
    assert text.tokenizer is not None
    return CaptionTokenizer.load(text.tokenizer, text.resolved_context_length())


def clean_caption(caption: str) -> str:
    """Clean a caption as open_clip does before CLIP's BPE.

    Encoding errors are fixed, HTML entities decoded, runs of whitespace replaced by one space, and letters lower-cased.
    """
    import ftfy  # optional dependency

    text = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return " ".join(text.split()).lower()


def make_readable_by_transformers_4(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Edit a saved tokenizer's tokenizer_config.json so that transformers 4 returns the same ids as transformers 5.

    If only transformers 5 loads a fast tokenizer's class as intended, the config names PreTrainedTokenizerFast instead,
    which uses tokenizer.json unchanged in both versions.
    """
    path = folder / _CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    if tokenizer.is_fast and config.get("tokenizer_class") in _CLASSES_OF_VERSION_5:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
        pre_tokenizer_state = {} if pre_tokenizer is None else json.loads(pre_tokenizer.__getstate__())
        if "add_prefix_space" in pre_tokenizer_state:  # transformers 4 sets it to False if the config has no value
            config["add_prefix_space"] = pre_tokenizer_state["add_prefix_space"]
    if isinstance(config.get("extra_special_tokens"), list):  # a dictionary in transformers 4
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(name_or_folder: Path | str, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Load a transformers tokenizer from a folder or the hub.

    Raises `UserError` if the tokenizer cannot be read or, if `vocab_size` is given, has ids beyond the model's
    `vocab_size` embeddings.
    """
    folder = Path(name_or_folder)
    name = str(name_or_folder)
    with explained(
        f"transformers cannot load the tokenizer {name} from a folder or the hub",
        "pass a folder with the model's tokenizer files (such as tokenizer.json and tokenizer_config.json, or "
        f"vocab.json and merges.txt, or spiece.model, which needs {install_command('siglip')}); if "
        "model.text.tokenizer names the tokenizer, you can also omit this option, to train a BPE on the captions",
    ):
        if folder.is_dir() and not any((folder / file).is_file() for file in _FILES):  # else an empty one is created
            raise FileNotFoundError("the folder has no tokenizer files")
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=folder.is_dir())
        largest = max(tokenizer.get_vocab().values())
        _apply_lower_case(tokenizer)
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(
            f"The tokenizer in {name} has ids up to {largest}, but the model's vocabulary ends at {vocab_size - 1}; "
            "put the model's tokenizer files there."
        )
    return tokenizer


def _apply_lower_case(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a fast tokenizer lower-case captions if its config sets `do_lower_case`, which GemmaTokenizer ignores.

    SigLIP 2 was trained on lower-cased captions, and its published tokenizer is a GemmaTokenizer with that option.
    """
    if not (tokenizer.is_fast and tokenizer.init_kwargs.get("do_lower_case")):
        return
    if tokenizer("A DOG")["input_ids"] == tokenizer("a dog")["input_ids"]:
        return
    backend = tokenizer.backend_tokenizer
    own_normalizers = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own_normalizers])
