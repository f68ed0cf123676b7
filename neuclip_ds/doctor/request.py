"""What is asked of an examination."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuclip_ds.config import Config


@dataclass(frozen=True)
class Request:
    """What the machines are for, and what of them is examined."""

    config: Config  # of the run
    out: Path  # folder that all nodes share, for the outputs of processes and the smoke runs
    engines: Sequence[str]  # DeepSpeed files of the smoke runs
    shards: str = ""  # whose read speed is measured; none by default
    limit: float = 300.0  # seconds that a process may take
    quick: bool = False  # whether only to look, without measuring
    accelerator: str | None = None  # DS_ACCELERATOR of the processes that measure; None lets DeepSpeed choose
