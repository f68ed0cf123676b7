"""Check how the sources that a user names are resolved to a list of shards."""

import shutil
from pathlib import Path

import pytest
from tars import unprivileged_folder, write_pairs

from neuclip_ds.data.shards import is_local, resolve_shards
from neuclip_ds.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "shards", [1, 1, 1])


def test_a_source_names_its_shards_in_order(folder, tmp_path, monkeypatch):
    tars = [str(folder / f"{i:05d}.tar") for i in range(3)]
    (folder / "notes.txt").write_text("not a shard")
    (folder / "below").mkdir()
    shutil.copy(tars[0], folder / "below" / "00009.tar")
    assert resolve_shards(str(folder)) == tars
    assert resolve_shards(str(folder / "*.tar")) == tars
    assert resolve_shards(str(folder / "{00000..00002}.tar")) == tars
    assert resolve_shards(str(folder / "{00002,00000}.tar")) == [tars[2], tars[0]]
    assert resolve_shards(str(folder / "0000{1,2}*.tar")) == tars[1:]
    assert resolve_shards(tars[1]) == [tars[1]]
    assert resolve_shards(str(tmp_path)) == [*tars, str(folder / "below" / "00009.tar")]
    monkeypatch.chdir(folder)
    assert resolve_shards("00001.tar") == [tars[1]]


def test_a_literal_name_with_special_characters_is_taken_as_it_is(folder, tmp_path):
    odd = shutil.copytree(folder, tmp_path / "{a}[1]")
    assert resolve_shards(str(odd)) == [str(odd / f"{i:05d}.tar") for i in range(3)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "is an empty string"),
        ("pipe:touch {tmp}/0.tar", "does not exist"),
        ("{tmp}/absent", "absent does not exist"),
        ("{tmp}/absent/*.tar", "Nothing matches"),
        ("{tmp}/{{a,b", "do not match"),
        ("{tmp}/none", "No \\*.tar in .*none"),
        ("{tmp}/shards/{{00001..00004}}.tar", r"00003.tar does not exist \(2 of 4"),
        ("nonsense://a/*.tar", r"pip install|fsspec supports"),
        ("abfs://container/*.tar", "pip install"),
    ],
)
def test_sources_without_shards_are_refused(folder, tmp_path, source, message):
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=message):
        resolve_shards(source.format(tmp=tmp_path))


def test_lists_and_several_sources(folder, tmp_path):
    tars = [str(folder / f"{i:05d}.tar") for i in range(3)]
    listed = tmp_path / "shards.txt"
    listed.write_text(f"# a comment\n{tars[2]}\n\n{folder}/{{00000..00001}}.tar\n")
    assert resolve_shards(str(listed)) == [tars[2], *tars[:2]]
    assert resolve_shards(f"{tars[1]}::{folder}/0000[02].tar") == [tars[1], tars[0], tars[2]]
    listed.write_text("# nothing\n")
    with pytest.raises(UserError, match="names no shards"):
        resolve_shards(str(listed))


def test_urls_are_remote_and_their_braces_are_expanded():
    assert resolve_shards("s3://bucket/a/{00..02}.tar") == [f"s3://bucket/a/0{i}.tar" for i in range(3)]
    assert len(resolve_shards("s3://bucket/{0..20000000..10000}.tar")) == 2001
    assert resolve_shards("https://host/a.tar?x=1&y=2") == ["https://host/a.tar?x=1&y=2"]
    assert all(is_local(path) for path in ("/a", "a/b.tar", "./c:d.tar"))
    assert not any(is_local(path) for path in ("s3://b/c", "hf://x"))


def test_endless_lists_and_ranges_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.txt").write_text(f"{tmp_path}/loop.txt\n")
    with pytest.raises(UserError, match="includes itself"):
        resolve_shards(str(tmp_path / "loop.txt"))
    with pytest.raises(UserError, match=r"expands to 1,000,000,000,001 names"):
        resolve_shards(f"{tmp_path}/{{0..1000000000000}}.tar")
    for name in ("~no_such_user/0.tar", "a\0b*.tar", "x" * 5000):
        with pytest.raises(UserError, match=r"cannot be looked up|Nothing matches|does not exist"):
            resolve_shards(name)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        resolve_shards(str(tmp_path / "binary.txt"))


def test_symlinked_folders_are_followed_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_pairs(root / "real" / "deep", [1])
    write_pairs(tmp_path / "elsewhere", [1, 1])
    for name, target in {
        "a": root / "real",  # listed under its real path
        "b": tmp_path / "elsewhere",
        "c": tmp_path / "elsewhere",
        "loop": root,
        "up": tmp_path,
    }.items():
        (root / name).symlink_to(target)
    found = resolve_shards(str(root))
    expected = [root / "b/00000.tar", root / "b/00001.tar", root / "real/deep/00000.tar"]
    assert found == list(map(str, expected))


def test_a_folder_of_links_has_shards(tmp_path: Path) -> None:
    write_pairs(tmp_path / "elsewhere", [1, 1])
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "part").symlink_to(tmp_path / "elsewhere")
    assert len(resolve_shards(str(tmp_path / "root"))) == 2


def test_hidden_files_and_folders_of_archivers_are_not_shards(folder: Path, tmp_path: Path) -> None:
    for name in ("._00000.tar", "below/._00000.tar", ".cache/0.tar", "__MACOSX/0.tar", "lost+found/0.tar"):
        for root in (folder, tmp_path / "deep"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(b"\0\5\x16\7")
    shutil.move(folder, tmp_path / "deep" / "shards")
    tars = [str(tmp_path / "deep" / "shards" / f"{i:05d}.tar") for i in range(3)]
    assert resolve_shards(str(tmp_path / "deep" / "shards")) == tars
    assert resolve_shards(str(tmp_path / "deep")) == tars


@pytest.mark.parametrize("locked", ["shards", "shards/locked"])
@pytest.mark.parametrize("pattern", ["shards", "shards/*/*.tar", "shards/**/*.tar"])
def test_a_folder_that_cannot_be_listed_is_an_error(locked: str, pattern: str) -> None:
    with unprivileged_folder() as folder:
        write_pairs(folder / "shards" / "open", [1])
        write_pairs(folder / "shards" / "locked", [1])
        (folder / locked).chmod(0)
        try:
            with pytest.raises(UserError, match=f"cannot be looked up.*Permission denied: '{folder / locked}"):
                resolve_shards(str(folder / pattern))
        finally:
            (folder / locked).chmod(0o700)


@pytest.mark.parametrize("pattern", ["*.tar", "*/*.tar"])
def test_a_folder_that_may_be_entered_but_not_listed_is_an_error(pattern: str) -> None:
    with unprivileged_folder() as folder:
        shards = write_pairs(folder / "shards", [1])
        shards.chmod(0o300)
        try:
            with pytest.raises(UserError, match=r"cannot be looked up.*Permission denied"):
                resolve_shards(str(shards / pattern))
        finally:
            shards.chmod(0o700)


def test_a_byte_order_mark_does_not_belong_to_a_path(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shards.txt").write_text(f"{folder}/00001.tar\n", encoding="utf-8-sig")
    assert resolve_shards(str(tmp_path / "shards.txt")) == [str(folder / "00001.tar")]
