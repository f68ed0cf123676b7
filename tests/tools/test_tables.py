"""The tables on the pages equal the recorded numbers, and numbers from older code are recognized."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import data_files
import pytest
from data_files import ROOT, UNKNOWN, DataFile, Origin, caption, read_data
from record_measurement import measured_again
from write_tables import TABLES, VALUES, all_pages, older, origins, with_tables

from neuclip_ds.errors import UserError

ORIGIN = Origin(name="mine.csv", device="CPU", hardware="a CPU", date="2026-01-02", commit=UNKNOWN, code=["loss.py"])


def test_the_tables_on_the_pages_equal_the_records() -> None:
    """If this fails, run `python tools/write_tables.py`."""
    pages = list(all_pages())
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text == with_tables(text), page
    texts = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in texts] == []
    assert [name for name in VALUES if f"<!-- value: {name} -->" not in texts] == []


def test_records_name_code_that_exists() -> None:
    for origin in origins():
        assert [path for path in origin.code if not (ROOT / path).exists()] == [], origin.name


def test_numbers_are_older_if_the_code_has_changed_in_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("git"):
        pytest.skip("needs git")
    monkeypatch.setattr(data_files, "ROOT", tmp_path)

    def commit(source: str, date: str) -> None:
        (tmp_path / "loss.py").write_text(source, encoding="utf-8")
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "add", "loss.py"], cwd=tmp_path, check=True)
        command = ["git", *identity, "commit", "-q", "-m", "Change", f"--date={date}T12:00:00"]
        subprocess.run(command, cwd=tmp_path, check=True, env={"GIT_COMMITTER_DATE": f"{date}T12:00:00"})

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit("x = 1\nprint(f'there is {x}')\n", "2026-01-01")
    first = data_files.commit()
    commit('"""A module."""\n\nx = 1  # one\nprint(f"x is {x}.")\n', "2026-01-03")
    assert older([ORIGIN, replace(ORIGIN, commit=first)]) == []
    commit("x = 2\n", "2026-01-04")
    assert older([ORIGIN, replace(ORIGIN, commit=first)]) == ["mine.csv", "mine.csv"]
    assert older([replace(ORIGIN, commit=data_files.commit()), replace(ORIGIN, date="2026-01-05")]) == []


def test_a_caption_marks_older_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "OLDER_CODE", tmp_path / "older_code.txt")
    data_files.OLDER_CODE.write_text("", encoding="utf-8")
    assert data_files.OLDER not in caption(ORIGIN)
    data_files.OLDER_CODE.write_text("mine.csv\n", encoding="utf-8")
    assert data_files.OLDER in caption(ORIGIN)


def test_a_measurement_is_recorded_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MEASUREMENTS", tmp_path)
    file = DataFile(title="Speed", origin=ORIGIN, command="", notes=["a note"], columns=["loss", "ms"], rows=[])
    printed = "| ms | loss | ranks |\n|---|---|---|\n| 1,200.5 | openclip | 1 |\n"
    again = measured_again(file, [sys.executable, "-c", f"print({printed!r})"])
    data_files.write_data(again)
    read = read_data("mine")
    assert read.rows == [{"loss": "openclip", "ms": "1200.5"}]
    assert (read.title, read.notes, read.origin) == ("Speed", ["a note"], again.origin)
    assert read.origin.date > ORIGIN.date
    with pytest.raises(UserError, match="no table with the columns loss, ms"):
        measured_again(file, [sys.executable, "-c", "print('| loss |')"])
    with pytest.raises(UserError, match="ended with exit code 3"):
        measured_again(file, [sys.executable, "-c", "raise SystemExit(3)"])


def test_a_gpu_that_is_not_listed_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for name, device in {"NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "NVIDIA A100-SXM4-80GB"}.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        assert data_files.this_machine()[0] == device
