"""`deepspeed --num_gpus 8` without GPUs ends at once, with the fix; other launches do not ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import ROOT

from neuclip_ds.distributed import environment as module
from neuclip_ds.distributed.environment import has_gpu_devices, refuse_missing_gpus

CHECK = "from neuclip_ds.distributed.environment import refuse_missing_gpus as check; check({}); print('fine')"
# what the launcher is here: a program of that name, whose child's child is the rank
LAUNCHER = f"""#!{sys.executable}
import subprocess, sys
subprocess.run(["sh", "-c", '"$0" -c "$1"; true', sys.executable, sys.argv[-1]])
"""


def launched(folder: Path, *options: str) -> str:
    program = folder / "deepspeed"
    program.write_text(LAUNCHER)
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([program, *options, CHECK], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_num_gpus_is_read_from_the_launcher(tmp_path: Path) -> None:
    for options in (["--num_gpus", "8"], ["--num_gpus=8"]):
        assert "UserError: --num_gpus 8 asks for GPUs" in launched(tmp_path, *options)
    assert launched(tmp_path, "--num_accelerators", "8") == "fine\n"


def test_the_cpu_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_commands_above", lambda: iter([["deepspeed", "--num_gpus", "2"]]))
    refuse_missing_gpus({"DS_ACCELERATOR": "cpu"})
    with pytest.raises(module.UserError, match="deepspeed --num_accelerators 2"):
        refuse_missing_gpus({})


def test_another_program_s_option_is_not_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_commands_above", lambda: iter([["python", "mine.py", "--num_gpus", "2"]]))
    refuse_missing_gpus({})


def test_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DEVICE_FOLDER", tmp_path)
    (tmp_path / "null").touch()
    assert not has_gpu_devices()
    (tmp_path / "nvidia0").touch()
    assert has_gpu_devices()
