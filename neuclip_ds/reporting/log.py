"""Where log messages go: rank 0 speaks on the console and in log.txt, the others only when something is wrong."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import rich
from rich.logging import RichHandler

PLAIN = "%(asctime)s %(levelname)s %(message)s"


def configure_logging(rank: int, log_file: Path | None = None) -> None:
    """Sends log messages and Python warnings to stderr, and on rank 0 to `log_file` as well.

    Rank 0 tells INFO of this package and WARNING of all others; other ranks tell WARNING only, as `[rank r] ...`.
    A second call replaces what the first has set up.

    Args:
        rank: of this process.
        log_file: appended to, its folder created if need be; ignored on ranks other than 0.
    """
    handlers: list[logging.Handler]
    if rank == 0:
        handlers = [_console_handler()]
        if log_file is not None:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_plain(logging.FileHandler(log_file, encoding="utf-8"), PLAIN))
    else:
        handlers = [_plain(logging.StreamHandler(sys.stderr), f"[rank {rank}] {PLAIN}")]
    _replace_handlers(handlers)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("transformers").setLevel(logging.WARNING)
    for name in ("DeepSpeed", "transformers"):  # which bring handlers of their own: one voice, and in log.txt as well
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # a filter and not a level, for DeepSpeed sets its logger's level when it is imported, perhaps after this
    logging.getLogger("DeepSpeed").addFilter(_is_warning)
    logging.captureWarnings(True)


def _console_handler() -> logging.Handler:
    """rich's on a terminal, on the console that a progress bar shares so that messages appear above the bar."""
    rich.reconfigure(stderr=True)
    if not sys.stderr.isatty():
        return _plain(logging.StreamHandler(sys.stderr), PLAIN)
    return RichHandler(console=rich.get_console(), show_path=False, log_time_format="%H:%M:%S")


def _plain(handler: logging.Handler, layout: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(layout))
    return handler


def _replace_handlers(handlers: list[logging.Handler]) -> None:
    """Puts `handlers` on the root logger in place of those of an earlier call, known by their name."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == __name__]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler.name = __name__
        root.addHandler(handler)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING
