"""Processes whose end, however bad, is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor import examination, processes, worker
from neuclip_ds.doctor.finding import fine
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.table import CHECKS, Scope
from neuclip_ds.recipe import parse


def request(tmp_path: Path, limit: float = 60) -> Request:
    return Request(parse(["demo"]).config, tmp_path, [], limit=limit)


def test_a_program_that_fails(tmp_path: Path) -> None:
    output = tmp_path / "there" / "output.txt"
    failure = processes.run(request(tmp_path), ["train", "dem"], {}, output)
    assert failure is not None and failure.startswith("exit code 2: error: No recipe or file dem")
    assert "did you mean demo" in output.read_text()
    lines: list[str] = []
    assert processes.run(request(tmp_path), ["train", "demo", "--print-config"], {}, output, lines.append) is None
    assert "data:\n" in lines


def test_a_program_that_hangs(tmp_path: Path) -> None:
    failure = processes.run(request(tmp_path, limit=0.2), ["train", "demo"], processes.alone(), tmp_path / "output")
    assert failure == "not ended after 0.2 s (--limit)"


def test_a_crash_belongs_to_the_check_that_had_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [check for check in CHECKS if check.scope is Scope.RANK][:2]

    def run(request: Request, arguments: object, variables: object, output: Path, on_line: object) -> str:
        printed: list[str] = ["noise\n"]
        monkeypatch.setattr(worker.sys.stdout, "write", printed.append)
        worker._print({"begins": checks[0].name})
        worker._print(worker.asdict(fine("good")))
        worker._print({"begins": checks[1].name})
        monkeypatch.undo()
        for line in "".join(printed).splitlines():
            on_line(line)  # type: ignore[operator]
        return "exit code -11: killed (no error reported)"

    monkeypatch.setattr(processes, "run", run)
    good, crashed = examination._in_process(Scope.RANK, request(tmp_path), ["doctor"], Communicator())
    assert (good.check, good.message, good.level) == (checks[0].name, "good", "fine")
    assert crashed.check == checks[1].name and crashed.level == "wrong"
    assert "exit code -11" in crashed.message and "rank_0.txt" in crashed.fix
