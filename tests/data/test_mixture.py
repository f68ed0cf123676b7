"""Mixtures: every source in its share, each sample once per epoch of its source, from any step on."""

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.mixture import MixtureOrder
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import shards_ahead
from neuclip_ds.errors import UserError

SIZES = np.array([30, 50, 40, 25, 15, 64])
STARTS = np.cumsum(SIZES) - SIZES
SOURCE = np.array([0, 0, 0, 1, 1, 2])  # of each shard
SAMPLES = [120, 40, 64]  # of each source


def mixture_of(weights, batch_size=16, streams=4, block=20, seed=3) -> MixtureOrder:
    interleave = Interleave(streams, block)
    sizes = [np.where(source == SOURCE, SIZES, 0) for source in range(3)]
    sources = [GlobalOrder(STARTS, own, batch_size, seed, interleave) for own in sizes]
    return MixtureOrder(sources, weights, interleave)


def shard_of(index: int) -> int:
    return int(np.searchsorted(STARTS, index, side="right")) - 1


def source_of(index: int) -> int:
    return int(SOURCE[shard_of(index)])


def at(order: MixtureOrder, number: int) -> tuple[list[int], list[int]]:
    visits, indices = order.visits(*divmod(number, order.steps_per_epoch))
    return visits.tolist(), indices.tolist()


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any),
    st.sampled_from([(16, 4), (12, 1), (24, 24), (20, 5)]),
)
def test_each_stream_of_a_source_is_visited_once_an_epoch(weights, shape):
    order = mixture_of(weights, *shape)
    seen = Counter(itertools.chain(*(zip(*at(order, number), strict=True) for number in range(80))))
    assert set(seen.values()) == {1}, "no sample twice in an epoch of its source"
    visited = Counter(source_of(index) for _, index in seen)
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(visited[source] / (80 * shape[0]) - share) <= 1 / shape[0]
        n = SAMPLES[source]
        for epoch in range(visited[source] // n - shape[1] - 1):
            assert sum(key[0] == epoch and source_of(key[1]) == source for key in seen) == n, "all samples"


def test_ranks_and_starts_do_not_matter():
    order, other = mixture_of([3, 2, 1]), mixture_of([3, 2, 1])
    for number in (40, 3, 9):
        epoch, step = divmod(number, order.steps_per_epoch)
        parts = [other.batch(epoch, step, slice(start, start + 4)) for start in range(0, 16, 4)]
        assert np.array_equal(np.concatenate(parts), order.batch(epoch, step))


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([[3, 2, 1], [1, 0, 1], [1, 1, 1]]),
    st.integers(0, 30),
    st.integers(5, 40),
    st.sampled_from([[slice(0, 16)], [slice(4, 8)], [slice(0, 4), slice(12, 16)]]),
)
def test_shards_ahead_are_those_of_the_batches(weights, begin, block, rows):
    order = mixture_of(weights, block=block)
    requests = shards_ahead(order, *divmod(begin, order.steps_per_epoch), rows)
    found = list(itertools.takewhile(lambda request: request.first < begin + 40, requests))
    assert [request.first for request in found] == sorted(request.first for request in found)
    assert not found or found[0].first >= begin
    for number in range(begin, begin + 40):
        batch = np.concatenate([order.batch(*divmod(number, order.steps_per_epoch), part) for part in rows])
        for shard in {shard_of(index) for index in batch.tolist()}:
            assert any(one.shard == shard and one.first <= number <= one.last for one in found)


def test_golden_order():
    """The order must never change: every checkpoint would resume into another one."""
    order = mixture_of([3, 2, 1])
    digest = hashlib.sha256(
        b"".join(np.array(at(order, number), dtype="<i8").tobytes() for number in (0, 8, 9, 77, 200))
    )
    assert digest.hexdigest()[:32] == "5d2673c493a13f919a3df3b49ec49344"


def test_weights_that_are_all_zero():
    with pytest.raises(UserError, match="not positive"):
        mixture_of([0, 0, 0])
