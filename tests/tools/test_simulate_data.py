"""In the simulation, a large enough cache fetches no shard twice, and a slow link makes training wait."""

import numpy as np
import pytest
from simulate_data import Node, simulate

from neuclip_ds.data.interleave import Interleave, choose_interleave
from neuclip_ds.data.order import GlobalOrder

SHARDS = 240
SAMPLES = 100  # per shard
BYTES = 1000  # per shard


def order_of(streams: int, block: int) -> GlobalOrder:
    sizes = np.full(SHARDS, SAMPLES)
    return GlobalOrder(np.cumsum(sizes) - sizes, sizes, 80, 0, Interleave(streams, block))


def flow_of(order: GlobalOrder, cache: int, bandwidth: float = 1e9, nodes: int = 1, **options):
    node = Node(cache * BYTES, bandwidth, step_seconds=1.0)
    return simulate(order, np.full(SHARDS, BYTES), node, nodes, **options)


@pytest.mark.parametrize("nodes", [1, 4])
def test_shards_of_a_window_that_fits_are_fetched_once(nodes):
    flow = flow_of(order_of(8, 500), 120, nodes=nodes)
    assert not flow.is_estimate
    streams = 8 // nodes
    assert flow.amplification == pytest.approx(1)
    assert streams <= flow.first / BYTES <= streams * 6
    assert flow.resident <= 120 * BYTES
    assert flow.stalled == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("huge", [False, True], ids=["lognormal", "a few are huge"])
def test_a_cache_that_the_real_sizes_are_planned_for_fetches_nothing_twice(huge):
    shards = 1500
    if huge:
        sizes = np.where(np.arange(shards) % 100, 200, 6000)
    else:
        sizes = np.random.default_rng(0).lognormal(5, 1, shards).astype(int) + 1
    shard_bytes = sizes * 45
    cache = int(shard_bytes.sum() / 8)

    def order_with(interleave: Interleave) -> GlobalOrder:
        return GlobalOrder(np.cumsum(sizes) - sizes, sizes, 96, 0, interleave)

    interleave = choose_interleave(
        len(sizes),
        96,
        cache_bytes=cache,
        resident_bytes=lambda candidate, nodes: order_with(candidate).resident_bytes(shard_bytes, nodes),
    )
    flow = simulate(order_with(interleave), shard_bytes, Node(cache, 1e9, 1.0))
    assert not flow.is_estimate
    assert flow.amplification == pytest.approx(1, abs=0.03), "streams share shards"
    assert interleave.streams * interleave.block > sizes.sum() / 32, "the cache is used"


def test_a_slow_link_makes_training_wait():
    """A step of one second uses 0.8 shards, but the link transfers only 0.4 shards per second."""
    flow = flow_of(order_of(8, 500), 120, bandwidth=0.4 * BYTES)
    assert flow.stalled == pytest.approx(0.5, abs=0.08)
    assert flow.first_seconds == pytest.approx(flow.first / BYTES / 0.4, rel=0.3)
