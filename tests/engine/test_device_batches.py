"""Test the rows of device batches on a CPU, and the order of copies and computation with fake CUDA tensors."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch, part_rows
from neuclip_ds.engine.device_batches import DeviceBatches

ROWS, MICRO = 12, 4
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def rank_batch(parts: int, rows: int = ROWS) -> RankBatch:
    """Return a batch, split into parts, whose pixels and tokens are the row numbers."""
    number = torch.arange(rows)
    columns = (number.view(-1, 1, 1, 1).expand(-1, 3, 2, 2).byte(), number.view(-1, 1).expand(-1, 5), number)
    cut = [part_rows(rows, parts, part) for part in range(parts)]
    return RankBatch([Batch(*(c[r].clone() for c in columns), torch.ones(len(number[r])).bool()) for r in cut])


def to_device(batches: Iterable[RankBatch], micro: int = ROWS, device: torch.device = CPU) -> DeviceBatches:
    found = DeviceBatches(device, micro)
    found.start(iter(batches))
    return found


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("passes", [1, 2])
def test_micro_batches_contain_all_rows_in_order(parts: int, passes: int) -> None:
    """Micro-batches contain all rows in order, whether they lie within one part or span two parts."""
    batch = next(to_device([rank_batch(parts)], MICRO))
    assert (batch.host.index.tolist(), bool(batch.host.valid.all())) == (list(range(ROWS)), True)
    assert [(part.start, part.stop) for part in batch.rows] == [(0, 4), (4, 8), (8, 12)]
    seen = list(batch.micro_batches(passes))
    assert [(len(image), len(tokens)) for image, tokens in seen] == [(4, 4)] * 3 * passes
    assert torch.cat([image for image, _ in seen])[:, 0, 0, 0].tolist() == list(range(ROWS)) * passes
    assert torch.cat([tokens for _, tokens in seen])[:, 0].tolist() == list(range(ROWS)) * passes
    with pytest.raises(RuntimeError, match="released"):
        batch.host.pieces(slice(0, ROWS))


def test_on_a_cpu_no_batch_is_copied_or_fetched_early() -> None:
    host, taken = rank_batch(1), []
    address = host.pieces(slice(0, 1))[0][0].data_ptr()
    (image, _), *_ = next(to_device([host])).micro_batches(1)
    assert image.data_ptr() == address

    def batches() -> Iterator[RankBatch]:
        for number in range(3):
            taken.append(number)
            yield rank_batch(1)

    found = to_device(batches())
    for number, _ in enumerate(found):
        found.prefetch()
        assert taken == list(range(number + 1))


class Stream:
    """Fake CUDA stream that logs the events it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self._events = name, log, 0

    def record_event(self) -> int:
        self._events += 1
        return self._events - 1

    def wait_event(self, event: int) -> None:
        self._log.append(f"{self.name} waits for {event}")


class Event:
    """Fake CUDA event that reads its times from a log's clock."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def record(self) -> None:
        self.time = self._log.clock()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


class Log(TorchDispatchMode):
    """Log pixel copies to the device, and check that every copy is non-blocking and on the side stream."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.kept: list[str] = []  # streams passed to record_stream
        self.stream = "main"
        self.clock: Callable[[], float] = float

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        source = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}.get(func)
        if source is not None and result.device.type == "cuda":
            assert self.stream == "side"
            assert kwargs["non_blocking"] if source == 0 else args[2]
            if result.dtype == torch.uint8:
                self.calls.append(f"copy of {len(args[source])}")
        return result


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    log = Log()
    side, main = Stream("side", log.calls), Stream("main", log.calls)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, log.stream = log.stream, stream.name
        yield
        log.stream = before

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(log))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.kept.append(stream.name))
    with FakeTensorMode(), log:
        yield log


def test_the_next_batch_is_copied_while_a_step_is_computed(log: Log) -> None:
    batches = to_device((rank_batch(1) for _ in range(3)), device=CUDA)
    for number, batch in enumerate(batches):
        ((image, tokens),) = batch.micro_batches(1)
        assert {tensor.device.type for tensor in (image, tokens)} == {"cuda"}
        log.calls.append(f"step {number}")
        batches.prefetch()
    copy = f"copy of {ROWS}"
    steps = [[f"main waits for {n}", f"step {n}"] for n in range(3)]
    assert log.calls == [copy, *steps[0], copy, *steps[1], copy, *steps[2]]
    assert set(log.kept) == {"main"}
    assert len(log.kept) == 3 * 2


def test_the_next_micro_batch_is_copied_before_one_is_computed(log: Log) -> None:
    """With a batch in two parts, the device holds at most two micro-batches, in both passes and between steps."""
    hosts: list[RankBatch] = []

    def batches() -> Iterator[RankBatch]:
        for _ in range(2):
            hosts.append(rank_batch(2))
            yield hosts[-1]

    found = to_device(batches(), MICRO, CUDA)
    alive: list[weakref.ref[torch.Tensor]] = []
    micro_batches = next(found).micro_batches(2)
    for number in range(6):
        alive.append(weakref.ref(next(micro_batches)[0]))
        assert sum(image() is not None for image in alive) == 1, "of those that have been handed out"
        log.calls.append(f"compute {number}")
    in_parts = ["copy of 4"], ["copy of 2"] * 2, ["copy of 4"]
    wanted = [*in_parts[0]]
    for number in range(6):
        wanted += in_parts[(number + 1) % 3] if number < 5 else []
        wanted += [f"main waits for {number}", f"compute {number}"]
    assert log.calls == wanted
    with pytest.raises(RuntimeError, match="released"):  # freed to make room for the next batch
        hosts[0].pieces(slice(0, ROWS))
    found.prefetch()
    assert (len(hosts), log.calls[len(wanted) :]) == (2, ["copy of 4"])
    assert next(found).host is hosts[1]


def test_an_error_of_the_loader_is_raised_at_the_step_that_needs_the_batch(log: Log) -> None:
    def batches() -> Iterator[RankBatch]:
        yield rank_batch(1)
        raise OSError("storage")

    found = to_device(batches(), device=CUDA)
    assert len(next(found).host) == ROWS
    found.prefetch()
    with pytest.raises(OSError, match="storage"):
        next(found)


def test_only_time_in_which_nothing_computes_counts_as_waiting(log: Log) -> None:
    """The first wait is measured on the host; the second is the time that the device was idle."""
    now: list[float] = []

    def batches() -> Iterator[RankBatch]:
        for seconds in (3.0, 5.0):
            time.sleep(0.01)
            now.append(seconds)
            yield rank_batch(1)

    log.clock = lambda: sum(now)
    found = to_device(batches(), device=CUDA)
    assert 0.01 <= next(found).waited < 3
    found.prefetch()
    assert next(found).waited == 5
    found.start(batches())  # after a restart, the first wait is again measured on the host
    assert next(found).waited < 3
