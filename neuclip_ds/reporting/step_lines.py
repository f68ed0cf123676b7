"""Files of one JSON object a line, each with the `step` it belongs to, which a resumed run cuts and goes on with."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def step_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, record) of every whole line; lines that a crash has garbled are skipped with a warning."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return  # the writer was killed in the middle of it
            try:
                record = json.loads(line)
                record["step"]
            except (ValueError, TypeError, KeyError):
                logger.warning("%s: line %d is not a record of a step and is left out", path, number)
                continue
            yield line, record


def drop_from(path: Path, first_step: int) -> None:
    """Rewrites the file without records of step >= first_step; it is the old or the new one at any moment."""
    aside = path.with_suffix(".jsonl.partial")
    with aside.open("w", encoding="utf-8", newline="\n") as kept:
        kept.writelines(line for line, record in step_records(path) if record["step"] < first_step)
        kept.flush()
        os.fsync(kept.fileno())
    aside.replace(path)
