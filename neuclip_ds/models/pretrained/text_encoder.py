"""Text encoders of the transformers library, such as BERT, XLM-R, T5's encoder and Qwen3, as towers.

Captions are padded on the right, whichever side the tokenizer pads: in causal encoders, no caption token then attends
to padding, and positions count from the caption's first token, as they would without padding. Padding has the token id
PADDING, so the ids alone determine the attention mask, even if the tokenizer pads with its EOS token.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoConfig, AutoModel, AutoModelForTextEncoding
from transformers.utils import logging

from neuclip_ds.config import Pooling, TextConfig
from neuclip_ds.errors import UserError, explained
from neuclip_ds.files import expand_user
from neuclip_ds.models.pretrained.attention_masks import use_static_masks
from neuclip_ds.models.pretrained.base import raise_on_mismatch
from neuclip_ds.models.pretrained.files import (
    SMALL_FILES,
    download,
    first_file,
    read_json,
    refuse_adapter,
    save_small_files,
)
from neuclip_ds.models.pretrained.transformers_models import WEIGHT_PATTERNS, WEIGHTS
from neuclip_ds.models.tokenizer import load_tokenizer, save_tokenizer
from neuclip_ds.models.towers import TextTower, new_projection

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
PADDING = -1  # id of positions after the end of a caption
# sentence-transformers' names of the supported poolings
_POOLING_OF_SENTENCE_TRANSFORMERS: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
# names of the same poolings in files that earlier versions of sentence-transformers wrote
_EARLIER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = ("Transformer", "Pooling", "Normalize")  # the supported modules of sentence-transformers
_NO_LIMIT = 1_000_000  # transformers' `model_max_length` is larger if a tokenizer has no limit
_POOLING_FILE = "pooling.json"  # in the folder that `TextEncoderSource.save` writes


class PretrainedTextTower(TextTower):
    """Text tower whose trunk is a transformers encoder.

    Args:
        trunk: an encoder that takes `input_ids` and `attention_mask`, and returns `last_hidden_state`.
        pooling: how a caption's feature is computed from its hidden states.
        projection: maps the feature to the joint embedding space; None to return the feature.
    """

    def __init__(self, trunk: Any, pooling: Pooling, projection: nn.Module | None = None) -> None:
        super().__init__(trunk, projection)
        self.pooling = pooling

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PretrainedTextTower":
        """Keep the dtype of constants, such as the frequencies of rotary positions, which bf16 would round.

        torch calls this for `to` and `bfloat16`. transformers keeps these buffers in float32 too.
        """
        constants = list(_constants(self.trunk))
        super()._apply(fn, recurse)
        for module, name, before in constants:
            after = module.get_buffer(name)
            if after.dtype != before.dtype:
                setattr(module, name, before.to(after.device))
        return self

    def feature(self, x: Any) -> Tensor:
        """Return the (b, width) features of (b, T) int64 ids; rows with fewer than T tokens end with PADDING."""
        # like `packed` in other towers, only on a CPU by default, where the host need not wait for the lengths
        if self.packed == "auto" and x.device.type == "cpu" and not torch.compiler.is_compiling():
            x = _without_common_padding(x)
        is_token = x != PADDING
        hidden = self.trunk(input_ids=x.clamp_min(0), attention_mask=is_token.long()).last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "mean":
            weight = is_token.unsqueeze(2)
            total = (hidden.float() * weight).sum(dim=1)
            return (total / weight.sum(dim=1)).to(hidden.dtype)
        last = is_token.sum(dim=1) - 1  # (b,) positions; for `eos`, the tokenizer puts EOS there
        rows = torch.arange(len(x), device=x.device)
        return hidden[rows, last]


def _constants(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each floating-point buffer that is not in the state dict, as its module, its name and its tensor."""
    for child in module.modules():
        for name in child._non_persistent_buffers_set:
            buffer = child._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                yield child, name, buffer


def _without_common_padding(tokens: Tensor) -> Tensor:
    """Return token ids (b, T) on the host without the columns that are padding in all rows."""
    is_used = (tokens != PADDING).any(dim=0)
    return tokens[:, : max(1, int(is_used.sum()))]


class TextEncoderTokenizer:
    """The tokenizer of a transformers text encoder; can be pickled.

    Args:
        tokenizer: the transformers tokenizer.
        context_length: maximum number of tokens per caption, including special tokens.
        ends_with_eos: whether the last token of every caption must be EOS (or BERT's SEP), even if the caption is
            truncated.
        pads_to_context: whether captions are padded to `context_length` instead of the longest caption's length.

    Raises:
        UserError: captions must end with EOS, but the tokenizer has neither an EOS nor a SEP token.
    """

    def __init__(self, tokenizer: Any, context_length: int, ends_with_eos: bool, pads_to_context: bool = False) -> None:
        self.context_length = context_length
        self.inner = tokenizer
        self._pads_to_context = pads_to_context
        self._last_id: int | None = None
        if ends_with_eos:
            eos_id = tokenizer.eos_token_id
            self._last_id = tokenizer.sep_token_id if eos_id is None else eos_id
            if self._last_id is None:
                raise UserError(
                    f"Tokenizer {tokenizer.name_or_path!r} has no EOS or SEP token, which pooling at EOS needs: set "
                    "model.text.pooling (or --pooling of `neuclip-ds embed`) to cls, last or mean."
                )

    def __call__(self, captions: list[str]) -> Tensor:
        """Return (b, T) int64 ids, padded on the right with PADDING.

        T is the context length if captions are padded to it, else the length of the longest caption, or 1 if there are
        no captions.
        """
        rows: list[list[int]] = []
        if captions:  # transformers raises IndexError for an empty list
            options = {"truncation": True, "split_special_tokens": True, "return_attention_mask": False}
            rows = self.inner(captions, max_length=self.context_length, padding=False, **options)["input_ids"]
        rows = [self._ended(row) for row in rows]
        width = self.context_length if self._pads_to_context else max(map(len, rows), default=1)
        padded = [row + [PADDING] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)

    def _ended(self, row: Sequence[int]) -> list[int]:
        """Return a caption's ids (at least one), with EOS at the end if it is required."""
        ids = list(row)
        if self._last_id is not None and (not ids or ids[-1] != self._last_id):
            ids = [*ids[: self.context_length - 1], self._last_id]
        if not ids:  # a caption without known characters, from a tokenizer without special tokens
            ids = [self.inner.unk_token_id or 0]
        return ids

    def save(self, folder: Path | str) -> None:
        save_tokenizer(self.inner, folder)


@dataclass(frozen=True, kw_only=True)
class PretrainedTextEncoder:
    """A text encoder with float32 weights, and its tokenizer."""

    tower: PretrainedTextTower
    tokenizer: TextEncoderTokenizer


def locate_text_encoder(name: str, setting: str = "MODEL=hf:", weights: bool = True) -> Path:
    """Return the folder of a text encoder, downloading its files from the hub if needed; call on one rank only.

    Args:
        name: a folder, or a name on the hub.
        setting: text before the name in the setting that contains it, for messages.
        weights: whether to locate the weights as well.

    Raises:
        UserError: there is no such folder, and the files cannot be downloaded.
    """
    folder = Path(expand_user(name))
    if not folder.is_dir():
        folder = download(name, SMALL_FILES, setting)
        for pattern in WEIGHT_PATTERNS if weights else ():
            if any(download(name, [pattern], setting).glob(pattern)):
                break
    return folder.resolve()


def open_text_encoder(
    folder: Path, pooling: Pooling | None = None, context_length: int | None = None
) -> PretrainedTextEncoder:
    """Load a text encoder from a folder, without running code from the folder.

    Args:
        folder: folder with the encoder's files.
        pooling: pooling of the hidden states; by default, the one in the folder's sentence-transformers config.
        context_length: maximum number of tokens per caption; by default, the smallest limit in the folder's configs, or
            1,000,000 if they set none.

    Raises:
        UserError: neither `pooling` nor the folder gives a supported pooling; the encoder takes fewer tokens than
            `context_length`; the encoder, its weights or its tokenizer are missing or unsupported; or the pooling is
            `eos`, but the tokenizer has neither an EOS nor a SEP token.
    """
    chosen = pooling or _read_pooling(folder, "--pooling")
    tower = PretrainedTextTower(_load_trunk(folder), chosen)
    vocabulary = tower.trunk.get_input_embeddings().num_embeddings
    inner = load_tokenizer(folder, vocabulary)
    length = context_length or _context_length(folder, inner, tower.trunk)
    check_length(length, tower.trunk, "--context-length", str(folder))
    tokenizer = TextEncoderTokenizer(inner, length, chosen == "eos")
    return PretrainedTextEncoder(tower=tower, tokenizer=tokenizer)


class TextEncoderSource:
    """The pretrained text encoder of a model that is built from the config.

    Args:
        config: the text tower's config.
        folder: folder with the encoder's files, or a folder that `save` wrote, which contains no weights.

    Raises:
        UserError: neither the config nor the folder gives a supported pooling.
    """

    def __init__(self, config: TextConfig, folder: Path) -> None:
        self.folder = folder
        self.pooling: Pooling = config.pooling or _read_pooling(folder, "model.text.pooling")
        self._config = config

    def tokenizer(self) -> TextEncoderTokenizer:
        """Return the encoder's tokenizer, which pads captions to `model.text.context_length`.

        Raises:
            UserError: the encoder cannot be built; the tokenizer is missing or does not match it; the pooling is `eos`,
                but the tokenizer has neither an EOS nor a SEP token; or `model.text.context_length` exceeds the
                encoder's number of positions.
        """
        with torch.device("meta"):
            trunk = _new_trunk(self.folder)
        length = self._config.resolved_context_length()
        check_length(length, trunk, "model.text.context_length", self._config.pretrained)
        inner = load_tokenizer(self.folder, trunk.get_input_embeddings().num_embeddings)
        return TextEncoderTokenizer(inner, length, self.pooling == "eos", pads_to_context=True)

    def build(self, embed_dim: int, weights: bool) -> PretrainedTextTower:
        """Build the text tower with a random projection and, unless `weights` is true, a randomly initialized encoder.

        Raises:
            UserError: the encoder cannot be built, or its weights are missing or do not match its config.
        """
        trunk = _load_trunk(self.folder) if weights else _new_trunk(self.folder)
        use_static_masks(trunk)
        projection = new_projection(trunk.config.hidden_size, embed_dim, self._config.projection)
        return PretrainedTextTower(trunk, self.pooling, projection)

    def save(self, folder: Path) -> None:
        """Save the files that another `TextEncoderSource` needs, except the weights, to a new folder."""
        folder.mkdir()
        save_small_files(self.folder, folder)
        (folder / _POOLING_FILE).write_text(json.dumps({"pooling": self.pooling}), encoding="utf-8")


def _read_pooling(folder: Path, option: str) -> Pooling:
    """Return the pooling that `TextEncoderSource.save` or sentence-transformers wrote; `option` is for messages.

    Raises UserError if neither wrote its file to the folder, if a file cannot be read, or if sentence-transformers'
    pooling or another of its modules is not supported.
    """
    fix = f"set {option} to one of {', '.join(POOLINGS)}"
    if (folder / _POOLING_FILE).is_file():
        saved: Pooling = read_json(folder / _POOLING_FILE)["pooling"]
        return saved
    modules = folder / "modules.json"
    if not modules.is_file():
        raise UserError(f"{folder} contains no modules.json, in which sentence-transformers stores the pooling: {fix}.")
    with explained(f"The pooling in {modules} cannot be read", fix):
        config: dict[str, Any] = {}
        for module in json.loads(modules.read_text(encoding="utf-8")):
            kind = module["type"].rpartition(".")[2]
            if kind not in _MODULES:
                raise UserError(
                    f"{folder} contains the module {kind} ({module['path']}), which is not supported. To use the "
                    f"encoder without it, {fix}."
                )
            if kind == "Pooling":
                config = read_json(folder / module["path"] / "config.json")
        modes = _pooling_modes(config)
        if len(modes) != 1 or modes[0] not in _POOLING_OF_SENTENCE_TRANSFORMERS:
            raise UserError(
                f"{folder} pools with {', '.join(modes) or 'an unknown mode'}, which is not supported: {fix}."
            )
        return _POOLING_OF_SENTENCE_TRANSFORMERS[modes[0]]


def _pooling_modes(config: Mapping[str, Any]) -> list[str]:
    """Return the pooling modes in a Pooling module's config, in the format of any sentence-transformers version."""
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        return [modes] if isinstance(modes, str) else list(modes)
    earlier = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return [_EARLIER_MODES.get(name, name) for name in earlier]


def _read_config(folder: Path) -> tuple[Any, Any]:
    """Return an encoder's config and the transformers class that builds the encoder, without a decoder.

    Raises UserError if the model also encodes images, or if its encoder cannot be loaded without its decoder.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if hasattr(config, "vision_config"):
        raise UserError(
            f"The model in {folder} encodes images too: use a text encoder or, if it is a dual encoder such as CLIP, "
            "pass it as model.pretrained instead of model.text.pretrained (in a run), or without `hf:` (as MODEL of "
            "`neuclip-ds embed`)."
        )
    has_text_encoder = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    if config.is_encoder_decoder and not has_text_encoder:
        raise UserError(
            f"{folder} contains an encoder and a decoder, and transformers cannot load its encoder separately: use a "
            "text encoder without a decoder."
        )
    return config, AutoModelForTextEncoding if has_text_encoder else AutoModel


def _new_trunk(folder: Path) -> Any:
    """Build the encoder in a folder with random weights, and with the same modules as `_load_trunk`."""
    with explained(f"transformers cannot build the text encoder in {folder}", "choose another model"):
        config, model_class = _read_config(folder)
        trunk = model_class.from_config(config, trust_remote_code=False, dtype=torch.float32)
    return _only_hidden_states(trunk)


def _load_trunk(folder: Path) -> Any:
    """Load the encoder, without the decoder of an encoder-decoder model and without BERT's pooler."""
    if first_file(folder, WEIGHTS) is None:
        raise UserError(f"{folder} contains no weights; put {WEIGHTS[0]} (or pytorch_model.bin) there.")
    refuse_adapter(folder)
    logging.disable_progress_bar()  # one bar per rank would flood the log
    with explained(
        f"transformers cannot load a text encoder from {folder}", "download its files again, or choose another model"
    ):
        config, model_class = _read_config(folder)
        trunk, info = model_class.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            weights_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    raise_on_mismatch(str(folder), missing, [], [])
    return _only_hidden_states(trunk)


def _only_hidden_states(trunk: Any) -> Any:
    """Return an encoder without unused parts: BERT's pooler, the cache of decoders, and the module around T5's encoder.

    The encoder is changed in place.
    """
    if getattr(trunk, "shared", None) is not None:
        trunk = trunk.get_encoder()  # the module around it has the token embeddings under a second name
    if getattr(trunk, "pooler", None) is not None:
        trunk.pooler = None  # not used, and often absent from the weights
    trunk.config.use_cache = False
    return trunk


def _context_length(folder: Path, tokenizer: Any, trunk: Any) -> int:
    """Return the maximum number of tokens: the smallest limit set by the folder's configs or the trunk's positions."""
    limits = [_NO_LIMIT, int(min(tokenizer.model_max_length, _NO_LIMIT))]
    sentence_config = folder / "sentence_bert_config.json"
    if sentence_config.is_file():
        limits.append(int(read_json(sentence_config).get("max_seq_length") or _NO_LIMIT))
    return min(*limits, position_count(trunk))


def check_length(length: int, trunk: Any, option: str, name: str) -> None:
    """Raise UserError, naming an option and an encoder, if the encoder takes fewer than `length` tokens."""
    limit = position_count(trunk)
    if length > limit:
        raise UserError(
            f"{option}={length} is more than the {limit} tokens that {name} takes: set it to at most {limit}."
        )


def position_count(trunk: Any) -> int:
    """Return the number of tokens for which an encoder has positions, or 1,000,000 if its config sets no limit."""
    positions = getattr(trunk.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return _NO_LIMIT
    embeddings = getattr(getattr(trunk, "embeddings", None), "position_embeddings", None)
    unused = getattr(embeddings, "padding_idx", None)  # RoBERTa's positions start after it
    return positions if unused is None else positions - unused - 1
