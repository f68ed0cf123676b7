"""Batches in parts: how they are cut, read by rows, and freed."""

from __future__ import annotations

import weakref

import pytest
import torch

from neuclip_ds.data.dataset import BadSample, Batch
from neuclip_ds.data.rank_batch import PART_BYTES, RankBatch, join_parts, part_count, part_rows

ROWS, PARTS = 11, 3


def whole() -> Batch:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (ROWS, 3, 2, 2), generator=generator, dtype=torch.uint8)
    bad = (BadSample(3, "shard", "key", "no image"), BadSample(9, "shard", "other", "no caption"))
    index = torch.arange(ROWS)
    return Batch(image, torch.arange(2 * ROWS).view(ROWS, 2), index, (index != 3) & (index != 9), bad)


def cut(batch: Batch, count: int = PARTS) -> list[Batch]:
    """Copies of a batch's parts, as processes deliver them."""
    found = []
    for number in range(count):
        rows = part_rows(len(batch.index), count, number)
        tensors = (column[rows].clone() for column in batch[:4])
        found.append(Batch(*tensors, tuple(bad for bad in batch.bad if rows.start <= bad.index < rows.stop)))
    return found


@pytest.mark.parametrize(("rows", "side", "parts"), [(640, 224, 1), (891, 224, 1), (892, 224, 2), (524_288, 224, 589)])
def test_a_part_is_bounded_in_bytes(rows: int, side: int, parts: int) -> None:
    assert part_count(rows, side) == parts
    slices = [part_rows(rows, parts, number) for number in range(parts)]
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    assert slices[-1].stop == rows
    sizes = {part.stop - part.start for part in slices}
    assert max(sizes) * 3 * side**2 <= PART_BYTES
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rows", [slice(0, 11), slice(0, 3), slice(2, 5), slice(3, 7), slice(1, 10), slice(8, 99)])
def test_rows_are_those_of_the_whole(rows: slice) -> None:
    batch, parts = whole(), cut(whole())
    joined = RankBatch(parts)
    assert len(joined) == ROWS
    assert torch.equal(joined.index, batch.index)
    assert torch.equal(joined.valid, batch.valid)
    assert joined.bad == batch.bad
    pieces = joined.pieces(rows)
    for column, wanted in zip(zip(*pieces, strict=True), (batch.image[rows], batch.tokens[rows]), strict=True):
        assert torch.equal(torch.cat(column), wanted)
    storages = {part.image.untyped_storage().data_ptr() for part in parts}
    assert {image.untyped_storage().data_ptr() for image, _ in pieces} <= storages, "views, not copies"


def test_parts_that_have_been_used_are_freed() -> None:
    parts = cut(whole())
    alive = [weakref.ref(part.image) for part in parts]
    ends = [len(parts[0].index), len(parts[0].index) + len(parts[1].index)]
    (batch,) = join_parts(iter(parts), PARTS)
    del parts
    batch.release(ends[0] - 1)
    assert all(image() is not None for image in alive)
    batch.release(ends[1])
    assert [image() is not None for image in alive] == [False, False, True]
    assert len(batch.pieces(slice(ends[1], ROWS))) == 1
    with pytest.raises(RuntimeError, match="have been released"):
        batch.pieces(slice(0, ROWS))
    assert batch.index.tolist() == list(range(ROWS))


def test_batches_follow_each_other() -> None:
    parts = cut(whole()) + cut(whole(), 2)
    first, second = join_parts(iter(parts), PARTS)
    assert (len(first), len(second)) == (ROWS, ROWS)
