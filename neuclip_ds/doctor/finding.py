"""What a check has found, and whether it can be left so."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["wrong", "warning", "fine"]


@dataclass(frozen=True)
class Finding:
    """What one check has found in one place."""

    level: Level
    message: str  # what was found; empty where figures or facts say it
    fix: str = ""  # what to do about it
    figures: Mapping[str, float] = field(default_factory=dict)  # name with unit -> what was measured, more is better
    facts: Mapping[str, str] = field(default_factory=dict)  # name -> what should be equal on all nodes
    check: str = ""  # by whom; set where the check is run
    where: str = ""  # node, or rank and node; likewise


def fine(message: str = "", figures: Mapping[str, float] = {}, facts: Mapping[str, str] = {}) -> Finding:
    """Return a finding that needs nothing."""
    return Finding("fine", message, figures=figures, facts=facts)


def warning(message: str, fix: str) -> Finding:
    """Return a finding that a run survives, at some cost."""
    return Finding("warning", message, fix)


def wrong(message: str, fix: str = "") -> Finding:
    """Return a finding that stops a run or makes it compute something else."""
    return Finding("wrong", message, fix)
