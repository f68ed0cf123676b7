"""JSON-lines files with a `step` in every record, which a resumed run truncates and continues."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def step_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, record) of every complete line; lines that a crash has corrupted are skipped with a warning."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return  # the writer was killed while writing it
            try:
                record = json.loads(line)
                record["step"]
            except (ValueError, TypeError, KeyError):
                logger.warning("%s: line %d is not a record of a step and is skipped", path, number)
                continue
            yield line, record


def drop_from(path: Path, first_step: int) -> None:
    """Drop the records of step >= first_step, replacing the file atomically."""
    partial = path.with_suffix(".jsonl.partial")
    with partial.open("w", encoding="utf-8", newline="\n") as kept:
        kept.writelines(line for line, record in step_records(path) if record["step"] < first_step)
        kept.flush()
        os.fsync(kept.fileno())
    partial.replace(path)
