"""The default shard cache: a folder that no other user can write to."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.errors import UserError
from neuclip_ds.files import private_folder

SIZE = 1000


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that anyone can write to."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_each_user_has_a_folder(temporary: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder()
    finally:
        os.umask(before)
    assert folder == temporary / f"neuclip_ds_shards-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder() == folder
    (stored := temporary / "0.tar").write_bytes(bytes(SIZE))
    assert ShardCache(folder, SIZE).path(stored.as_uri(), SIZE).read_bytes() == bytes(SIZE)


@pytest.mark.parametrize("planted", ["link", "dangling", "file", "group", "world", "owner"])
def test_a_folder_of_others_is_refused(planted: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary / f"neuclip_ds_shards-{os.getuid()}"
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if planted in ("link", "dangling"):
        folder.symlink_to(elsewhere if planted == "link" else temporary / "absent")
    elif planted == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod({"group": 0o770, "world": 0o707, "owner": 0o700}[planted])
    if planted == "owner" and os.getuid() == 0:
        os.chown(folder, 65534, 65534)
    elif planted == "owner":
        uid = os.getuid()
        folder.rename(temporary / f"neuclip_ds_shards-{uid + 1}")
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(UserError, match=r"^The shard cache .* only you can write to; set data.cache_dir\.$"):
        private_folder()
    assert not any(elsewhere.iterdir())
