"""Which shards are fetched ahead: all that batches read, no more than fits, in order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.request_window import RequestWindow
from neuclip_ds.data.shard_requests import ShardRequest


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(3, 20), st.integers(1, 12), st.booleans())
def test_the_window_holds_what_batches_read_and_never_more_than_fits(streams, block, capacity, staggered):
    sizes = np.full(12, 5)
    order = GlobalOrder(np.cumsum(sizes) - sizes, sizes, 8, 0, Interleave(4 // streams, block, staggered))
    requests = list(zip(range(400), order.shards_ahead(0, 0, [slice(0, 8)]), strict=False))
    window = RequestWindow((request for _, request in requests), [10] * 12, 10 * capacity)
    held: list[ShardRequest] = []
    for reached in range(3 * order.steps_per_epoch):
        held = [request for request in held if request.last >= reached] + window.move(reached, reached + 6)
        due = {request.shard for request in held if request.first <= reached}
        later = {request.shard for request in held} - due
        assert (window.in_use, window.ahead) == (10 * len(due), 10 * len(later))
        assert sorted(window.shards) == sorted(due | later)
        assert window.in_use + window.ahead <= 10 * capacity
        needed = set((order.batch(*divmod(reached, order.steps_per_epoch)) // 5).tolist()) - {-1}
        assert needed <= due or window.is_too_small


def test_later_shards_fill_half_of_the_cache():
    requests = [ShardRequest(0, 9, 0), ShardRequest(0, 9, 1), *(ShardRequest(5, 9, shard) for shard in range(2, 9))]
    window = RequestWindow(iter(requests), [10] * 9, 60)
    assert [request.shard for request in window.move(0, 100)] == [0, 1, 2, 3, 4]
    assert window.move(4, 100) == []
    assert [request.shard for request in window.move(5, 100)] == [5], "the cache is full"
    assert window.is_too_small
    assert window.move(10, 100) == []
    assert window.shards == []
