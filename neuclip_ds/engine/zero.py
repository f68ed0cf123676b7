"""Locate the weights in DeepSpeed's optimizer; only this module and `lean_zero1.py` read its private fields.

The fields are those of the DeepSpeed version that `engine/config.py` requires. In this module, `optimizer` is the
`optimizer` of DeepSpeed's engine: a wrapper around torch's optimizer or, in float32 without ZeRO, torch's optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import deepspeed
import deepspeed.utils.groups
import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn

from neuclip_ds.distributed.communicator import Communicator


class Wrapper(Enum):
    """Kind of DeepSpeed's wrapper around the optimizer; the values are class names."""

    NONE = ""  # the optimizer alone: float32 without ZeRO
    UNFUSED = "FP16_UnfusedOptimizer"  # bf16 without ZeRO: every rank has all float32 masters
    # ZeRO 1 in bf16 with float32 gradients, without offload: one gradient buffer per group, masters partitioned
    BF16 = "BF16_Optimizer"
    ZERO_1_2 = "DeepSpeedZeroOptimizer"
    ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"


def wrapper_of(optimizer: Any) -> Wrapper:
    """Return the kind of wrapper around an engine's optimizer; raise `ValueError` if the kind is unknown."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return Wrapper.NONE
    if isinstance(optimizer, BF16_Optimizer):  # also with the step of `lean_zero1.py`
        return Wrapper.BF16
    return Wrapper(type(optimizer).__name__)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Location, on this rank, of elements [start, stop) of the flattened parameter `name`; the range may be empty.

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


def placements(optimizer: Any, module: nn.Module, rank: int) -> Iterator[Placement]:
    """Yield the placement of this rank's part of every parameter, in the same order on all ranks."""
    wrapper = wrapper_of(optimizer)
    names = {parameter: name for name, parameter in module.named_parameters()}
    # trained parameters, whose master weights the optimizer stores
    if wrapper is Wrapper.ZERO_3:
        for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            offsets = _offsets(parameter.partition_numel() for parameter in group)
            for parameter, offset in zip(group, offsets, strict=True):
                yield _zero_3_shard(names[parameter], parameter, master, offset, rank)
    elif wrapper is Wrapper.BF16:
        for group, master in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
            offsets = _offsets(parameter.numel() for parameter in group)
            yield from _zero_1_2_shards(group, offsets, master, rank, names)
    elif wrapper is Wrapper.ZERO_1_2:
        groups = optimizer.round_robin_bit16_groups
        masters = optimizer.single_partition_of_fp32_groups
        for group, offsets, master in zip(groups, optimizer.round_robin_bit16_offsets, masters, strict=True):
            yield from _zero_1_2_shards(group, offsets, master, rank, names)
    else:
        for parameter, master in _unpartitioned_masters(optimizer, wrapper):
            yield _unpartitioned(names[parameter], master)
    # frozen parameters
    for name, weight in replicated_weights(module).items():
        if not weight.requires_grad:
            yield _unpartitioned(name, weight)


def replicated_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights that every rank stores whole, by name: all of them or, under ZeRO 3, the frozen ones."""
    weights: dict[str, Any] = dict(module.named_parameters())
    if fetches_weights(module):
        weights = {name: weight.ds_tensor for name, weight in weights.items() if not weight.requires_grad}
    return weights


def parameter_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Return the full shapes of all parameters by name, including parameters that ZeRO 3 has partitioned."""
    return {name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in module.named_parameters()}


def fetches_weights(module: nn.Module) -> bool:
    """Return whether ZeRO 3 fetches weights as modules run, in a recorded order that every pass must follow."""
    return any(hasattr(weight, "ds_tensor") for weight in module.parameters())


def release_gathered(optimizer: Any) -> None:
    """Free ZeRO 3's gathered copies of weights that are about to change."""
    if wrapper_of(optimizer) is Wrapper.ZERO_3:
        optimizer.checkpoint_event_prologue()


def refresh_weights(optimizer: Any) -> None:
    """Copy changed master weights to the module's weights, cast to the weights' dtype; all ranks must call this."""
    wrapper = wrapper_of(optimizer)
    if wrapper is Wrapper.ZERO_3:
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        # As in a new engine, no weight is gathered now. In the next forward pass, parameters that a module reads from
        # its children (CLIP's position embedding) are missing and are therefore recorded; later passes fetch them in
        # time.
        optimizer.invalidate_secondary_tensor()
        # The order that DeepSpeed recorded lacks these parameters if their modules ran for the first time in the last
        # passes: evaluations run frozen trunks that training on stored features does not run.
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
    elif wrapper in (Wrapper.BF16, Wrapper.ZERO_1_2):
        optimizer.update_lp_params()
    elif wrapper is Wrapper.UNFUSED:
        for parameter, master in _unpartitioned_masters(optimizer, wrapper):
            parameter.data.copy_(master.data)


def discard_gradients(optimizer: Any) -> None:
    """Drop a rejected gradient, which ZeRO 2 with offload would otherwise keep and add to every later gradient."""
    if wrapper_of(optimizer) is Wrapper.ZERO_1_2:
        gradients = optimizer.averaged_gradients
        gradients.update(dict.fromkeys(gradients))


def keep_frozen_unpartitioned(module: nn.Module, communicator: Communicator) -> None:
    """Make ZeRO 3 store frozen weights whole on each rank and never gather them; call this before the engine starts."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.ds_zero_partition_process_group = communicator.own_group  # type: ignore[attr-defined]


def restore_linear() -> None:
    """Restore `torch.nn.functional.linear`, which DeepSpeed replaces for the whole process when ZeRO 3 starts.

    Otherwise, an engine that the process starts later without ZeRO 3 would launch more kernels for every linear layer.
    """
    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = torch._C._nn.linear


def release_globals() -> None:
    """Undo ZeRO 3's process-wide changes: restore torch's linear function, and drop references to the model."""
    restore_linear()
    parameter_offload.FWD_MODULE_STACK.clear()
    # the keys of this method's cache contain modules; a decorator hides the cached function
    method = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()


def share_process_group(communicator: Communicator) -> None:
    """Let the engine use the communicator's process group instead of a copy of it.

    NCCL executes the collectives of one group in launch order, but the collectives of two groups (for ZeRO 3's weights
    and for the features) in any order; ranks that execute them in different orders would deadlock.
    """
    deepspeed.utils.groups._WORLD_GROUP = communicator.group


def skip_unused_kernel(device: torch.device) -> None:
    """Keep DeepSpeed from compiling a tensor-parallel inference kernel, which would take up to a minute on a CPU.

    The kernel is marked as incompatible in DeepSpeed's table of kernels. DeepSpeed reads no other entry of this table;
    to fill the table, it would run a compiler for every kernel.
    """
    if device.type == "cpu":
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer without compiling it: no run uses it, but every engine imports it.

    The decorator of its functions would import torch's compiler, which takes seconds.
    """
    compile_function = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = compile_function


def _unpartitioned_masters(optimizer: Any, wrapper: Wrapper) -> Iterator[tuple[Any, Tensor]]:
    """Yield each trained parameter and its master weight in an engine without ZeRO."""
    master_groups = [group["params"] for group in optimizer.param_groups]
    groups = optimizer.fp16_groups if wrapper is Wrapper.UNFUSED else master_groups
    for group, masters in zip(groups, master_groups, strict=True):
        yield from zip(group, masters, strict=True)


def _offsets(sizes: Iterable[int]) -> list[int]:
    """Return the position at which each of several concatenated tensors starts."""
    return [0, *accumulate(sizes)][:-1]


def _unpartitioned(name: str, master: Tensor) -> Placement:
    return Placement(name=name, start=0, stop=master.numel(), master=master, offset=0, replicated=True)


def _zero_3_shard(name: str, parameter: Any, master: Tensor, offset: int, rank: int) -> Placement:
    """Return the placement of a rank's shard under ZeRO 3, which cuts parameters into equal shards, the last padded."""
    size = parameter.partition_numel()
    start = min(rank * size, parameter.ds_numel)
    stop = min((rank + 1) * size, parameter.ds_numel)
    return Placement(name=name, start=start, stop=stop, master=master, offset=offset, replicated=False)


def _zero_1_2_shards(
    group: Sequence[Any], offsets: Sequence[int], master: Tensor, rank: int, names: Mapping[Any, str]
) -> Iterator[Placement]:
    """Yield the placements of a rank's shards under ZeRO 1 or 2, which cut a group's flattened parameters equally."""
    shard_start = rank * master.numel()
    shard_stop = shard_start + master.numel()
    for parameter, parameter_start in zip(group, offsets, strict=True):
        start = min(max(shard_start - parameter_start, 0), parameter.numel())
        stop = max(min(shard_stop - parameter_start, parameter.numel()), start)
        yield Placement(
            name=names[parameter],
            start=start,
            stop=stop,
            master=master,
            offset=parameter_start + start - shard_start,
            replicated=False,
        )
