"""Tables for random access: forked processes have no part of them, which would copy each page that is written to."""

import mmap
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.state.sample_store import SampleStore, random_access_table

ROWS = 1 << 20  # 8 MB of two float32


@contextmanager
def forked_process() -> Iterator[None]:
    """A copy of this process that waits, as a loader worker does."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def faults_of_writing(table: torch.Tensor) -> int:
    """Page faults of a write to every 512th row, one in each page of 4 KB."""
    index = torch.arange(0, len(table), 512)
    value = torch.ones(len(index), 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    table.index_copy_(0, index, value)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_page_is_copied_while_a_forked_process_lives() -> None:
    pages = ROWS // 512
    plain, table = torch.zeros(ROWS, 2), random_access_table(ROWS, 2, torch.float32)
    plain.fill_(1.0)
    table.fill_(1.0)
    with forked_process():
        assert faults_of_writing(plain) > 0.9 * pages, "the table of torch is copied: else this test proves nothing"
        assert faults_of_writing(table) < 0.1 * pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_a_tensor_of_zeros(dtype: torch.dtype) -> None:
    table = random_access_table(3, 2, dtype)
    assert torch.equal(table, torch.zeros(3, 2, dtype=dtype))
    table[1] = 5.0
    assert table.sum() == 10


def test_a_forked_process_is_refused() -> None:
    store = SampleStore(10, {"u": 1.0}, Communicator())
    index = torch.tensor([3])
    assert store.begin_read(index).wait().item() == 1.0
    child = os.fork()
    if child == 0:
        try:
            store.begin_read(index)
        except UserError as error:
            os._exit(7 if "create the loss where you train" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_table_larger_than_the_address_space_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"4,000,000.0 GB of this rank's per-sample statistics cannot be allocated"):
        random_access_table(10**15 // 2, 2, torch.float32)


def test_a_kernel_without_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    monkeypatch.delattr(mmap, "MADV_DONTFORK")
    assert random_access_table(2, 2, torch.float32).tolist() == [[0, 0], [0, 0]]
