"""Check that an interleave fits in a node's cache, gives nodes separate streams, divides the batch and mixes well."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuclip_ds.data.interleave import Interleave, choose_interleave, in_gigabytes
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.errors import UserError

SAMPLE_BYTES = 45_000
DFN = np.full(19_200, 10_000)
DRAW = np.random.default_rng(0)
SHAPES = {  # sample counts of 1,000 shards
    "lognormal": DRAW.lognormal(6.4, 1, 1000).astype(int) + 1,
    "a few are huge": np.where(np.arange(1000) % 100 == 0, 30_000, 1000),
    "some are removed": np.where(np.arange(1000) % 3 == 0, 0, 1000),
}


def order_of(sizes: Sequence[int], batch: int, interleave: Interleave) -> GlobalOrder:
    return GlobalOrder(np.cumsum(sizes) - sizes, sizes, batch, 0, interleave)


def resident(sizes: Sequence[int], batch: int, interleave: Interleave, nodes: int = 1) -> int:
    return order_of(sizes, batch, interleave).resident_bytes(np.asarray(sizes) * SAMPLE_BYTES, nodes)


def choose(sizes: Sequence[int], batch: int, nodes: int = 1, cache: float | None = None, **options: Any) -> Interleave:
    def resident_bytes(interleave: Interleave, count: int) -> int:
        return resident(sizes, batch, interleave, count)

    options |= {"nodes": nodes, "cache_bytes": cache, "resident_bytes": resident_bytes}
    return choose_interleave(len(sizes), batch, **options)


@pytest.mark.parametrize(
    ("nodes", "cache", "window"),
    [(1, 1e12, 8), (32, 1e12, 16), (64, 1e12, 32), (64, 1e11, 25), (1, 1e11, 1.4)],
)
def test_windows_of_a_large_set_fit_the_caches_of_half_the_nodes(nodes, cache, window):
    found = choose(DFN, 4096, nodes, cache)
    assert window * 1e6 <= found.streams * found.block <= 1.2 * window * 1e6
    assert resident(DFN, 4096, found, -(-nodes // 2)) <= 0.9 * cache, "the run can move to half of the nodes"


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_real_sizes_of_shards_fit_the_cache(shape, nodes):
    sizes, batch = SHAPES[shape], 96
    cache = sizes.sum() * SAMPLE_BYTES / (10 * nodes)
    order = order_of(sizes, batch, choose(sizes, batch, nodes, cache))
    planned = order.resident_bytes(sizes * SAMPLE_BYTES, nodes)
    shards = np.searchsorted(np.cumsum(sizes), np.arange(sizes.sum()), side="right")
    share = -(-order.interleave.streams // nodes)
    used = []
    for within in range(0, int(order.stream_lengths.min()), 997):
        parts = [shards[order.samples(0, np.full(9, s), np.arange(9) + within)] for s in range(share)]
        used.append(sizes[np.unique(np.concatenate(parts))].sum() * SAMPLE_BYTES)
    assert max(used) <= planned <= 0.9 * cache


@settings(max_examples=3, deadline=None)
@example(batch_size=1437, nodes=77, cache=1e9, shards=32)  # each of 39 nodes needs fewer bytes than each of 77
@given(st.integers(2, 500), st.integers(1, 50), st.floats(1e9, 1e11), st.integers(1, 300))
def test_whatever_is_chosen_divides_the_batch_and_fits(batch_size, nodes, cache, shards):
    sizes = np.full(shards, 1000)
    try:
        found = choose(sizes, batch_size, nodes, cache)
    except UserError as error:
        assert "data.cache_gb=" in str(error)
        return
    assert batch_size % found.streams == 0
    assert found.streams <= max(64, nodes, shards)
    assert found.block >= 1
    assert resident(sizes, batch_size, found, nodes) <= cache


@pytest.mark.parametrize(
    ("millions", "nodes", "cache"),
    [(12, 8, None), (24, 32, None), (48, 64, None), (192, 64, None), (24, 32, 1e11), (48, 64, 1e11), (192, 64, 1e11)],
)
def test_neighbors_in_a_shard_are_mixed_as_well_as_by_mosaicml(millions, nodes, cache):
    """If a stream has N blocks, two neighbors in a shard share a batch N times as often as in a random permutation.

    MosaicML's py1e spreads the samples of a shard over at most max(4 million / nodes, 262,144) positions per node.
    """
    sizes = np.full(100 * millions, 10_000)
    found = choose(sizes, 4096, nodes, cache)
    order = order_of(sizes, 4096, found)
    blocks = 0
    for stream, length in enumerate(order.stream_lengths):
        end = 0
        while end < length:
            _, end = order.block_bounds(stream, end)
            blocks += 1
    assert blocks / found.streams <= order.n / (nodes * max(4e6 / nodes, 262_144))


@pytest.mark.parametrize(
    ("batch", "nodes", "streams"), [(4096, 64, 64), (4096, 128, 128), (3072, 3, 48), (4096, 3, 64)]
)
def test_nodes_read_streams_of_their_own_where_the_batch_allows_it(batch, nodes, streams):
    assert choose(DFN, batch, nodes).streams == streams


def test_what_the_user_has_chosen_is_kept():
    assert choose(DFN, 512, streams=16, block=100) == Interleave(16, 100)
    assert choose(DFN, 512, streams=16) == Interleave(16, 500_000)
    assert choose(DFN, 512, block=1000, cache=1e12) == Interleave(64, 1000)
    with pytest.raises(UserError, match=r"data.shard_streams=3 does not divide data.batch_size=8"):
        choose(DFN, 8, streams=3)


def test_a_cache_without_room_for_any_window_is_refused_with_the_size_that_suffices():
    sizes = np.full(1000, 1000)
    with pytest.raises(UserError, match=r"of 0.09 GB is too small .* set data.cache_gb=([\d.]+) or more") as error:
        choose(sizes, 64, cache=0.09e9)
    enough = float(str(error.value).partition("cache_gb=")[2].split()[0])
    assert enough < 0.3 and math.prod(choose(sizes, 64, cache=enough * 1e9)) < 1e5
    for option, options in (("shuffle_block_size", {"block": 1000}), ("shard_streams", {"streams": 64})):
        with pytest.raises(UserError, match=f"or more, or lower data.{option}"):
            choose(sizes, 64, cache=0.01e9, **options)


def test_a_size_in_gigabytes_has_no_exponent():
    assert [in_gigabytes(size) for size in (2.5e8, 99.96e9, 999.6e9, 1.2346e12)] == ["0.25", "100", "1000", "1235"]


def test_a_node_needs_the_shards_of_its_current_and_next_blocks():
    """Shards have 100 samples. A block of 100 may span two shards, and a node fetches the next two blocks early."""
    sizes = np.full(10, 100)
    assert 4 <= resident(sizes, 10, Interleave(2, 100)) / (100 * SAMPLE_BYTES) <= (2 + 2) * 2
    assert 2 <= resident(sizes, 10, Interleave(5, 100), nodes=5) / (100 * SAMPLE_BYTES) <= 3
    assert resident(sizes, 10, Interleave(5, 200)) == sizes.sum() * SAMPLE_BYTES, "there is no more"
