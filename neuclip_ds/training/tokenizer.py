"""The tokenizer of a run whose model names none: a BPE, trained once on the captions of its data."""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from neuclip_ds.config import TextConfig
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.models.tokenizer import train_bpe
from neuclip_ds.training.run_folder import TOKENIZER

log = logging.getLogger(__name__)

_MADE_FROM = "made_from.json"  # in the tokenizer's folder


def place_tokenizer(
    text: TextConfig,
    data: dict[str, Any],
    captions: Callable[[], Iterable[str]],
    folder: Path,
    staged: Path,
    resumed: Path | None,
) -> Path:
    """Return the folder of a run's tokenizer; called on one rank.

    It is that of the checkpoint that the run resumes from, which has the same options. Without one, the tokenizer of
    an earlier start is used again if it was made from the same options and data, and is replaced otherwise.

    Args:
        text: vocabulary size and context length.
        data: identifies the captions.
        captions: gives the captions to train on.
        folder, staged: of the run, and of what is new in it.
        resumed: the checkpoint.

    Raises:
        UserError: no tokenizer can be trained.
    """
    kept, new = folder / TOKENIZER, staged / TOKENIZER
    if resumed is not None:
        return _restored(resumed / TOKENIZER, kept, new)
    made_from = {"vocab_size": text.vocab_size, "context_length": text.context_length, **data}
    if _made_from(kept) == made_from:
        return kept
    if kept.is_dir():
        log.info("%s was made from other options or data by a start without a checkpoint; it is replaced", kept)
    tokenizer = train_bpe(captions(), text.vocab_size, text.context_length)
    with explain_disk(new):
        tokenizer.save(new)
        (new / _MADE_FROM).write_text(json.dumps(made_from, indent=1), encoding="utf-8")
    return new


def _restored(saved: Path, kept: Path, new: Path) -> Path:
    """Return the folder of a checkpoint's tokenizer in the run, copied from the checkpoint where it is another."""
    if not saved.is_dir():  # of an earlier version, whose checkpoints held none
        return kept
    content, there = ({file.name: file.read_bytes() for file in place.glob("*")} for place in (saved, kept))
    if content == there:
        return kept
    with explain_disk(new):
        new.mkdir()
        for name, data in content.items():
            (new / name).write_bytes(data)
    return new


def _made_from(tokenizer: Path) -> dict[str, Any]:
    """Return what a tokenizer was made from; nothing if that is not known."""
    try:
        found = json.loads((tokenizer / _MADE_FROM).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
