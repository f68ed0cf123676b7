"""The order of a run is chosen once: checkpoints keep it, those of earlier versions too."""

from __future__ import annotations

import numpy as np
import pytest

from neuclip_ds.config import Config
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Manifest, Shard, extend
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse
from neuclip_ds.training.data_order import SavedOrder, open_order, order_facts, with_order
from neuclip_ds.training.trainer import fingerprint

LOCAL = extend(None, [Shard(f"/data/{number}.tar", 0, 100, 4_500_000) for number in range(60)])
REMOTE = Manifest([shard._replace(path=f"s3://bucket{shard.path}") for shard in LOCAL.shards])


def config_of(*options: str) -> Config:
    return parse(["demo", "--data.batch_size=32", *options]).config


def test_a_new_run_keeps_what_was_chosen_in_its_config_and_facts():
    config = config_of()
    order = open_order(config, LOCAL)
    assert order.interleave == Interleave(32, 250_000)
    chosen = with_order(config, order.interleave)
    assert (chosen.data.shard_streams, chosen.data.shuffle_block) == (32, 250_000)
    facts = {**fingerprint(chosen), **order_facts(order.interleave)}
    assert {name: facts[name] for name in ("shard_streams", "shuffle_block", "order")} == {
        "shard_streams": 32,
        "shuffle_block": 250_000,
        "order": 2,
    }
    assert "shard_streams" not in fingerprint(config), "what is not asked for is not compared"
    again = open_order(config, LOCAL, nodes=7, saved=SavedOrder(facts, 60))
    assert np.array_equal(again.batch(1, 3), order.batch(1, 3))


def test_a_run_of_an_earlier_version_keeps_its_order():
    saved = SavedOrder({"shard_streams": None, "shuffle_block": 300}, 60)
    order = open_order(config_of(), LOCAL, saved=saved)
    assert order.interleave == Interleave(32, 300, staggered=False)
    golden = GlobalOrder(LOCAL.starts, LOCAL.sizes, 32, 0, Interleave(32, 300, False))
    assert np.array_equal(order.batch(2, 5), golden.batch(2, 5))
    assert open_order(config_of("--data.shuffle_block=300"), LOCAL, saved=saved).interleave == order.interleave
    resaved = SavedOrder(order_facts(order.interleave), 60)
    assert open_order(config_of(), LOCAL, saved=resaved).interleave == order.interleave


@pytest.mark.parametrize("option", ["shard_streams=16", "shuffle_block=10"])
def test_another_order_than_that_of_the_checkpoint_is_refused(option):
    saved = SavedOrder(order_facts(Interleave(32, 300)), 60)
    with pytest.raises(UserError, match=rf"but this start has data\.{option}"):
        open_order(config_of(f"--data.{option}"), LOCAL, saved=saved)


def test_a_cache_that_is_too_small_is_refused_at_first_and_reported_later(caplog):
    """60 shards of 4.5 MB."""
    explicit = ["--data.cache_gb=0.1", "--data.shard_streams=32", "--data.shuffle_block=1000"]
    with pytest.raises(UserError, match=r"0.27 GB .* set data.shard_streams=\d+ and data.shuffle_block=\d+"):
        open_order(config_of(*explicit), REMOTE)
    saved = SavedOrder(order_facts(Interleave(32, 1000)), 60)
    assert open_order(config_of("--data.cache_gb=0.1"), REMOTE, saved=saved).interleave == Interleave(32, 1000)
    assert "fetched again and again: set data.cache_gb=0.27 or more" in caplog.text
    fitting = open_order(config_of("--data.cache_gb=0.1"), REMOTE).interleave
    assert fitting.window < 6000
    assert "only" in caplog.text
    assert "samples are shuffled together" in caplog.text
