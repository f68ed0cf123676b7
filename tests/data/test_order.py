"""Check that orders are complete, mixtures keep their shares, and both are equal for all ranks and starting steps."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.mixture import MixtureOrder
from neuclip_ds.data.order import GlobalOrder, hash64, permute
from neuclip_ds.data.prefetch import shards_ahead
from neuclip_ds.errors import UserError


def order_of(sizes: list[int], batch_size: int, seed: int = 0, *interleave, **options) -> GlobalOrder:
    chosen = Interleave(*interleave) if interleave else None
    return GlobalOrder(np.cumsum([0, *sizes])[:-1], sizes, batch_size, seed, chosen, **options)


def epoch_of(order: GlobalOrder, epoch: int) -> np.ndarray:
    return np.concatenate([order.batch(epoch, step) for step in range(order.steps_per_epoch)])


@st.composite
def settings_of_orders(draw):
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
    assume(sum(sizes) >= 2)
    streams, rows_per_stream = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    interleave = draw(st.sampled_from([(), (streams, draw(st.integers(1, 60)))]))
    return sizes, streams * rows_per_stream, draw(st.integers(0, 2**63 - 1)), interleave


@settings(max_examples=40, deadline=None)
@given(settings_of_orders(), st.integers(0, 5))
def test_pad_takes_every_sample_exactly_once(case, epoch):
    sizes, batch_size, seed, interleave = case
    order = order_of(sizes, batch_size, seed, *interleave)
    assert order.steps_per_epoch == -(-sum(sizes) // batch_size)
    indices = epoch_of(order, epoch)
    assert indices.dtype == np.int64
    assert sorted(indices[indices >= 0]) == list(range(sum(sizes)))
    padding = np.flatnonzero(indices < 0)
    assert np.all(indices[padding] == -1)
    assert order.last_batch_size == (order.batch(epoch, order.steps_per_epoch - 1) >= 0).sum()
    assert np.all(padding >= (order.steps_per_epoch - 1) * batch_size), "padding is in the last batch only"


@settings(max_examples=25, deadline=None)
@given(settings_of_orders(), st.integers(0, 5))
def test_drop_has_no_padding_and_no_repeats(case, epoch):
    sizes, batch_size, seed, interleave = case
    assume(sum(sizes) >= batch_size)
    order = order_of(sizes, batch_size, seed, *interleave, drop_last=True)
    assert order.steps_per_epoch == sum(sizes) // batch_size
    assert order.last_batch_size == batch_size
    indices = epoch_of(order, epoch)
    assert indices.min() >= 0
    assert len(set(indices.tolist())) == len(indices) == order.steps_per_epoch * batch_size


def test_epochs_seeds_and_blocks_differ():
    orders = [epoch_of(order_of([50] * 8, 32, seed), epoch) for seed, epoch in itertools.product((0, 1), (0, 1, 2))]
    assert len({order.tobytes() for order in orders}) == len(orders)
    one_shard = epoch_of(order_of([400], 8, 0, 1, 100), 0)
    blocks = [block - block.min() for block in one_shard.reshape(4, 100)]
    assert all(sorted(block) == list(range(100)) for block in blocks)
    assert len({block.tobytes() for block in blocks}) == 4


def test_a_batch_takes_samples_from_all_streams():
    order = order_of([100] * 16, 64)
    assert order.interleave.streams == 16
    shards = order.batch(0, 0) // 100
    assert len(set(shards.tolist())) == 16


def test_impossible_orders_and_steps_are_refused():
    with pytest.raises(UserError, match="must be at least 0"):
        mixture_of([0, 0, 0])
    with pytest.raises(UserError, match=r"Source number 2 .* weight of 0\.001 out of a total of 3\.001, too little"):
        mixture_of([1, 0.001, 2])
    with pytest.raises(UserError, match="drop_last=true leaves no batch, because the 7 samples are fewer"):
        order_of([7], 8, drop_last=True)
    with pytest.raises(UserError, match="contains 1 sample, but at least 2"):
        order_of([1, 0], 8)
    with pytest.raises(IndexError, match="step 3"):
        order_of([10, 10], 8).batch(0, 3)


def test_orders_never_change():
    """A change would make checkpoints resume with a different order."""
    order, mixture = order_of([1000, 1, 0, 777, 1234, 90], 48, 7, 4, 200), mixture_of([3, 2, 1])
    epochs = [epoch_of(order, epoch) for epoch in (0, 1, 41)]
    steps = [np.array(at(mixture, number)) for number in (0, 8, 9, 77, 200)]
    found = [hashlib.sha256(b"".join(x.astype("<i8").tobytes() for x in one)).hexdigest() for one in (epochs, steps)]
    assert [digest[:32] for digest in found] == ["8db00d570d539e0946b932b7e3b7ee12", "5d2673c493a13f919a3df3b49ec49344"]


def test_permute_reaches_every_order_of_three_and_is_even():
    keys = hash64(np.arange(60_000))
    images = permute(np.arange(3)[None, :], np.array([[3]]), keys[:, None])
    _, counts = np.unique(images, axis=0, return_counts=True)
    assert len(counts) == 6
    assert np.all(np.abs(counts / 10_000 - 1) < 0.1)
    first = permute(np.zeros(1, dtype=np.int64), np.array([50]), keys)
    assert np.all(np.abs(np.bincount(first, minlength=50) / 1200 - 1) < 0.2)


@settings(max_examples=25, deadline=None)
@given(settings_of_orders(), st.booleans(), st.data())
def test_shards_ahead_are_those_of_the_batches(case, drop_last, data):
    sizes, batch_size, seed, interleave = case
    assume(not drop_last or sum(sizes) >= batch_size)
    order = order_of(sizes, batch_size, seed, *interleave, drop_last=drop_last)
    step = data.draw(st.integers(0, order.steps_per_epoch))
    rows = []
    for _ in range(data.draw(st.integers(1, 3))):  # a node's ranks need not be consecutive
        start = data.draw(st.integers(0, batch_size - 1))
        rows.append(slice(start, data.draw(st.integers(start + 1, batch_size))))
    assert_none_missing_or_late(order, sizes, 1, step, rows, epochs=4)


def assert_none_missing_or_late(
    order: GlobalOrder | MixtureOrder, sizes: Sequence[int], epoch: int, step: int, rows: list[slice], epochs: int
) -> float:
    """Check that each shard is requested by the time a batch reads it; return the fraction of requests never used."""
    begin, end = (order.steps_per_epoch * number for number in (epoch, epochs))
    requests = list(itertools.takewhile(lambda need: need.first < end, shards_ahead(order, epoch, step, rows)))
    firsts = [request.first for request in requests]
    assert firsts == sorted(firsts) and all(first >= begin + step for first in firsts)
    chosen = np.unique(np.concatenate([np.arange(order.batch_size)[part] for part in rows]))
    used = set()
    for number in range(begin + step, end):
        indices = order.batch(*divmod(number, order.steps_per_epoch))[chosen]
        for shard in set(np.searchsorted(np.cumsum(sizes), indices[indices >= 0], side="right").tolist()):
            found = [one for one in requests if one.shard == shard and one.first <= number <= one.last]
            assert found, (number, shard)
            used.update(found)
    return 1 - len(used) / max(1, len(requests))


@pytest.mark.parametrize("rows", [[slice(0, 64)], [slice(16, 24)], [slice(5, 50)], [slice(0, 4), slice(32, 36)]])
def test_shards_ahead_of_large_blocks_have_few_that_are_needless(rows):
    sizes = [1000, 0, 6000, 3000, 50, 2, 4500] * 3
    assert assert_none_missing_or_late(order_of(sizes, 64, 0, 8, 3000), sizes, 0, 30, rows, epochs=1) < 0.2


def test_shards_ahead_of_a_huge_set_begin_at_once():
    """Requests that start in the middle of an epoch of a billion samples need none of the batches before them."""
    sizes = np.full(100_000, 10_000)
    order = GlobalOrder(np.cumsum(sizes) - sizes, sizes, 4096)
    needs = list(itertools.islice(shards_ahead(order, 5, 200_000, [slice(64, 128)]), 150))
    steps = 5 * order.steps_per_epoch + 200_000
    assert needs[0].first == steps
    first_batch = set((order.batch(5, 200_000, slice(64, 128)) // 10_000).tolist())
    assert {need.shard for need in needs if need.first == steps} >= first_batch


SIZES = np.array([30, 50, 40, 25, 15, 64])
STARTS = np.cumsum(SIZES) - SIZES
SOURCE = np.array([0, 0, 0, 1, 1, 2])  # the source of each shard
SAMPLES = [120, 40, 64]  # the size of each source


def mixture_of(weights, batch_size=16, streams=4, block=20, seed=3) -> MixtureOrder:
    interleave = Interleave(streams, block)
    sizes = [np.where(source == SOURCE, SIZES, 0) for source in range(3)]
    sources = [GlobalOrder(STARTS, own, batch_size, seed, interleave) for own in sizes]
    return MixtureOrder(sources, weights, interleave)


def source_of(index: int) -> int:
    return int(SOURCE[np.searchsorted(STARTS, index, side="right") - 1])


def at(order: MixtureOrder, number: int) -> tuple[list[int], list[int]]:
    epochs, indices = order.epochs_and_indices(*divmod(number, order.steps_per_epoch))
    return epochs.tolist(), indices.tolist()


@settings(max_examples=5, deadline=None)
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


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([[3, 2, 1], [1, 0, 1], [1, 1, 1]]),
    st.integers(0, 30),
    st.integers(5, 40),
    st.sampled_from([[slice(0, 16)], [slice(4, 8)], [slice(0, 4), slice(12, 16)]]),
)
def test_shards_ahead_of_a_mixture(weights, begin, block, rows):
    order = mixture_of(weights, block=block)
    epoch, step = divmod(begin, order.steps_per_epoch)
    assert_none_missing_or_late(order, SIZES, epoch, step, rows, epochs=epoch + 3)
