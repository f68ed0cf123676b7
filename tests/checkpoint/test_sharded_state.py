"""Fragments of parameters in files: what several ranks wrote is read in any ranges; damage is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import (
    WEIGHT,
    StateFiles,
    StateShard,
    buffers_file,
    contents_of,
    index_file,
    shards_file,
)
from neuclip_ds.errors import UserError

NAMES = {"a/b.weight": [3, 4], "bias": [5], "one": [1]}


def whole(name: str, kind: str) -> Tensor:
    count = torch.Size(NAMES[name]).numel()
    return torch.arange(count) + 100.0 * sorted(NAMES).index(name) + (1000.0 if kind == "exp_avg" else 0.0)


def cut(kind: str, name: str, start: int, stop: int) -> StateShard:
    return StateShard(kind, name, start, stop, whole(name, kind)[start:stop])


def write(folder: Path, save: str = "abc") -> StateFiles:
    """Three files; the second holds the end of one parameter, all of another and nothing of the rest."""
    folder.mkdir(exist_ok=True)
    pieces: list[list[StateShard]] = [
        [StateShard("step", "bias", 0, 0, torch.tensor(7.0)), StateShard("step", "one", 0, 0, torch.tensor(8.0))],
        [],
        [],
    ]
    for kind in (WEIGHT, "exp_avg"):
        pieces[0].append(cut(kind, "a/b.weight", 0, 5))
        pieces[1] += [cut(kind, "a/b.weight", 9, 12), cut(kind, "bias", 0, 5)]
        pieces[2] += [cut(kind, "a/b.weight", 5, 9)]
    pieces[2].append(cut(WEIGHT, "one", 0, 1))
    for rank, fragments in enumerate(pieces):
        shards_file(rank, 3, save, fragments).write(folder)
    buffers_file(save, {"mean": torch.arange(6)[::2]}).write(folder)
    index_file(save, NAMES, list(map(contents_of, pieces)), {"global_steps": 7}, {"world_size": 3}).write(folder)
    return StateFiles(folder)


def without_places(folder: Path) -> StateFiles:
    """Reads what `write` wrote as earlier versions wrote it."""
    path = folder / "engine.json"
    index = json.loads(path.read_text())
    del index["shards"]
    path.write_text(json.dumps(index))
    return StateFiles(folder)


def test_any_range_of_what_three_ranks_wrote(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert files.names() == list(NAMES)
    assert files.shape("a/b.weight") == (3, 4)
    assert files.kinds("a/b.weight") == ["exp_avg", WEIGHT]
    assert files.kinds("one") == [WEIGHT]
    assert files.scalars("bias") == {"step": torch.tensor(7.0)}
    assert files.scalars("a/b.weight") == {}
    assert files.counters == {"global_steps": 7}
    assert files.buffers()["mean"].tolist() == [0, 2, 4]
    for kind in (WEIGHT, "exp_avg"):
        for start in range(13):
            for stop in range(start, 13):
                found = files.read("a/b.weight", kind, start, stop)
                assert torch.equal(found, whole("a/b.weight", kind)[start:stop])
        assert torch.equal(files.read("bias", kind), whole("bias", kind))


def test_files_are_plain_safetensors_without_padding(tmp_path: Path) -> None:
    write(tmp_path)
    found = load_file(tmp_path / "fragments.00001-of-00003.safetensors")
    assert set(found) == {f"{kind}/{rest}" for kind in (WEIGHT, "exp_avg") for rest in ("a/b.weight/9-12", "bias/0-5")}
    assert torch.equal(found["exp_avg/a/b.weight/9-12"], whole("a/b.weight", "exp_avg")[9:])
    assert load_file(tmp_path / "fragments.00000-of-00003.safetensors")["step/bias/scalar"].shape == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.float16])
def test_every_dtype_and_strided_tensors_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.arange(12).to(dtype)
    shard = StateShard("kind", "p", 0, 6, value[::2])
    shards_file(0, 1, "x", [shard]).write(tmp_path)
    index_file("x", {"p": [6]}, [contents_of([shard])], {}, {}).write(tmp_path)
    found = StateFiles(tmp_path).read("p", "kind")
    assert found.dtype == dtype
    assert torch.equal(found, value[::2])


def test_a_missing_range_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    shards_file(2, 3, "abc", [cut(WEIGHT, "one", 0, 1), cut(WEIGHT, "a/b.weight", 6, 9)]).write(tmp_path)
    with pytest.raises(UserError, match=r"fragments\.00002-of-00003\.safetensors is damaged .*weight/a/b\.weight/5-9"):
        StateFiles(tmp_path).read("a/b.weight", WEIGHT)
    files = without_places(tmp_path)
    with pytest.raises(UserError, match=r"lacks elements 5 to 12 of a/b\.weight \(weight\); restore the folder, or"):
        files.read("a/b.weight", WEIGHT)
    with pytest.raises(UserError, match=r"lacks elements 5 to 9 of a/b\.weight \(exp_avg\)"):
        files.read("a/b.weight", "exp_avg", 3, 9)
    assert files.read("a/b.weight", WEIGHT, 6, 12).tolist() == whole("a/b.weight", WEIGHT)[6:].tolist()


def test_damage_is_one_sentence(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "fragments.00001-of-00003.safetensors"
    content = path.read_bytes()
    for broken in (b"", content[:5], content[: len(content) // 3], content[:-1], b"\xff" * 100):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"fragments\.00001-of-00003\.safetensors is damaged .*; restore"):
            StateFiles(tmp_path).weights()
    path.unlink()
    with pytest.raises(UserError, match=r"fragments\.00001-of-00003\.safetensors is missing; restore"):
        StateFiles(tmp_path).weights()


def test_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "mine", "abc")
    write(tmp_path / "other", "def")
    (tmp_path / "other" / "buffers.safetensors").replace(tmp_path / "mine" / "buffers.safetensors")
    with pytest.raises(UserError, match=r"buffers\.safetensors belongs to another checkpoint"):
        StateFiles(tmp_path / "mine").buffers()
    name = "fragments.00001-of-00003.safetensors"
    (tmp_path / "other" / name).replace(tmp_path / "mine" / name)
    with pytest.raises(UserError, match=f"{name} belongs to another checkpoint"):
        StateFiles(tmp_path / "mine").weights()


def test_only_files_that_hold_what_is_read_are_opened(tmp_path: Path) -> None:
    write(tmp_path)
    for number, name, start, stop in ((0, "a/b.weight", 0, 5), (1, "a/b.weight", 9, 12), (2, "a/b.weight", 6, 9)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for kept in ("engine.json", f"fragments.{number:05d}-of-00003.safetensors"):
            (folder / kept).write_bytes((tmp_path / kept).read_bytes())
        files = StateFiles(folder)
        assert torch.equal(files.read(name, "exp_avg", start, stop), whole(name, "exp_avg")[start:stop])
        assert (files.kinds("bias"), files.kinds("one")) == (["exp_avg", WEIGHT], [WEIGHT])
        with pytest.raises(UserError, match=r"safetensors is missing"):
            files.read(name, WEIGHT)


def test_checkpoints_without_places_are_read_as_before(tmp_path: Path) -> None:
    expected = write(tmp_path)
    files = without_places(tmp_path)
    for name in expected.names():
        assert files.kinds(name) == expected.kinds(name)
        assert files.scalars(name) == expected.scalars(name)
        for kind in expected.kinds(name):
            assert torch.equal(files.read(name, kind), whole(name, kind))


def test_the_index(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "engine.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "format": "something"}))
    with pytest.raises(UserError, match=r"not of the format neuclip_ds\.engine\.1"):
        StateFiles(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match=r"engine\.json is damaged"):
        StateFiles(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"There is no .*engine\.json"):
        StateFiles(tmp_path)
