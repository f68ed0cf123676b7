"""Files and folders are written completely or not at all, and files left by killed writers are removed."""

from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.files import atomic_write, claimed, expand_user, new_folder, seen_from_here


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    """Test a folder that is not empty, a folder that cannot be created, and a writer that fails halfway."""
    (tmp_path / "file").touch()
    refusals = {
        tmp_path: "is not an empty folder",
        tmp_path / "file/out": "file/out cannot be written .*another",
    }
    for path, message in refusals.items():
        with pytest.raises(UserError, match=message), new_folder(path):
            pass
    with pytest.raises(UserError, match="the other half"), new_folder(tmp_path / "out") as folder:
        (folder / "half").touch()
        raise UserError("the other half is missing")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_left_by_killed_writers_are_removed(tmp_path: Path) -> None:
    """The temporary files of live writers and unrelated hidden files are kept."""
    (tmp_path / ".out.0123abcd.partial").mkdir()
    (tmp_path / ".out.4567abcd.partial").mkdir()
    (tmp_path / ".out.json.12").touch()
    strangers = {".out.cfg", ".out.json.bak", ".out.json.2026-backup", ".out.notes.partial"}
    for stranger in strangers:
        (tmp_path / stranger).touch()
    with claimed(tmp_path / ".out.4567abcd.partial"):
        with new_folder(tmp_path / "out") as folder:
            (folder / "x").touch()
        with atomic_write(tmp_path / "out.json") as path:
            path.write_text("{}")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out", "out.json", ".out.4567abcd.partial"} | strangers


@pytest.mark.parametrize("name", ["[0]", "*", "**"])
def test_names_with_wildcards_match_literally(tmp_path: Path, name: str) -> None:
    """Only temporary files left by killed writers of the same name are removed."""
    for number in (1, 2):
        (tmp_path / f".{name}.{number}").touch()
        (tmp_path / f".other.{number}").touch()
    (tmp_path / ".other.0123abcd.partial").mkdir()
    (tmp_path / f".{name}.0123abcd.partial").mkdir()
    with atomic_write(tmp_path / name) as path:
        path.touch()
    (tmp_path / name).unlink()
    with new_folder(tmp_path / name) as folder:
        (folder / "x").touch()
    assert {path.name for path in tmp_path.iterdir()} == {name, ".other.1", ".other.2", ".other.0123abcd.partial"}


def test_messages_show_paths_in_the_working_directory_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert seen_from_here(tmp_path / "runs" / "demo") == Path("runs/demo")
    assert seen_from_here(Path("runs/demo")) == Path("runs/demo")
    assert seen_from_here(Path("/elsewhere/demo")) == Path("/elsewhere/demo")


def test_home_folders_are_expanded_in_each_of_several_paths_but_not_in_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_user("~/a/0.tar::s3://b/~/c::~nosuchuser/d::e/~") == (
        "/home/me/a/0.tar::s3://b/~/c::~nosuchuser/d::e/~"
    )
