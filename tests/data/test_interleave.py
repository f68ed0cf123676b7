"""The interleave fits the cache of a node, gives each node its own streams and divides the batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuclip_ds.data.interleave import DataSize, Interleave, choose_interleave
from neuclip_ds.errors import UserError

DFN = DataSize(192_000_000, 19_200, 19_200 * 450_000_000)
TB = 1e12


@pytest.mark.parametrize(
    ("nodes", "cache", "window"),
    [(1, 1.0, 8), (8, 1.0, 8), (64, 1.0, 16), (64, 0.9, 8), (1, 0.2, 2), (8, 0.2, 2), (64, 0.1, 2), (1, 0.1, 1)],
)
def test_windows_of_dfn(nodes, cache, window):
    found = choose_interleave(DFN, 5120, nodes=nodes, cache_bytes=cache * TB)
    assert (found.streams, found.streams * found.block) == (64, window * 1_000_000)
    assert DFN.resident_bytes(found, nodes) <= 0.8 * cache * TB


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 3000), st.integers(1, 200), st.floats(1e9, 1e13), st.integers(1, 50_000))
def test_whatever_is_chosen_divides_the_batch_and_fits(batch_size, nodes, cache, shards):
    data = DataSize(shards * 1000, shards, shards * 45_000_000)
    try:
        found = choose_interleave(data, batch_size, nodes=nodes, cache_bytes=cache)
    except UserError as error:
        assert "data.cache_gb=" in str(error)
        return
    assert batch_size % found.streams == 0
    assert found.streams <= max(64, nodes, shards)
    assert found.block >= 1
    assert data.resident_bytes(found, nodes) <= cache


@pytest.mark.parametrize(
    ("batch", "nodes", "streams"), [(4096, 64, 64), (4096, 128, 128), (3072, 3, 48), (4096, 3, 64)]
)
def test_nodes_read_streams_of_their_own_where_the_batch_allows_it(batch, nodes, streams):
    assert choose_interleave(DFN, batch, nodes=nodes).streams == streams


def test_what_the_user_has_chosen_is_kept():
    assert choose_interleave(DFN, 512, streams=16, block=100) == Interleave(16, 100)
    assert choose_interleave(DFN, 512, streams=16) == Interleave(16, 500_000)
    assert choose_interleave(DFN, 512, block=1000) == Interleave(64, 1000)
    with pytest.raises(UserError, match=r"data.shard_streams=3 does not divide data.batch_size=8"):
        choose_interleave(DFN, 8, streams=3)


def test_a_cache_that_can_hold_no_window():
    with pytest.raises(UserError, match=r"of 1 GB is too small .* set data.cache_gb=1.15 or more"):
        choose_interleave(DFN, 512, cache_bytes=1e9)
    assert choose_interleave(DFN, 512, cache_bytes=1.15e9).streams == 1


def test_what_a_node_needs():
    """10 shards of 100 samples and 1 kB; a block begins and ends within a shard."""
    data = DataSize(1000, 10, 10_000)
    assert data.resident_bytes(Interleave(2, 100)) == (2 + 2) * 2 * 1000
    assert data.resident_bytes(Interleave(5, 100), nodes=5) == (1 + 1) * 2 * 1000
    assert data.resident_bytes(Interleave(5, 100)) == 10_000, "there is no more"
