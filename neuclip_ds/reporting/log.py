"""Configure logging: rank 0 logs to the console and to log.txt; the other ranks log only warnings and errors."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from neuclip_ds.errors import redact

_LAYOUT = "%(asctime)s %(levelname)s %(message)s"
_WITH_HANDLERS = ("DeepSpeed", "transformers")  # loggers to which libraries add handlers


def configure_logging(rank: int, log_file: Path | None = None) -> None:
    """Send log messages and Python warnings to stderr and, on rank 0, append them to `log_file`.

    Rank 0 logs INFO for this package and WARNING for other packages; other ranks log WARNING, as `[rank r] ...`.
    Without `log_file`, rank 0 also keeps the messages in memory; the next call with a `log_file` writes them there.
    Each call replaces the handlers of the previous one.
    """
    root = logging.getLogger()
    previous_handlers = _own_handlers(root)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if rank == 0 and log_file is None:
        # keeps the messages until a file is set
        handlers.append(MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, flushOnClose=False))
    elif rank == 0 and log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
    layout = _LAYOUT if rank == 0 else f"[rank {rank}] {_LAYOUT}"
    for handler in handlers:
        handler.name = __name__
        handler.setFormatter(_Redacting(layout))
    for handler in previous_handlers:
        if isinstance(handler, MemoryHandler):
            handler.setTarget(handlers[-1])
            handler.flush()
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)

    # levels, and the handlers and warnings of other libraries
    root.setLevel(logging.WARNING)
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("transformers").setLevel(logging.WARNING)
    for name in _WITH_HANDLERS:  # their own handlers would print messages twice, and not to log.txt
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # a filter, not a level: DeepSpeed sets its logger's level when it is imported, perhaps after this call
    logging.getLogger("DeepSpeed").addFilter(_is_warning)
    logging.captureWarnings(True)
    # DeepSpeed calls collectives by names that newer versions of torch deprecate
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.raiseExceptions = False  # a full disk would print a traceback for each line


@contextmanager
def restored_logging() -> Iterator[None]:
    """Undo, at the end of the block, the changes that `configure_logging` made in it.

    Without this, a notebook would lose its INFO messages, and its warnings would be added to the log of the last run.
    Only the filter for one of torch's deprecation warnings stays. If a command configured logging before the block,
    nothing is undone.
    """
    root = logging.getLogger()
    if _own_handlers(root):  # of a command, which configured logging before the block
        yield
        return
    levels = {name: logging.getLogger(name).level for name in ("root", "neuclip_ds", "transformers")}
    others = [logging.getLogger(name) for name in _WITH_HANDLERS]
    states = [(list(logger.handlers), list(logger.filters), logger.propagate) for logger in others]
    show_warning = warnings.showwarning
    raise_exceptions = logging.raiseExceptions
    try:
        yield
    finally:
        for handler in _own_handlers(root):
            root.removeHandler(handler)
            handler.close()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for logger, (handlers, filters, propagate) in zip(others, states, strict=True):
            logger.handlers[:] = handlers
            logger.filters[:] = filters
            logger.propagate = propagate
        if warnings.showwarning is not show_warning:
            logging.captureWarnings(False)
        logging.raiseExceptions = raise_exceptions


def _own_handlers(root: logging.Logger) -> list[logging.Handler]:
    return [handler for handler in root.handlers if handler.name == __name__]


class _Redacting(logging.Formatter):
    """Formatter that removes secrets from messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING
