"""`neuclip-ds watch` as a program: it prints where its page is, serves it, and ends at Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from small_runs import environment


@pytest.mark.slow
def test_a_page_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    (tmp_path / "config.yaml").write_text("objective: {method: neuclip}\n")
    command = [sys.executable, "-m", "neuclip_ds", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            where = re.search(r"http://127\.0\.0\.1:\d+", program.stdout.readline())
            assert where is not None
            with urllib.request.urlopen(where[0]) as answer:
                assert 'aria-label="Training loss"' in answer.read().decode()
        finally:
            program.send_signal(signal.SIGINT)
        assert program.wait(30) == 130
