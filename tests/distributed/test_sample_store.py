"""Check the per-sample store on real ranks: each rank reads its samples, whichever rank stores them."""

import math
from typing import Any

import pytest
import torch
from build import columns
from neuclip_ds.state.sample_store import SampleStore
from ranks import run_ranks

from neuclip_ds.distributed.communicator import Communicator

FIELDS = {"log_u_image": -math.inf, "log_u_text": -math.inf}


def visit(communicator: Communicator) -> dict[str, Any]:
    store = SampleStore(10, FIELDS, communicator)
    index = torch.tensor([7, 0, -1, 9])  # -1: an empty row
    before = store.begin_read(index).wait()
    values = torch.arange(8.0).reshape(4, 2)
    store.write(index, values)
    return {
        "before": before,
        "after": store.begin_read(index.flip(0)).wait(),
        "rows": store.rows(),
        "bytes": communicator.traffic["state"].bytes_sent,
    }


def test_two_ranks_read_what_was_written() -> None:
    first, second = run_ranks(2, visit)
    assert torch.isneginf(first["before"]).all()
    assert torch.isneginf(second["before"][1]).all()
    assert torch.equal(second["before"][0], torch.zeros(2)), "an empty row reads zeros"
    assert torch.equal(torch.cat([first["after"], second["after"]]), torch.tensor([[6.0, 7], [0, 0], [2, 3], [0, 1]]))
    ours, theirs = (rank["rows"].tensors["log_u_image,log_u_text"] for rank in (first, second))
    assert ours.shape == theirs.shape == (5, 2)
    assert ours[0].tolist() == [2, 3]
    assert theirs[2:, 0].tolist() == [0, -math.inf, 6]
    assert torch.isneginf(torch.cat([ours[1:], theirs[:2]])).all()
    assert first["bytes"] == 2 * 2 * 2 * 4  # two reads of (B/K, f) float32


def test_one_rank_needs_no_group() -> None:
    found = visit(Communicator())
    assert torch.equal(found["after"], torch.tensor([[6.0, 7], [0, 0], [2, 3], [0, 1]]))


@pytest.mark.gpu
def test_a_table_in_host_memory_equals_one_on_the_device(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU")
    communicator = Communicator("cuda")
    stores = [SampleStore(10, FIELDS, communicator, max_device_bytes=size) for size in (0, 1 << 20)]
    for number in range(3):
        index = torch.tensor([7, number, -1, 7])
        for store in stores:
            store.write(index, torch.rand(4, 2, generator=torch.Generator().manual_seed(number)).cuda())
            if number == 1:
                store.undo()
        reads = [store.begin_read(index).wait() for store in stores]
        assert torch.equal(*reads)
        assert torch.equal(*(columns(store.rows())["log_u_text"].cpu() for store in stores))
