"""Test what each rank logs to the console and to log.txt, including messages of other libraries."""

import logging
import warnings

import pytest

from neuclip_ds.reporting import log
from neuclip_ds.reporting.log import configure_logging

ours = logging.getLogger("neuclip_ds.training.trainer")
pytestmark = pytest.mark.usefixtures("restored_logging")


@pytest.fixture
def restored_logging():
    loggers = [logging.getLogger(name) for name in (None, "neuclip_ds", "transformers", "DeepSpeed")]
    for handler in list(loggers[0].handlers):
        if handler.name == log.__name__:  # of a test that ran a command in this process
            loggers[0].removeHandler(handler)
    before = [(logger.level, list(logger.handlers), list(logger.filters)) for logger in loggers]
    yield
    for logger, (level, handlers, filters) in zip(loggers, before, strict=True):
        new_handlers = [handler for handler in logger.handlers if handler not in handlers]
        for handler in new_handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logger.filters[:] = filters
    logging.captureWarnings(False)


def test_rank_zero_writes_console_and_file_once_however_often_configured(capsys, tmp_path):
    file = tmp_path / "runs" / "x" / "log.txt"
    configure_logging(0, file)
    ours.info("before")
    for _ in range(3):
        configure_logging(0, file)
    ours.info("hello")
    for text in (capsys.readouterr().err, file.read_text()):
        lines = [line for line in text.splitlines() if line]  # a library's progress bar may end with a blank line here
        assert [line.split()[-1] for line in lines] == ["before", "hello"]


def test_messages_before_the_file_is_known_are_written_to_it(capsys, tmp_path):
    configure_logging(0)
    ours.info("first")
    configure_logging(0)
    ours.info("second")
    configure_logging(0, tmp_path / "log.txt")
    for text in (capsys.readouterr().err, (tmp_path / "log.txt").read_text()):
        assert [line.split()[-1] for line in text.splitlines()] == ["first", "second"]


def test_other_ranks_log_warnings_only_with_their_rank(capsys, tmp_path):
    configure_logging(3, tmp_path / "log.txt")
    ours.info("quiet")
    ours.warning("trouble")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[rank 3] ")
    assert line.endswith(" WARNING trouble")
    assert not (tmp_path / "log.txt").exists()


def test_other_libraries_log_as_before_after_a_run(monkeypatch, tmp_path):
    deepspeed = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(deepspeed, "filters", [])
    with log.restored_logging():
        configure_logging(0, tmp_path / "log.txt")
        assert deepspeed.filters
    assert not deepspeed.filters


def test_other_libraries_log_warnings_only(capsys, monkeypatch):
    configure_logging(0)
    logging.getLogger("DeepSpeed").setLevel(logging.INFO)  # as importing some versions of DeepSpeed does
    for name in ("DeepSpeed", "transformers.modeling_utils", "httpx"):
        # an imported library may have turned off propagation and set its own handler
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        logging.getLogger(name).info("chatter of %s", name)
        logging.getLogger(name).warning("trouble in %s", name)
    logged = capsys.readouterr().err
    assert "chatter" not in logged
    assert logged.count("trouble") == 3


def test_python_warnings_are_logged(capsys, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # so that the next capture replaces this context's showwarning
        configure_logging(0, tmp_path / "log.txt")
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "UserWarning: mind the gap" in (tmp_path / "log.txt").read_text()
    assert "UserWarning: mind the gap" in capsys.readouterr().err
