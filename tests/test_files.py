"""Files and folders appear whole or not at all, and what killed writers have left goes."""

from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.files import atomic_write, claimed, new_folder


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(UserError, match="is not an empty folder"), new_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_folder_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the other half"), new_folder(tmp_path / "out") as folder:
        (folder / "half").touch()
        raise UserError("the other half is missing")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_the_disk_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(UserError, match=r"file/out cannot be written \(.*\); choose another")
    with refused, new_folder(tmp_path / "file/out"):
        pass


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """Neither what a living writer holds nor a stranger's hidden file is theirs."""
    (tmp_path / ".out.0123abcd.partial").mkdir()
    (tmp_path / ".out.4567abcd.partial").mkdir()
    (tmp_path / ".out.json.12").touch()
    for stranger in (".out.cfg", ".out.json.bak"):
        (tmp_path / stranger).touch()
    with claimed(tmp_path / ".out.4567abcd.partial"):
        with new_folder(tmp_path / "out") as folder:
            (folder / "x").touch()
        with atomic_write(tmp_path / "out.json") as path:
            path.write_text("{}")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out", "out.json", ".out.4567abcd.partial", ".out.cfg", ".out.json.bak"}


@pytest.mark.parametrize("name", ["[0]", "*", "**"])
def test_names_are_no_patterns(tmp_path: Path, name: str) -> None:
    """What killed writers of this name have left is removed, and nothing of another name."""
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
