"""Check that messages keep the cause of an error, and advise to raise a limit of the machine if it is the cause."""

import errno
import importlib.metadata
import os
import pickle
import re
import signal
from pathlib import Path

import pytest

from neuclip_ds.errors import Interrupted, UserError, explained, install_command
from neuclip_ds.files import explain_disk


def message(error: Exception) -> str:
    with pytest.raises(UserError) as caught, explained("The file cannot be read", "download it again"):
        raise error
    return str(caught.value)


def test_the_cause_is_kept_wherever_a_library_puts_it() -> None:
    assert message(ValueError("Cannot open it. Row 7: no number.\n  Column 3\n")) == (
        "The file cannot be read (Cannot open it. Row 7: no number. Column 3); download it again."
    )
    long = message(ValueError("Cannot open it. " + "details " * 1000 + "Row 7 is broken"))
    assert "Cannot open it" in long and "Row 7 is broken" in long and len(long) < 700
    assert "(KeyError)" in message(KeyError()) and "ZeroDivisionError" in message(ZeroDivisionError())


def test_a_process_pool_can_send_an_interruption_to_its_parent() -> None:
    interrupted = Interrupted(signal.SIGTERM, " after step 3")
    sent = pickle.loads(pickle.dumps(interrupted))
    assert (sent.number, sent.code) == (interrupted.number, interrupted.code)
    assert str(sent) == str(interrupted)


def test_a_low_limit_replaces_other_advice(tmp_path: Path) -> None:
    too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "captions.txt")
    texts = [message(too_many), message(RuntimeError("received 0 items of ancdata"))]
    with pytest.raises(UserError) as caught, explain_disk(tmp_path):
        raise too_many
    for text in [*texts, str(caught.value)]:
        assert "ulimit -n" in text and "download it again" not in text and "Make room" not in text
    assert "TMPDIR" in message(OSError("AF_UNIX path too long"))
    with pytest.raises(UserError, match="Make room"), explain_disk(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_extras_of_a_clone_that_is_not_installed_have_a_command_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("lora") == "pip install 'neuclip_ds[lora]'"

    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    command = install_command("lora")
    match = re.fullmatch(r"pip install -e '(.+)\[lora\]'", command)
    assert match is not None and (Path(match[1]) / "pyproject.toml").is_file()
