"""Count the operations of the lean ZeRO 1 step and the bytes that it moves, on the simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benchmarking.run_loss import build_loss
from benchmarking.stored_rows import stored_shapes
from fake_cuda import DEVICE, FakeGpu, fake_cuda, fake_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.start import start_engine
from neuclip_ds.losses.base import Position
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.recipe import parse
from neuclip_ds.training.step import train_step

pytestmark = pytest.mark.usefixtures("quick_meta_models")
ROWS = 8
_ATEN = torch.ops.aten
_OVERWRITING = {_ATEN.copy_, _ATEN._foreach_copy_, _ATEN.zero_, _ATEN._foreach_zero_}  # do not read their destination


class EngineMeter(TorchDispatchMode):
    """Count the bytes that the engine moves after a backward pass and in the step, and all collectives.

    Attributes:
        active: whether the engine runs.
        bytes_moved: bytes that operations read and write; a tensor that one operation updates counts twice.
        bytes_of_step: the same of all operations, also outside the engine and in the backward pass.
        collectives: names of torch's collectives, and whether each starts during the backward pass.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self.active = False
        self.bytes_moved = 0
        self.bytes_of_step = 0
        self.collectives: list[tuple[str, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        launches_before = self._gpu.launches
        result = func(*args, **(kwargs or {}))
        is_in_backward_pass = self._gpu.differentiates
        if self.active and func.namespace == "c10d":
            self.collectives.append((func.overloadpacket.__name__, is_in_backward_pass))
        elif self._gpu.launches > launches_before:
            size = _bytes_moved(func, args, kwargs or {}, result)
            self.bytes_of_step += size
            if self.active and not is_in_backward_pass:
                self.bytes_moved += size
        return result

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Count during the block whenever `backward` or `step` of the engine runs."""
        for name in ("backward", "step"):
            setattr(engine, name, self._watched(getattr(engine, name)))
        with self:
            yield

    def _watched(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            self.active = True
            try:
                return method(*args)
            finally:
                self.active = False

        return call


def _bytes_moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    size = 0
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        argument_size = sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_written and func.overloadpacket in _OVERWRITING)
        size += argument_size * (is_read + is_written)
    if not func._schema.is_mutable:
        size += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    return size


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of a training step."""

    launches: int  # of the whole step
    bytes_moved: int  # in the whole step
    bytes_per_parameter: float  # moved by the engine after the backward pass and in the step
    collectives: list[tuple[str, bool]]  # of the engine: names, and whether each starts during the backward pass
    waits: int  # of the host for the device, in the whole step


def costs(lean: bool, ranks: int, *options: str, rows: int = ROWS, stored_width: int | None = None) -> StepCosts:
    """Return the costs of the second step of `openclip` with the model ViT-B/16.

    `rows` is the number of pairs per rank. With `stored_width`, the step has a reference model of this width.
    """
    switch = f"--optimizer.lean_zero1={'true' if lean else 'false'}"
    batch = f"--data.batch_size={rows * ranks}"
    model_options = ["models/vitb16", "--objective.method=openclip", "--deepspeed=zero1_bf16", batch, switch, *options]
    query = MemoryQuery(parse(model_options).config, ranks)
    config = query.config
    meta_model = query.build()
    with fake_cuda() as gpu, fake_ranks(0, ranks):
        model: Any = meta_model.to_empty(device=DEVICE)
        model.to = lambda *_: model  # has references, so must not move again
        communicator = Communicator(DEVICE)
        engine = start_engine(model, config.optimizer, load_engine_config(config, ranks), communicator)
        loss = build_loss(config, query.source.embed_dim, 100_000, communicator, torch.bfloat16)
        batches = DeviceBatches(DEVICE, query.micro_batch)
        image = torch.zeros(rows, 3, query.image_size, query.image_size, dtype=torch.uint8).pin_memory()
        tokens = torch.zeros(rows, query.tokenizer.context_length, dtype=torch.int64).pin_memory()
        shapes = stored_shapes(config, stored_width)
        generator = torch.Generator().manual_seed(0)
        stored = {name: shape.random_rows(rows, generator) for name, shape in shapes.items()}
        valid = torch.ones(rows, dtype=torch.bool)
        batch_of_rank = Batch(image, tokens, torch.arange(rows), valid, stored=stored)
        meter = EngineMeter(gpu)
        with meter.watching(engine):
            for number in range(2):
                gpu.launches = 0
                gpu.syncs.clear()
                meter.bytes_moved = 0
                meter.bytes_of_step = 0
                meter.collectives.clear()
                batches.start(iter([RankBatch([batch_of_rank])]))
                position = Position(step=number, lr=1e-3, peak_lr=1e-3)
                assert train_step(engine, loss, batches, next(batches), position).applied
        size = sum(weight.numel() for weight in model.parameters())
    waits = gpu.syncs.total()
    return StepCosts(
        launches=gpu.launches,
        bytes_moved=meter.bytes_of_step,
        bytes_per_parameter=meter.bytes_moved / size,
        collectives=meter.collectives,
        waits=waits,
    )


SHALLOW = ('--model.vision.options={"depth":1}', "--model.text.layers=1")


def test_the_lean_step_launches_less_moves_less_and_waits_once() -> None:
    deepspeeds = costs(False, 1, *SHALLOW)
    lean = costs(True, 1, *SHALLOW)
    assert lean.launches < 0.75 * deepspeeds.launches
    assert lean.bytes_per_parameter <= 50 < 80 < deepspeeds.bytes_per_parameter
    assert lean.waits == 1


def test_most_buckets_are_reduced_during_the_backward_pass() -> None:
    """A bucket is reduced to the ranks that store it; afterward, the norms are summed, and the weights are gathered."""
    collectives = costs(True, 8, *SHALLOW).collectives
    names = [name for name, _ in collectives]
    sums = names[:-3]
    assert set(sums) == {"reduce_", "_reduce_scatter_base_"}
    assert names[-3:] == ["allreduce_", "_allgather_base_", "_allgather_base_"]
    in_backward_pass = [overlaps for _, overlaps in collectives[: len(sums)]]
    assert sum(in_backward_pass) > 0.5 * len(sums)
    assert in_backward_pass == sorted(in_backward_pass, reverse=True)


def test_an_engine_of_zero3_leaves_later_engines_unchanged() -> None:
    launches_before = costs(False, 1, *SHALLOW).launches
    costs(False, 1, *SHALLOW, "--deepspeed=zero3_bf16")
    assert costs(False, 1, *SHALLOW).launches == launches_before


@pytest.mark.slow
def test_a_step_of_vitb16_has_half_of_deepspeeds_launches() -> None:
    lean = costs(True, 1)
    assert lean.launches <= 1_060  # with DeepSpeed's step: 2,115
    assert lean.bytes_per_parameter <= 50


REFERENCE = ("--objective.method=fastclip_v1", "--objective.reference_model=not-read")


def test_a_reference_model_adds_few_launches_and_bytes_to_a_step() -> None:
    """The added costs do not depend on the towers' depth; a step of a whole ViT-B/16 has about 2,100 launches."""
    plain = costs(False, 8, *SHALLOW, "--objective.method=fastclip_v1", rows=640)
    steered = costs(False, 8, *SHALLOW, *REFERENCE, rows=640, stored_width=512)
    assert steered.launches - plain.launches <= 0.03 * 2_100
    assert steered.bytes_moved <= 1.03 * plain.bytes_moved


@pytest.mark.slow
def test_a_reference_model_adds_at_most_3_percent_to_a_step_of_vitb16() -> None:
    plain = costs(False, 8, "--objective.method=fastclip_v1", rows=640)
    steered = costs(False, 8, *REFERENCE, rows=640, stored_width=512)
    assert steered.launches <= 1.03 * plain.launches
    assert steered.bytes_moved <= 1.03 * plain.bytes_moved
