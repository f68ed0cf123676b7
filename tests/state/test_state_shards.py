"""Any number of ranks can read the state shards that several ranks wrote; missing rows raise a clear error."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.state.partition import Partition, RowTable
from neuclip_ds.state.shards import ShardFiles, Shards, replicated_shards, shard_files, shard_key, table_shards

SIZES = {"a/b.weight": 12, "bias": 5, "one": 1}
KINDS = ("weight", "exp_avg")


def write(folder: Path, ranks: Sequence[Shards], **metadata: Any) -> ShardFiles:
    folder.mkdir(exist_ok=True)
    keys = [list(shards) for shards in ranks]
    for rank, shards in enumerate(ranks):
        communicator: Any = SimpleNamespace(rank=rank, world_size=len(ranks), gather_objects=lambda _: keys)
        for file in shard_files(shards, metadata, communicator):
            file.write(folder)
    return ShardFiles(folder)


def elements(name: str, kind: str) -> Tensor:
    return torch.arange(SIZES[name]) + 100.0 * sorted(SIZES).index(name) + 1000.0 * KINDS.index(kind)


def write_three_files(folder: Path) -> ShardFiles:
    """Write three files; the second contains the end of one tensor, all of a second one and none of the others."""

    def cut(kind: str, name: str, start: int, stop: int) -> Shards:
        return {shard_key(kind, name, start, stop): elements(name, kind)[start:stop]}

    scalars = replicated_shards("scalar", {"bias/step": torch.tensor(7.0)})
    ranks: list[Shards] = [scalars, {}, cut("weight", "one", 0, 1)]
    for kind in KINDS:
        ranks[0] |= cut(kind, "a/b.weight", 0, 5)
        ranks[1] |= cut(kind, "a/b.weight", 9, 12) | cut(kind, "bias", 0, 5)
        ranks[2] |= cut(kind, "a/b.weight", 5, 9)
    return write(folder, ranks, steps=7)


def test_any_range_of_the_rows_that_three_ranks_wrote_can_be_read(tmp_path: Path) -> None:
    files = write_three_files(tmp_path)
    assert files.metadata == {"steps": 7}
    assert files.kinds("a/b.weight") == ["exp_avg", "weight"] and files.kinds("one") == ["weight"]
    assert files.replicated("scalar", "bias/") == {"step": torch.tensor(7.0)}
    assert files.replicated("scalar", "a/") == files.replicated("other") == {}
    for kind in KINDS:
        for start in range(13):
            for stop in range(start, 13):
                rows = files.read("a/b.weight", kind, start, stop)
                assert torch.equal(rows, elements("a/b.weight", kind)[start:stop])
        assert torch.equal(files.read("bias", kind), elements("bias", kind))
    plain = load_file(tmp_path / "00001-of-00003.safetensors")
    names = ("a/b.weight/9-12", "bias/0-5")
    assert set(plain) == {f"weight/{name}" for name in names} | {f"exp_avg/{name}" for name in names}


def test_only_files_that_hold_what_is_read_are_opened(tmp_path: Path) -> None:
    write_three_files(tmp_path)
    for number, start, stop in ((0, 0, 5), (1, 9, 12), (2, 6, 9)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for kept in ("index.json", f"{number:05d}-of-00003.safetensors"):
            (folder / kept).write_bytes((tmp_path / kept).read_bytes())
        files = ShardFiles(folder)
        assert torch.equal(
            files.read("a/b.weight", "exp_avg", start, stop), elements("a/b.weight", "exp_avg")[start:stop]
        )
        with pytest.raises(UserError, match="cannot be read"):
            files.read("a/b.weight", "weight")


def test_an_error_names_the_missing_rows(tmp_path: Path) -> None:
    write_three_files(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["keys"][2] = []
    (tmp_path / "index.json").write_text(json.dumps(index))
    files = ShardFiles(tmp_path)
    with pytest.raises(UserError, match=r"lacks the rows \[5, 12\) of a/b\.weight \(weight\)"):
        files.read("a/b.weight", "weight")
    assert torch.equal(files.read("a/b.weight", "weight", 9, 12), elements("a/b.weight", "weight")[9:])


@given(rows=st.integers(1, 200), world_size=st.integers(1, 12))
def test_every_row_is_in_the_partition_of_one_rank(rows: int, world_size: int) -> None:
    parts = [Partition.of(rows, rank, world_size) for rank in range(world_size)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))


def table(rows: int, rank: int, world_size: int, offset: float = 0.0, **options: Any) -> dict[str, RowTable]:
    partition = Partition.of(rows, rank, world_size)
    values = torch.arange(partition.start, partition.stop, dtype=torch.float32) + offset
    return {"samples": RowTable(partition, {"u": values, "w": values.unsqueeze(1).repeat(1, 3)}, **options)}


def tables_of(folder: Path, rows: int, writers: int) -> ShardFiles:
    return write(folder, [table_shards(table(rows, rank, writers)) for rank in range(writers)])


@pytest.mark.parametrize("writers", [1, 2, 3, 7])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_tables_move_between_world_sizes(writers: int, readers: int, tmp_path: Path) -> None:
    files = tables_of(tmp_path, 23, writers)
    for rank in range(readers):
        loaded = table(23, rank, readers, offset=1000.0)
        files.fill(loaded)
        expected = table(23, rank, readers)["samples"].tensors
        assert all(torch.equal(loaded["samples"].tensors[key], tensor) for key, tensor in expected.items())


def test_tables_of_other_data_or_methods_are_refused(tmp_path: Path) -> None:
    files = tables_of(tmp_path, 23, 2)
    with pytest.raises(UserError, match=r"lacks the rows \[23, 40\) of samples/u"):
        files.fill(table(40, 0, 1))
    part = Partition.of(23, 0, 1)
    for tensors, words in [
        ({"tau_image": torch.zeros(23)}, "of the loss's state: u, w; this run needs tau_image"),
        ({"u": torch.zeros(23), "w": torch.zeros(23, 2)}, r"the rows of samples/w have shape \(3,\)"),
    ]:
        with pytest.raises(UserError, match=words):
            files.fill({"samples": RowTable(part, tensors)})
    (tmp_path / "00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        ShardFiles(tmp_path).fill(table(23, 0, 1))


def test_what_was_read_does_not_change_when_its_folder_is_written_again(tmp_path: Path) -> None:
    before = write(tmp_path, [replicated_shards("scalar", {"tau": torch.tensor(7.0)})]).replicated("scalar")
    write(tmp_path, [replicated_shards("scalar", {"tau": torch.tensor(8.0)})])
    assert before == {"tau": torch.tensor(7.0)}
