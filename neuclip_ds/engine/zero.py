"""Locate the weights in DeepSpeed's engine; only this module reads the engine's private fields.

The fields are those of the DeepSpeed version that `engine/config.py` requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple

import deepspeed
import deepspeed.utils.groups
import torch
from torch import Tensor, nn

from neuclip_ds.distributed.communicator import Communicator


class Wrapper(Enum):
    """DeepSpeed's wrapper around the optimizer; the values are class names."""

    NONE = ""  # the optimizer alone: float32 without ZeRO
    UNFUSED = "FP16_UnfusedOptimizer"  # bf16 without ZeRO: every rank has all float32 masters
    BF16 = "BF16_Optimizer"  # ZeRO 1 in bf16: float32 gradients of all parameters in one buffer, masters partitioned
    ZERO_1_2 = "DeepSpeedZeroOptimizer"
    ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"


class Placement(NamedTuple):
    """Where this rank stores elements [start, stop) of the flattened parameter `name`; the range may be empty.

    In the flattened `master`, the same elements are at [offset, offset + stop - start).
    """

    name: str
    start: int
    stop: int
    master: Tensor  # the tensor that the optimizer updates; for a frozen parameter, its weights
    offset: int
    replicated: bool  # whether all ranks store the same elements

    @property
    def elements(self) -> slice:
        """The slice of the flattened `master`, or of a flat tensor with the same layout, that holds these elements."""
        return slice(self.offset, self.offset + self.stop - self.start)

    def within(self, tensor: Tensor) -> Tensor:
        """Return a (stop - start,) view of these elements in `tensor`, which is `master` or has the same layout."""
        return tensor.detach().view(-1)[self.elements]


def placements(engine: Any, rank: int) -> Iterator[Placement]:
    """Yield the placement of this rank's part of every parameter, in the same order on all ranks."""
    optimizer, module, wrapper = engine.optimizer, engine.module, _wrapper_of(engine)
    names = {parameter: name for name, parameter in module.named_parameters()}
    if wrapper is Wrapper.ZERO_3:
        for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            starts = _starts(parameter.partition_numel() for parameter in group)
            for parameter, offset in zip(group, starts, strict=True):
                yield _shard(names[parameter], parameter, master, offset, rank)
    elif wrapper is Wrapper.BF16:
        for group, master in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
            yield from _cut(group, _starts(parameter.numel() for parameter in group), master, rank, names)
    elif wrapper is Wrapper.ZERO_1_2:
        groups, masters = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        for group, starts, master in zip(groups, optimizer.round_robin_bit16_offsets, masters, strict=True):
            yield from _cut(group, starts, master, rank, names)
    else:
        for parameter, master in _replicas(optimizer, wrapper):
            yield _whole(names[parameter], master)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            yield _whole(name, parameter.ds_tensor if wrapper is Wrapper.ZERO_3 else parameter)


def replicas(engine: Any, rank: int) -> dict[str, Tensor]:
    """Return the tensors that must be bit-identical on all ranks.

    Under ZeRO 3: the frozen weights. Under ZeRO 1 and 2: all weights. Without ZeRO: weights, master weights, moments.
    """
    weights = dict(engine.module.named_parameters())
    if _wrapper_of(engine) is Wrapper.ZERO_3:
        weights = {name: weight.ds_tensor for name, weight in weights.items() if not weight.requires_grad}
    found: dict[str, Tensor] = dict(weights)
    for place in placements(engine, rank):
        if place.replicated:
            if place.master is not weights[place.name]:
                found[f"{place.name} (float32)"] = place.master
            for kind, value in engine.basic_optimizer.state.get(place.master, {}).items():
                found[f"{place.name} ({kind})"] = value
    return found


def parameter_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Return the full shapes of all parameters by name, including parameters that ZeRO 3 has partitioned."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}


def fetches_weights(module: nn.Module) -> bool:
    """Return whether ZeRO 3 fetches weights as modules run, in a recorded order that every pass must follow."""
    return any(hasattr(weight, "ds_tensor") for weight in module.parameters())


def release_gathered(engine: Any) -> None:
    """Free ZeRO 3's gathered copies of weights that are about to change."""
    if _wrapper_of(engine) is Wrapper.ZERO_3:
        engine.optimizer.checkpoint_event_prologue()


def refresh_weights(engine: Any) -> None:
    """Copy changed master weights to the module's weights, cast to the weights' dtype; all ranks must call this."""
    optimizer, wrapper = engine.optimizer, _wrapper_of(engine)
    if wrapper is Wrapper.ZERO_3:
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        # No weight is gathered now, as in a new engine. The next forward pass finds out which parameters a module
        # reads from its children (CLIP's position embedding), as these are missing; later passes fetch them in time.
        optimizer.invalidate_secondary_tensor()
    elif wrapper in (Wrapper.BF16, Wrapper.ZERO_1_2):
        optimizer.update_lp_params()
    elif wrapper is Wrapper.UNFUSED:
        for parameter, master in _replicas(optimizer, wrapper):
            parameter.data.copy_(master.data)


def forget_gradients(engine: Any) -> None:
    """Drop a rejected gradient, which ZeRO 2 with offload would otherwise keep and add to every later gradient."""
    if _wrapper_of(engine) is Wrapper.ZERO_1_2:
        gradients = engine.optimizer.averaged_gradients
        gradients.update(dict.fromkeys(gradients))


def keep_frozen_whole(module: nn.Module, communicator: Communicator) -> None:
    """Make ZeRO 3 store frozen weights whole on each rank and never gather them; call this before the engine starts."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.ds_zero_partition_process_group = communicator.own_group  # type: ignore[attr-defined]


def share_process_group(communicator: Communicator) -> None:
    """Let the engine use the communicator's process group instead of a copy of it.

    NCCL executes the collectives of one group in launch order, but the collectives of two groups (for ZeRO 3's weights
    and for the features) in any order; ranks that execute them in different orders would deadlock.
    """
    deepspeed.utils.groups._WORLD_GROUP = communicator.group


def skip_unused_kernel(device: torch.device) -> None:
    """Keep DeepSpeed from compiling a tensor-parallel inference kernel, which would take up to a minute on a CPU."""
    if device.type == "cpu":  # on a GPU machine, this lookup would start the CUDA compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _wrapper_of(engine: Any) -> Wrapper:
    if engine.optimizer is engine.basic_optimizer:
        return Wrapper.NONE
    return Wrapper(type(engine.optimizer).__name__)


def _replicas(optimizer: Any, wrapper: Wrapper) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter and its master weight in an engine without ZeRO."""
    masters = [group["params"] for group in optimizer.param_groups]
    for group, of_group in zip(optimizer.fp16_groups if wrapper is Wrapper.UNFUSED else masters, masters, strict=True):
        yield from zip(group, of_group, strict=True)


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _whole(name: str, master: Tensor) -> Placement:
    return Placement(name, 0, master.numel(), master, 0, replicated=True)


def _shard(name: str, parameter: Any, master: Tensor, offset: int, rank: int) -> Placement:
    """Return a rank's shard under ZeRO 3, which cuts a parameter into equal shards and pads the last ones."""
    start, stop = (min(edge * parameter.partition_numel(), parameter.ds_numel) for edge in (rank, rank + 1))
    return Placement(name, start, stop, master, offset, replicated=False)


def _cut(
    group: Sequence[Any], offsets: Sequence[int], master: Tensor, rank: int, names: Mapping[Any, str]
) -> Iterator[Placement]:
    """Yield a rank's shards under ZeRO 1 or 2, which cut a group's concatenated parameters into equal shards."""
    first, end = rank * master.numel(), (rank + 1) * master.numel()
    for parameter, offset in zip(group, offsets, strict=True):
        start = min(max(first - offset, 0), parameter.numel())
        stop = max(min(end - offset, parameter.numel()), start)
        yield Placement(names[parameter], start, stop, master, offset + start - first, replicated=False)
