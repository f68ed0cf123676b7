"""Steps and epochs of a run whose data may have grown while it was interrupted."""

from __future__ import annotations

import pytest

from neuclip_ds.config import BudgetConfig
from neuclip_ds.data.manifest import Manifest, Shard, extend
from neuclip_ds.errors import UserError
from neuclip_ds.training.data_position import DataPosition, resume

OLD = extend(None, [Shard("a.tar", 0, 50, 1), Shard("b.tar", 0, 50, 2)])
GROWN = extend(OLD, [Shard("c.tar", 0, 100, 3)])


def test_epochs_follow_one_another():
    position = DataPosition(0, 0, 10)
    assert [position.at(number) for number in (0, 9, 10, 25)] == [(0, 0), (0, 9), (1, 0), (2, 5)]
    later = DataPosition(25, 3, 20)
    assert [later.at(number) for number in (25, 44, 45)] == [(3, 0), (3, 19), (4, 0)]


def test_the_end():
    assert DataPosition(0, 0, 10).end(BudgetConfig(epochs=2.5)) == 25
    assert DataPosition(0, 0, 10).end(BudgetConfig(epochs=0.01)) == 1
    assert DataPosition(25, 3, 20).end(BudgetConfig(epochs=5)) == 65
    assert DataPosition(25, 3, 20).end(BudgetConfig(epochs=1)) == 25
    assert DataPosition(25, 3, 20).end(BudgetConfig(steps=30)) == 30


def test_the_same_data_go_on_where_they_were():
    before = DataPosition(7, 2, 10)
    saved = before.record(OLD)
    assert resume(saved, 33, OLD, 10) == before
    moved = Manifest([shard._replace(path=f"/elsewhere/{shard.path}") for shard in OLD.shards])
    assert resume(saved, 33, moved, 10) == before


@pytest.mark.parametrize(("done", "epoch"), [(33, 4), (30, 3), (0, 0)])
def test_grown_data_begin_the_next_epoch(done, epoch, caplog):
    saved = DataPosition(0, 0, 10).record(OLD)
    assert resume(saved, done, GROWN, 20) == DataPosition(done, epoch, 20)
    assert "changed from 2 shards to 3" in caplog.text


def test_removed_shards_begin_the_next_epoch():
    smaller = Manifest([OLD.shards[0], OLD.shards[1]._replace(removed=True)])
    saved = DataPosition(0, 0, 10).record(OLD)
    after = resume(saved, 33, smaller, 5)
    assert after == DataPosition(33, 4, 5)
    assert resume(after.record(smaller), 36, smaller, 5) == after
    assert resume(after.record(smaller), 36, OLD, 10) == DataPosition(36, 5, 10)


def test_other_data_are_refused():
    saved = DataPosition(0, 0, 10).record(GROWN)
    other = extend(None, [Shard("a.tar", 0, 50, 1), Shard("x.tar", 0, 50, 2), Shard("c.tar", 0, 100, 3)])
    for manifest in (OLD, other):
        with pytest.raises(UserError, match="written with other data"):
            resume(saved, 5, manifest, 10)
