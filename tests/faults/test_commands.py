"""A manifest or list from others must not run commands here; what you type yourself runs."""

from pathlib import Path

import pytest
from small_runs import call, train
from tars import write_pairs

from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.manifest_file import write_shards
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError


@pytest.fixture
def command(tmp_path: Path) -> str:
    """A shard by a command that leaves a trace when it runs."""
    shard = write_pairs(tmp_path / "shards", [16]) / "00000.tar"
    return f"pipe:touch {tmp_path}/ran; cat {shard}"


def test_a_manifest_runs_no_command_unless_it_is_allowed(tmp_path: Path, command: str) -> None:
    manifest, cache = tmp_path / "m", f"--data.cache_dir={tmp_path}/cache"
    manifest.mkdir()
    size = (tmp_path / "shards" / "00000.tar").stat().st_size
    write_shards(Manifest([Shard(command, 0, 16, size)]), manifest)
    refused = train(tmp_path / "runs", str(manifest), 2, cache, "--data.cache_gb=0.01")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "is a command, which would be run; allow it with --data.allow_commands=true" in refused.stderr
    assert not (tmp_path / "ran").exists()
    allowed = train(tmp_path / "runs", str(manifest), 2, cache, "--data.cache_gb=0.01", "--data.allow_commands=true")
    assert allowed.returncode == 0, allowed.stderr
    assert (tmp_path / "ran").exists()


def test_a_list_is_from_others_and_a_command_line_is_yours(tmp_path: Path, command: str) -> None:
    listed = tmp_path / "shards.txt"
    listed.write_text(f"{command}\n")
    refused = call("tools/build_manifest.py", str(tmp_path / "a"), str(listed))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "allow it with --allow-commands" in refused.stderr
    assert not (tmp_path / "ran").exists()
    allowed = call("tools/build_manifest.py", str(tmp_path / "a"), str(listed), "--allow-commands", "--processes=1")
    assert allowed.returncode == 0, allowed.stderr
    (tmp_path / "ran").unlink()
    typed = call("tools/build_manifest.py", str(tmp_path / "b"), command, "--processes=1")
    assert typed.returncode == 0, typed.stderr
    assert (tmp_path / "ran").exists()


def test_a_list_in_a_list_is_no_way_around(tmp_path: Path, command: str) -> None:
    (tmp_path / "inner.txt").write_text(f"{tmp_path}/shards::{command}\n")
    (tmp_path / "outer.txt").write_text(f"{tmp_path}/inner.txt\n")
    with pytest.raises(UserError, match="is a command"):
        resolve_shards(str(tmp_path / "outer.txt"))


def test_lists_that_never_end(tmp_path: Path) -> None:
    (tmp_path / "loop.txt").write_text(f"{tmp_path}/loop.txt\n")
    with pytest.raises(UserError, match="names itself"):
        resolve_shards(str(tmp_path / "loop.txt"))
    with pytest.raises(UserError, match=r"has 1,000,000,000,001 names"):
        resolve_shards(f"{tmp_path}/{{0..1000000000000}}.tar")
    for name in ("~no_such_user/0.tar", "a\0b*.tar", "x" * 5000):
        with pytest.raises(UserError, match=r"cannot be looked up|Nothing matches"):
            resolve_shards(name)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be looked up"):
        resolve_shards(str(tmp_path / "binary.txt"))
