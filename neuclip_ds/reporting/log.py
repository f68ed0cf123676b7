"""Logging: rank 0 logs to the console and to log.txt, the other ranks log only warnings."""

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path

import rich
from rich.logging import RichHandler

from neuclip_ds.redaction import redact

PLAIN = "%(asctime)s %(levelname)s %(message)s"
IN_BAR = "in_bar"  # attribute of records that a terminal shows as a progress bar, and only files as lines


def configure_logging(rank: int, log_file: Path | None = None) -> None:
    """Send log messages and Python warnings to stderr, and on rank 0 to `log_file` as well.

    Rank 0 logs INFO of this package and WARNING of all others; other ranks log WARNING only, as `[rank r] ...`.
    A second call replaces the handlers of the first. What rank 0 logs before a call with a file goes there too.

    Args:
        rank: of this process.
        log_file: appended to, its folder created if absent; ignored on ranks other than 0.
    """
    handlers: list[logging.Handler]
    if rank == 0:
        handlers = [_console_handler(), _held() if log_file is None else _file_handler(log_file)]
    else:
        handlers = [_plain(logging.StreamHandler(sys.stderr), f"[rank {rank}] {PLAIN}")]
    _replace_handlers(handlers)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("transformers").setLevel(logging.WARNING)
    for name in ("DeepSpeed", "transformers"):  # their own handlers would print twice, and not to log.txt
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # a filter, not a level: DeepSpeed sets its logger's level when it is imported, perhaps after this call
    logging.getLogger("DeepSpeed").addFilter(_is_warning)
    logging.captureWarnings(True)


def _console_handler() -> logging.Handler:
    """Return rich's handler on a terminal, whose console the progress bar shares so that messages appear above it."""
    rich.reconfigure(stderr=True)
    if not sys.stderr.isatty():
        return _plain(logging.StreamHandler(sys.stderr), PLAIN)
    handler = RichHandler(console=rich.get_console(), show_path=False, log_time_format="%H:%M:%S")
    handler.setFormatter(_Redacting("%(message)s"))
    handler.addFilter(lambda record: not getattr(record, IN_BAR, False))
    return handler


def _plain(handler: logging.Handler, layout: str) -> logging.Handler:
    handler.setFormatter(_Redacting(layout))
    return handler


class _Redacting(logging.Formatter):
    """Formats messages, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _held() -> MemoryHandler:
    """Return a handler that keeps everything until there is a file."""
    return MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, flushOnClose=False)


def _file_handler(path: Path) -> logging.Handler:
    """Return the handler of a file, after it has received what was kept for one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _plain(_LogFile(path, encoding="utf-8"), PLAIN)
    for held in logging.getLogger().handlers:
        if held.name == __name__ and isinstance(held, MemoryHandler):
            held.setTarget(handler)
            held.flush()
    return handler


class _LogFile(logging.FileHandler):
    """A log file that stops at a full disk or a vanished folder instead of printing a traceback for each line."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            print(f"warning: {self.baseFilename} cannot be written; lines are missing there", file=sys.stderr)
        self._failed = True


def _replace_handlers(handlers: list[logging.Handler]) -> None:
    """Put `handlers` on the root logger in place of those of an earlier call, which are found by their name."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == __name__]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler.name = __name__
        root.addHandler(handler)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING
