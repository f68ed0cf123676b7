"""Save the state of an engine, and load it at any world size, ZeRO stage and precision.

`Engine.placements` locates a rank's elements of each parameter; the code here is the same for all ZeRO stages.

checkpoint/sharded_state.py lists the state that is saved. Buffers, such as batch-norm statistics, may differ
between ranks; only rank 0's are saved. Hyperparameters are not saved, because they are in the config.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuclip_ds.checkpoint.sharded_state import BUFFER, SCALAR, WEIGHT, StateFiles
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.zero import Placement
from neuclip_ds.errors import UserError, counted
from neuclip_ds.state.partition import Partition
from neuclip_ds.state.shards import Shards, replicated_shards, shard_key

_WRITERS = 16  # maximum number of ranks that write replicated state; each rank opens all of their files on load


def engine_shards(engine: Engine, communicator: Communicator) -> Shards:
    """Return this rank's shards of weights, buffers and optimizer state, as views of the engine's tensors."""
    shards: Shards = {}
    scalars: dict[str, Tensor] = {}
    for placement in engine.placements():
        written = _written_elements(placement, communicator)
        state = engine.optimizer_state.get(placement.master, {})
        for kind, value in {WEIGHT: placement.master, **state}.items():
            if not isinstance(value, Tensor):
                continue
            if kind != WEIGHT and value.ndim == 0:
                scalars[f"{written.name}/{kind}"] = value
            elif written.start < written.stop:
                shards[shard_key(kind, written.name, written.start, written.stop)] = written.within(value)
    if communicator.rank == 0:
        shards |= replicated_shards(SCALAR, scalars)
        shards |= replicated_shards(BUFFER, _persistent_buffers(engine.module))
    return shards


def engine_metadata(engine: Engine) -> dict[str, Any]:
    """Return the engine's metadata for the shards' index.json: parameter shapes, and counts of steps and samples."""
    return {"parameters": engine.parameter_shapes(), "counters": engine.counters}


def load_engine(folder: Path, engine: Engine, communicator: Communicator) -> StateFiles:
    """Load state into a new engine from files written by any number of ranks at any ZeRO stage; a collective call.

    The caller must verify the files before the call. Returns a reader of the files. Raises `UserError` on all ranks if
    any rank finds that files are missing or were written for a different model.
    """

    def read() -> StateFiles:
        files = _open(folder, engine)
        _load_weights_and_optimizer(files, engine)
        _load_buffers(files, engine.module)
        return files

    with engine.changing_master_weights():
        files = communicator.on_every_rank(read)
    engine.set_counters(files.counters)
    return files


def load_moments(folder: Path, engine: Engine, communicator: Communicator) -> None:
    """Load only the optimizer state into a new engine; a collective call.

    The caller must verify the files before the call. Raises `UserError` on all ranks if any rank finds that files are
    missing, were written for a different model, or contain weights that differ from the engine's.
    """

    def read() -> None:
        files = _open(folder, engine)
        _require_equal_weights(files, engine)
        _load_weights_and_optimizer(files, engine, weights=False)

    communicator.on_every_rank(read)


def _require_equal_weights(files: StateFiles, engine: Engine) -> None:
    for placement in engine.placements():
        saved = files.read(placement.name, WEIGHT, placement.start, placement.stop)
        if not torch.equal(saved, placement.within(placement.master).cpu()):
            raise UserError(
                f"The state in {files.folder} was recovered with weights that differ from those that this run starts "
                f"from ({placement.name}): use the pretrained weights (model.*), run.seed and precision (deepspeed) of "
                "the run that recovered this state."
            )


def _written_elements(placement: Placement, communicator: Communicator) -> Placement:
    """Return the elements that this rank writes: its shard or, if all ranks store the same elements, a part of them."""
    if not placement.replicated:
        return placement
    writers = min(communicator.world_size, _WRITERS)
    part = Partition.of(placement.stop - placement.start, communicator.rank, writers)
    return dataclasses.replace(
        placement,
        start=placement.start + part.start,
        stop=placement.start + part.stop,
        offset=placement.offset + part.start,
    )


@torch.no_grad()
def _load_weights_and_optimizer(files: StateFiles, engine: Engine, weights: bool = True) -> None:
    """Load this rank's optimizer state and, if `weights` is true, its master weights; set the padding to zero."""
    placements_in: defaultdict[Tensor, list[Placement]] = defaultdict(list)  # by master
    for placement in engine.placements():
        placements_in[placement.master].append(placement)
    for master, placements in placements_in.items():
        kinds: set[str] = set()
        scalars: dict[str, Tensor] = {}
        if master.requires_grad:  # a frozen parameter has no optimizer state
            for placement in placements:
                kinds.update(files.kinds(placement.name))
                scalars.update(files.replicated(SCALAR, f"{placement.name}/"))
        state = {kind: torch.zeros_like(master) for kind in sorted(kinds - {WEIGHT})}
        for kind, tensor in state.items():
            _read_elements(files, kind, placements, tensor)
        if weights:
            master.zero_()
            _read_elements(files, WEIGHT, placements, master)
        if state or scalars:
            engine.set_optimizer_state(master, state, scalars)


def _read_elements(files: StateFiles, kind: str, placements: Sequence[Placement], tensor: Tensor) -> None:
    """Read this rank's elements of one kind into `tensor`, which is laid out like the placements' master.

    The files may lack the moments of a parameter that had none when they were written, but never its weights.
    """
    for placement in placements:
        is_saved = kind == WEIGHT or kind in files.kinds(placement.name)
        if is_saved and placement.start < placement.stop:
            elements = files.read(placement.name, kind, placement.start, placement.stop)
            placement.within(tensor).copy_(elements)


def _open(folder: Path, engine: Engine) -> StateFiles:
    """Open the files; raise `UserError` if their parameters differ from the model's in name or shape."""
    files = StateFiles(folder, verified=True)
    saved_shapes = {name: list(shape) for name, shape in files.shapes.items()}
    model_shapes = engine.parameter_shapes()
    for name in sorted(saved_shapes.keys() | model_shapes.keys()):
        if saved_shapes.get(name) != model_shapes.get(name):
            raise UserError(
                f"{files.folder} contains {_described(name, saved_shapes)}, but this run's model contains "
                f"{_described(name, model_shapes)}: use the model options (model.*) of the run that wrote the folder. "
                "For a different model, set a new run.name, or another recovery.reuse if it names the folder."
            )
    return files


def _described(name: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """Describe the shape of a parameter, or its absence, for a message."""
    return f"the parameter {name} of shape {tuple(shapes[name])}" if name in shapes else f"no parameter {name}"


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's persistent buffers, keyed by name."""
    persistent = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


@torch.no_grad()
def _load_buffers(files: StateFiles, module: nn.Module) -> None:
    buffers = _persistent_buffers(module)
    saved = files.replicated(BUFFER)
    missing = sorted(buffers.keys() - saved.keys())
    if missing:
        raise UserError(
            f"{files.folder} lacks {counted(len(missing), 'buffer')} of this run's model ({', '.join(missing)}): use "
            "the model options (model.*) of the run that wrote the folder, or give the run a new name (run.name)."
        )
    for name, buffer in buffers.items():
        buffer.copy_(saved[name])
