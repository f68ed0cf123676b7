"""DeepSpeed's engine to and from `StateFiles`: any world size, ZeRO stage and precision reads what any other wrote.

DeepSpeed keeps masters and moments in five ways. Each is described here by `_Place`s, which say where on this rank
which elements of which parameter are; everything else is the same for all of them.

What is kept: float32 master weights (weights themselves where there are no others, as with frozen parameters), the
optimizer's tensors and scalars, the module's persistent buffers (rank 0's, where ranks differ, as in batch norm),
and DeepSpeed's counts of steps and samples. Hyper-parameters are the config's and no part of it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import (
    WEIGHT,
    StateFiles,
    StateShard,
    write_buffers,
    write_index,
    write_state_shards,
)
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.state.partition import Partition

log = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class _Place(NamedTuple):
    """Elements [start, stop) of the flattened parameter `name` are [offset, offset + stop - start) of `home`.

    Empty where this rank holds nothing of a parameter that belongs to its home's group.
    """

    name: str
    start: int
    stop: int
    home: Tensor  # what the optimizer steps on; a frozen parameter's weights
    offset: int
    everywhere: bool  # all ranks hold the same

    def within(self, tensor: Tensor) -> Tensor:
        """(stop - start,) view of home, or of a tensor that is laid out as home is."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.stop - self.start]

    def share(self, communicator: Communicator) -> _Place:
        """The part that this rank writes: all of it, or its share of what all ranks hold."""
        if not self.everywhere:
            return self
        part = Partition.of(self.stop - self.start, communicator.rank, communicator.world_size)
        start, stop, offset = self.start + part.start, self.start + part.stop, self.offset + part.start
        return self._replace(start=start, stop=stop, offset=offset)


def save_engine(folder: Path, engine: Any, communicator: Communicator) -> None:
    """Writes weights and optimizer state, on all ranks together, into an existing folder.

    Only fragments on another device than the CPU are copied, one at a time.
    """
    save = communicator.on_rank_zero(lambda: secrets.token_hex(8))
    world_size, rank = communicator.world_size, communicator.rank
    write_state_shards(folder, rank, world_size, save, list(_state_shards(engine, communicator)))
    if rank == 0:
        write_buffers(folder, save, _buffers(engine.module))
        counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
        write_index(folder, world_size, save, _shapes(engine.module), counters, _kind_of(engine, communicator))


def load_engine(folder: Path, engine: Any, communicator: Communicator) -> None:
    """Fills a freshly built engine, on all ranks together, from what any number of ranks of any ZeRO stage wrote.

    Raises:
        UserError: the files are missing, damaged or of another model; on all ranks, whoever has met it.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.checkpoint_event_prologue()  # frees the gathered copies of what is about to change
    problem = None
    try:
        files = StateFiles(folder)
        _check_parameters(files, engine.module)
        _fill(files, engine, communicator)
        _fill_buffers(files, engine.module)
    except UserError as error:
        problem = str(error)
    communicator.agree(problem)
    _refresh_weights(optimizer)
    for name in _COUNTERS:
        setattr(engine, name, files.counters[name])
    now = _kind_of(engine, communicator)
    if files.written_by != now:
        log.info("%s was written by %s and is read by %s", folder, *(_in_words(x) for x in (files.written_by, now)))


def load_moments(folder: Path, engine: Any, communicator: Communicator) -> None:
    """Fills the optimizer's state of a freshly built engine, on all ranks together, and leaves the weights.

    Raises:
        UserError: as `load_engine`, or the files' weights are not the engine's; on all ranks.
    """
    problem = None
    try:
        files = StateFiles(folder)
        _check_parameters(files, engine.module)
        _check_weights(files, engine, communicator)
        _fill(files, engine, communicator, weights=False)
    except UserError as error:
        problem = str(error)
    communicator.agree(problem)


def _check_weights(files: StateFiles, engine: Any, communicator: Communicator) -> None:
    for place in _places(engine, communicator):
        found = files.read(place.name, WEIGHT, place.start, place.stop)
        if not torch.equal(found, place.within(place.home).cpu()):
            raise UserError(
                f"{files.folder} belongs to other weights than this run starts from ({place.name} differs): name the "
                "model.pretrained and the precision that it was recovered with."
            )


def _state_shards(engine: Any, communicator: Communicator) -> Iterator[StateShard]:
    """What this rank writes, as views."""
    for place in _places(engine, communicator):
        state = engine.basic_optimizer.state.get(place.home, {})
        tensors = {kind: value for kind, value in state.items() if isinstance(value, Tensor)}
        part = place.share(communicator)
        if part.start < part.stop:
            yield StateShard(WEIGHT, part.name, part.start, part.stop, part.within(part.home))
        for kind, value in tensors.items():
            if value.ndim == 0 and communicator.rank == 0:
                yield StateShard(kind, part.name, 0, 0, value)
            elif value.ndim and part.start < part.stop:
                yield StateShard(kind, part.name, part.start, part.stop, part.within(value))


@torch.no_grad()
def _fill(files: StateFiles, engine: Any, communicator: Communicator, weights: bool = True) -> None:
    """Optimizer state and, if asked for, masters of this rank; padding becomes zero."""
    homes: dict[int, list[_Place]] = {}
    for place in _places(engine, communicator):
        homes.setdefault(id(place.home), []).append(place)
    for places in homes.values():
        home = places[0].home
        trained = places if home.requires_grad else []
        scalars = {kind: value for place in trained for kind, value in files.scalars(place.name).items()}
        kinds = {kind for place in trained for kind in files.kinds(place.name)} - {WEIGHT}
        state = {kind: torch.zeros_like(home) for kind in sorted(kinds)}
        for kind, whole in ({WEIGHT: home.zero_(), **state} if weights else state).items():
            for place in places:
                if place.start < place.stop and (kind == WEIGHT or kind in files.kinds(place.name)):
                    place.within(whole).copy_(files.read(place.name, kind, place.start, place.stop))
        if state or scalars:
            engine.basic_optimizer.state[home] = {**scalars, **state}


def _places(engine: Any, communicator: Communicator) -> Iterator[_Place]:
    """All that this rank holds of all parameters."""
    optimizer, module, rank = engine.optimizer, engine.module, communicator.rank
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    sharded = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    if sharded:
        for group, home in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            offset = 0
            for parameter in group:
                yield _shard(names[id(parameter)], parameter, home, offset, rank)
                offset += parameter.partition_numel()
    elif isinstance(optimizer, BF16_Optimizer):
        for group, home in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
            offsets = list(accumulate((parameter.numel() for parameter in group), initial=0))[:-1]
            yield from _cut(group, offsets, home, rank, names)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        groups = optimizer.round_robin_bit16_groups
        homes, starts = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_offsets
        for group, offsets, home in zip(groups, starts, homes, strict=True):
            yield from _cut(group, offsets, home, rank, names)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for group, homes in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, home in zip(group, homes, strict=True):
                yield _whole(names[id(parameter)], home)
    else:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield _whole(names[id(parameter)], parameter)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            yield _shard(name, parameter, parameter.ds_tensor, 0, rank) if sharded else _whole(name, parameter)


def _whole(name: str, home: Tensor) -> _Place:
    return _Place(name, 0, home.numel(), home, 0, everywhere=True)


def _shard(name: str, parameter: Any, home: Tensor, offset: int, rank: int) -> _Place:
    """ZeRO 3 cuts each parameter into equal shards, the last of which are padded."""
    start, stop = (min(edge * parameter.partition_numel(), parameter.ds_numel) for edge in (rank, rank + 1))
    return _Place(name, start, stop, home, offset, everywhere=False)


def _cut(group: list[Any], offsets: list[int], home: Tensor, rank: int, names: dict[int, str]) -> Iterator[_Place]:
    """ZeRO 1 and 2 lay a group's parameters end to end, each at its offset, and cut that into equal shards."""
    first, end = rank * home.numel(), (rank + 1) * home.numel()
    for parameter, offset in zip(group, offsets, strict=True):
        start = min(max(first - offset, 0), parameter.numel())
        stop = max(min(end - offset, parameter.numel()), start)
        yield _Place(names[id(parameter)], start, stop, home, offset + start - first, everywhere=False)


def _refresh_weights(optimizer: Any) -> None:
    """Casts the new masters to the weights that the module computes with, on all ranks."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        # Nothing is gathered yet, as in a new engine: its first forward pass notes which parameters a module reads of
        # its children (CLIP's position embedding) by finding them absent, and fetches those in time from then on.
        optimizer.invalidate_secondary_tensor()
    elif isinstance(optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for group, homes in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, home in zip(group, homes, strict=True):
                parameter.data.copy_(home.data)


def _shapes(module: Any) -> dict[str, list[int]]:
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}


def _check_parameters(files: StateFiles, module: Any) -> None:
    found = {name: list(files.shape(name)) for name in files.names()}
    wanted = _shapes(module)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"{files.folder} has the parameter {name} in the shape {found.get(name)}, this run's model in "
                f"{wanted.get(name)}: set model.* back, or give the run another name (--run.name)."
            )


def _buffers(module: Any) -> dict[str, Tensor]:
    """The persistent ones."""
    kept = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


@torch.no_grad()
def _fill_buffers(files: StateFiles, module: Any) -> None:
    buffers, found = _buffers(module), files.buffers()
    if missing := sorted(buffers.keys() - found.keys()):
        raise UserError(
            f"{files.folder} lacks the buffers {missing} of this run's model: set model.* back, or give the run "
            "another name (--run.name)."
        )
    for name, buffer in buffers.items():
        buffer.copy_(found[name])


def _kind_of(engine: Any, communicator: Communicator) -> dict[str, Any]:
    precision = "bf16" if engine.bfloat16_enabled() else "fp32"
    return {
        "world_size": communicator.world_size,
        "zero_stage": int(engine.zero_optimization_stage()),
        "precision": precision,
    }


def _in_words(kind: dict[str, Any]) -> str:
    return f"{kind['world_size']} ranks (ZeRO {kind['zero_stage']}, {kind['precision']})"
