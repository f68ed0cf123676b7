"""Random pairs for training programs: noise as pixels and tokens, and captions of realistic lengths."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarking.method_config import FULL
from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.planning.memory import StandInTokenizer

BATCHES = 4  # number of batches that a program repeats, so that it does not read the same memory in every step
EOS = 1  # EOS id of tokenizers that this project trains, and of random tokens
_SHORTEST = 3  # tokens: BOS, one token of text, EOS
_SPREAD = 0.5  # standard deviation of the logarithm of caption lengths
_TOKENS = 512  # vocabulary size assumed for a pretrained tokenizer that does not report one


def caption_lengths(caption_tokens: str, captions: int, context_length: int, generator: torch.Generator) -> Tensor:
    """Return int64 (captions,) numbers of tokens with BOS and EOS, between 3 and the context length.

    Args:
        caption_tokens: `full` for captions that fill the context; a number N for lognormal lengths with mean N and a
            standard deviation of 0.53 N; or a file with one length per line, from which lengths are drawn.
        captions: number of captions.
        context_length: largest length.
        generator: source of random numbers.

    Raises:
        UserError: `caption_tokens` is none of these, the file is empty, or N is not between 3 and the context length.
    """
    if caption_tokens == FULL:
        return torch.full((captions,), context_length)
    try:
        mean = float(caption_tokens)
    except ValueError:
        lengths = _read_lengths(Path(caption_tokens))
        rows = torch.randint(len(lengths), (captions,), generator=generator)
        drawn = lengths[rows]
    else:
        if not _SHORTEST <= mean <= context_length:
            raise UserError(
                f"--caption-tokens={caption_tokens} must be from {_SHORTEST} to the context length, {context_length}."
            )
        normal = torch.randn(captions, generator=generator)
        drawn = (mean * torch.exp(_SPREAD * normal - _SPREAD**2 / 2)).round().long()
    return drawn.clamp(_SHORTEST, context_length)


def check_caption_tokens(caption_tokens: str, config: Config) -> None:
    """Raise `UserError` if a config's model cannot read captions with these lengths; see `caption_lengths`."""
    caption_lengths(caption_tokens, 1, config.model.text.resolved_context_length(), torch.Generator())


def _read_lengths(path: Path) -> Tensor:
    try:
        lengths = [int(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        values = f"`{FULL}`, a mean number of tokens, or a file with one length per line"
        raise UserError(f"--caption-tokens={path} is not {values}: {error}") from error
    if not lengths:
        raise UserError(f"--caption-tokens={path} is an empty file; write one length per line.")
    return torch.tensor(lengths)


def random_tokens(
    caption_tokens: str, captions: int, tokenizer: ModelTokenizer | StandInTokenizer, generator: torch.Generator
) -> Tensor:
    """Return int64 (captions, T) ids: BOS, noise, EOS, and padding up to the context length T.

    Args:
        caption_tokens: lengths of the captions, as in `caption_lengths`.
        captions: number of captions.
        tokenizer: the tokenizer, whose special ids are used.
        generator: source of random numbers.

    Raises:
        UserError: `caption_tokens` is invalid.
    """
    context_length = tokenizer.context_length
    lengths = caption_lengths(caption_tokens, captions, context_length, generator)
    vocabulary = getattr(tokenizer, "vocab_size", _TOKENS)
    # CLIP's special tokens are the last two ids, and those of tokenizers that this project trains are the first two
    tokens = torch.randint(2, vocabulary - 2, (captions, context_length), generator=generator)
    eos = _special_id(tokenizer, "eos_id", EOS)
    positions = torch.arange(context_length)
    last = lengths[:, None] - 1
    tokens[:, 0] = _special_id(tokenizer, "bos_id", 0)
    tokens[positions == last] = eos
    tokens[positions > last] = _special_id(tokenizer, "pad_id", eos)
    return tokens


def _special_id(tokenizer: Any, name: str, default: int) -> int:
    value = getattr(tokenizer, name, None)
    return default if value is None else value


def seed_of_batch(number: int, rank: int, world_size: int) -> int:
    """Return the seed of a rank's part of a global batch, so that all programs train on the same captions."""
    return number * world_size + rank


def float_batches(config: Config, rows: int, caption_tokens: str, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches that a peer repeats: (b, 3, H, W) float32 pixels and (b, T) ids, pinned if there is a GPU.

    Args:
        config: the config of the run.
        rows: number b of pairs per rank.
        caption_tokens: lengths of the captions, as in `caption_lengths`.
        rank: this rank.
        ranks: number of ranks.
    """
    size = config.model.vision.resolved_image_size()
    tokenizer = StandInTokenizer(config.model.text)
    batches = []
    for number in range(BATCHES):
        generator = torch.Generator().manual_seed(seed_of_batch(number, rank, ranks))
        tokens = random_tokens(caption_tokens, rows, tokenizer, generator)
        pixels = torch.randn(rows, 3, size, size, generator=generator)
        if torch.cuda.is_available():
            tokens = tokens.pin_memory()
            pixels = pixels.pin_memory()
        batches.append((pixels, tokens))
    return batches
