"""Fragments of parameters in files: what several ranks wrote is read in any ranges; damage is one sentence."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import (
    WEIGHT,
    StateFiles,
    index_file,
    shard_key,
    shards_file,
)
from neuclip_ds.errors import UserError
from neuclip_ds.state.tensor_file import TensorFile

NAMES = {"a/b.weight": [3, 4], "bias": [5], "one": [1]}


def whole(name: str, kind: str) -> Tensor:
    count = torch.Size(NAMES[name]).numel()
    return torch.arange(count) + 100.0 * sorted(NAMES).index(name) + (1000.0 if kind == "exp_avg" else 0.0)


def cut(kind: str, name: str, start: int, stop: int) -> dict[str, Tensor]:
    return {shard_key(kind, name, start, stop): whole(name, kind)[start:stop]}


def write(folder: Path) -> StateFiles:
    """Three files; the second holds the end of one parameter, all of another and nothing of the rest."""
    folder.mkdir(exist_ok=True)
    first = {"step/bias/scalar": torch.tensor(7.0), "step/one/scalar": torch.tensor(8.0)}
    pieces: list[dict[str, Tensor]] = [first, {}, cut(WEIGHT, "one", 0, 1)]
    for kind in (WEIGHT, "exp_avg"):
        pieces[0] |= cut(kind, "a/b.weight", 0, 5)
        pieces[1] |= cut(kind, "a/b.weight", 9, 12) | cut(kind, "bias", 0, 5)
        pieces[2] |= cut(kind, "a/b.weight", 5, 9)
    for rank, shards in enumerate(pieces):
        shards_file(rank, 3, shards).write(folder)
    TensorFile("buffers.safetensors", {"mean": torch.arange(6)[::2]}).write(folder)
    index_file(NAMES, list(map(list, pieces)), {"global_steps": 7}).write(folder)
    return StateFiles(folder)


def test_any_range_of_what_three_ranks_wrote(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert list(files.shapes) == list(NAMES)
    assert files.shapes["a/b.weight"] == (3, 4)
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


def test_a_missing_range_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    index = json.loads((tmp_path / "engine.json").read_text())
    index["keys"][2] = []
    (tmp_path / "engine.json").write_text(json.dumps(index))
    files = StateFiles(tmp_path)
    with pytest.raises(UserError, match=r"lacks elements 5 to 12 of a/b\.weight \(weight\)"):
        files.read("a/b.weight", WEIGHT)
    assert files.read("a/b.weight", WEIGHT, 9, 12).tolist() == whole("a/b.weight", WEIGHT)[9:].tolist()


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
        with pytest.raises(FileNotFoundError):
            files.read(name, WEIGHT)
