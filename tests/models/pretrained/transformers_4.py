"""Run programs with transformers 4.57 in another environment, whose python NEUCLIP_TRANSFORMERS_4_PYTHON names."""

import os
import subprocess

import pytest

PYTHON = os.environ.get("NEUCLIP_TRANSFORMERS_4_PYTHON", "")

needs_transformers_4 = pytest.mark.skipif(
    not PYTHON, reason="NEUCLIP_TRANSFORMERS_4_PYTHON names no python of an environment with transformers 4.57"
)


def run_transformers_4(program: str, *arguments: str, text: str = "") -> str:
    """Run a python program there, with `text` as its standard input, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, "-c", program, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
