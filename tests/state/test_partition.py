"""Partitions of rows over ranks, and files that any number of ranks can read."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuclip_ds.errors import UserError
from neuclip_ds.state.partition import Partition, RowTable, load_rows, save_rows


@given(rows=st.integers(1, 200), world_size=st.integers(1, 12))
def test_every_row_has_one_owner(rows: int, world_size: int) -> None:
    parts = [Partition.of(rows, rank, world_size) for rank in range(world_size)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))


def table(rows: int, rank: int, world_size: int, offset: float = 0.0) -> RowTable:
    part = Partition.of(rows, rank, world_size)
    values = torch.arange(part.start, part.stop, dtype=torch.float32) + offset
    return RowTable(part, {"u": values, "w": values.unsqueeze(1).repeat(1, 3)})


@pytest.mark.parametrize("writers", [1, 2, 3, 7])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_round_trip_between_world_sizes(writers: int, readers: int, tmp_path: Path) -> None:
    for rank in range(writers):
        save_rows(tmp_path, "samples", table(23, rank, writers))
    for rank in range(readers):
        read = table(23, rank, readers, offset=1000.0)
        load_rows(tmp_path, "samples", read)
        wanted = table(23, rank, readers)
        assert all(torch.equal(read.tensors[key], wanted.tensors[key]) for key in wanted.tensors)


def test_missing_rows_are_named(tmp_path: Path) -> None:
    save_rows(tmp_path, "samples", table(23, 0, 2))
    with pytest.raises(UserError, match="lacks rows 12 to 23 of samples"):
        load_rows(tmp_path, "samples", table(23, 0, 1))


def test_another_methods_fields_are_refused(tmp_path: Path) -> None:
    save_rows(tmp_path, "samples", table(5, 0, 1))
    part = Partition.of(5, 0, 1)
    with pytest.raises(UserError, match="tau_image"):
        load_rows(tmp_path, "samples", RowTable(part, {"tau_image": torch.zeros(5)}))


def test_a_grown_table_keeps_its_new_rows_as_they_are(tmp_path: Path) -> None:
    for rank in range(2):
        save_rows(tmp_path, "samples", table(23, rank, 2))
    for rank in range(3):
        grown = table(40, rank, 3, offset=1000.0)._replace(grows=True)
        load_rows(tmp_path, "samples", grown)
        rows = torch.arange(grown.partition.start, grown.partition.stop)
        assert torch.equal(grown.tensors["u"], torch.where(rows < 23, rows, rows + 1000).float())
    with pytest.raises(UserError, match="lacks rows 23 to 40"):
        load_rows(tmp_path, "samples", table(40, 0, 1))


def test_a_file_that_is_missing_is_not_taken_for_growth(tmp_path: Path) -> None:
    save_rows(tmp_path, "samples", table(23, 0, 2))
    with pytest.raises(UserError, match="lacks rows 12 to 23 of samples"):
        load_rows(tmp_path, "samples", table(40, 0, 1)._replace(grows=True))
    with pytest.raises(UserError, match="lacks rows 0 to 40"):
        load_rows(tmp_path, "nothing", table(40, 0, 1)._replace(grows=True))
