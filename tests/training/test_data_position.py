"""Steps and epochs of a run whose data may have grown while it was interrupted."""

import itertools

import numpy as np
import pytest

from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Manifest, Shard, extend
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.errors import UserError
from neuclip_ds.training.plan import resume
from neuclip_ds.training.schedule import DataPosition, Span

OLD = extend(None, [Shard("a.tar", 0, 50, 1), Shard("b.tar", 0, 50, 2)])
GROWN = extend(OLD, [Shard("c.tar", 0, 100, 3)])
SMALLER = Manifest([OLD.shards[0], OLD.shards[1]._replace(removed=True)])


def order_of(manifest: Manifest) -> GlobalOrder:
    return GlobalOrder(manifest.starts, manifest.sizes, 10, 3, Interleave(2, 20))


def start(manifest: Manifest) -> DataPosition:
    return DataPosition.start(order_of(manifest), manifest)


def resumed(position: DataPosition, done: int, before: Manifest, after: Manifest) -> DataPosition:
    return resume(position.record(before), done, after, order_of(after))


def places(position: DataPosition, *numbers: int) -> list[tuple[int, int]]:
    return [(place.epoch, place.step) for place in map(position.at, numbers)]


def seen(position: DataPosition, *steps: int) -> list[int]:
    return sorted(index for step in range(*steps) for index in position.batch(step).tolist() if index >= 0)


def test_epochs_follow_one_another():
    assert places(start(OLD), 0, 9, 10, 25) == [(0, 0), (0, 9), (1, 0), (2, 5)]
    later = DataPosition([Span(25, 3, order_of(GROWN), 3, ())])
    assert places(later, 25, 44, 45) == [(3, 0), (3, 19), (4, 0)]


def test_the_rest_of_an_epoch_is_less_than_half_a_batch():
    manifest = extend(None, [Shard("a.tar", 0, 24, 1)])
    position = start(manifest)
    assert [position.is_rest(step) for step in range(6)] == [False, False, True, False, False, True]
    assert not any(map(start(extend(None, [Shard("a.tar", 0, 25, 1)])).is_rest, range(6))), "half a batch"
    assert not start(extend(None, [Shard("a.tar", 0, 4, 1)])).is_rest(0), "every batch is alike"


def test_the_end():
    assert start(OLD).end(epochs=2.5) == 25
    assert start(OLD).end(epochs=0.01) == 1
    later = DataPosition([Span(25, 3, order_of(GROWN), 3, ())])
    assert later.end(epochs=5) == 65
    assert later.end(epochs=1) == 25
    assert later.end(epochs=1, max_steps=30) == 30
    both = resumed(start(OLD), 13, OLD, GROWN)
    assert [both.end(epochs=epochs) for epochs in (1.5, 2, 2.5, 4)] == [15, 20, 30, 60]


def test_the_same_data_continue_where_they_were():
    before = start(OLD)
    assert places(resumed(before, 33, OLD, OLD), 33) == [(3, 3)]
    moved = Manifest([shard._replace(path=f"/elsewhere/{shard.path}") for shard in OLD.shards])
    assert seen(resumed(before, 33, OLD, moved), 33, 40) == seen(before, 33, 40)


@pytest.mark.parametrize(("done", "begins"), [(33, 40), (30, 30), (0, 0)])
def test_an_epoch_ends_with_the_shards_that_it_began_with(done, begins, caplog):
    position = resumed(start(OLD), done, OLD, GROWN)
    assert "changed from 2 shards to 3" in caplog.text
    for number in range(done, begins):
        assert np.array_equal(position.batch(number), start(OLD).batch(number))
    assert places(position, begins, begins + 20) == [(begins // 10, 0), (begins // 10 + 1, 0)]
    assert seen(position, begins, begins + 20) == list(range(200))
    parts = [(place.order.n, place.epoch, place.step, steps) for place, steps in position.parts(done, begins + 5)]
    begun = [(100, done // 10, done % 10, begins - done)] if done < begins else []
    assert parts == [*begun, (200, begins // 10, 0, 5)]
    first = max(begins - 1, done)
    again = resumed(position, first, GROWN, GROWN) if done < begins else position
    assert seen(again, first, begins + 20) == seen(position, first, begins + 20)


def test_shards_ahead_follow_the_batches_across_a_growth():
    position = resumed(start(OLD), 33, OLD, GROWN)
    requests = list(itertools.takewhile(lambda one: one.first < 60, position.shards_ahead(33, [slice(0, 10)])))
    assert [one.first for one in requests] == sorted(one.first for one in requests)
    for number in range(33, 60):
        for shard in {GROWN.locate(index)[0] for index in position.batch(number).tolist()}:
            assert any(one.shard == shard and one.first <= number <= one.last for one in requests)
    assert {one.shard for one in requests if one.last < 40} == {0, 1}


def test_an_epoch_leaves_the_samples_of_removed_shards_out():
    position = resumed(start(OLD), 33, OLD, SMALLER)
    assert seen(position, 33, 40) == [index for index in seen(start(OLD), 33, 40) if index < 50]
    assert places(position, 40, 45) == [(4, 0), (5, 0)]
    assert seen(position, 40, 45) == list(range(50))
    requests = itertools.takewhile(lambda one: one.first < 45, position.shards_ahead(33, [slice(0, 10)]))
    assert {one.shard for one in requests} == {0}
    restored = resumed(position, 42, SMALLER, OLD)
    assert seen(restored, 40, 45) == list(range(50))
    assert places(restored, 45) == [(5, 0)]
    assert seen(restored, 45, 55) == list(range(100))


def test_other_data_are_refused():
    saved = start(GROWN).record(GROWN)
    other = extend(None, [Shard("a.tar", 0, 50, 1), Shard("x.tar", 0, 50, 2), Shard("c.tar", 0, 100, 3)])
    for manifest in (OLD, other):
        with pytest.raises(UserError, match="written with other data"):
            resume(saved, 5, manifest, order_of(manifest))
