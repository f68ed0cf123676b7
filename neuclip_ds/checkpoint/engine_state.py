"""Save the state of a DeepSpeed engine, and load it at any world size, ZeRO stage and precision.

`engine/zero.py` locates a rank's elements of each parameter; the code here is the same for all ZeRO stages.

checkpoint/sharded_state.py lists the state that is saved. Buffers, such as batch-norm statistics, may differ
between ranks; only rank 0's are saved. Hyperparameters are not saved, because they are in the config.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import BUFFER, SCALAR, WEIGHT, StateFiles
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.zero import Placement, parameter_shapes, placements, refresh_weights, release_gathered
from neuclip_ds.errors import UserError
from neuclip_ds.state.partition import Partition
from neuclip_ds.state.shards import Shards, replicated_shards, shard_key

_WRITERS = 16  # maximum number of ranks that write replicated state; each rank opens all of their files on load
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def engine_shards(engine: Any, communicator: Communicator) -> Shards:
    """Return this rank's shards of weights, buffers and optimizer state, as views of the engine's tensors."""
    shards, scalars = dict[str, Tensor](), dict[str, Tensor]()
    for place in placements(engine, communicator.rank):
        part = _share(place, communicator)
        state = engine.basic_optimizer.state.get(place.master, {})
        for kind, value in {WEIGHT: part.master, **state}.items():
            if not isinstance(value, Tensor):
                continue
            if kind != WEIGHT and value.ndim == 0:
                scalars[f"{part.name}/{kind}"] = value
            elif part.start < part.stop:
                shards[shard_key(kind, part.name, part.start, part.stop)] = part.within(value)
    return shards | (
        replicated_shards(SCALAR, scalars) | replicated_shards(BUFFER, _buffers(engine.module))
        if communicator.rank == 0
        else {}
    )


def engine_facts(engine: Any) -> dict[str, Any]:
    """Return the engine's metadata for the shards' index.json: parameter shapes, and counts of steps and samples."""
    counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
    return {"parameters": parameter_shapes(engine.module), "counters": counters}


def load_engine(folder: Path, engine: Any, communicator: Communicator) -> StateFiles:
    """Load state into a new engine from files written by any number of ranks at any ZeRO stage; a collective call.

    Returns a reader of the files, which the caller must verify before the call. Raises `UserError` on all ranks if any
    rank finds that files are missing or were written for a different model.
    """

    def read() -> StateFiles:
        files = _open(folder, engine.module)
        _fill(files, engine, communicator)
        _fill_buffers(files, engine.module)
        return files

    release_gathered(engine)
    files = communicator.on_every_rank(read)
    refresh_weights(engine)
    for name in _COUNTERS:
        setattr(engine, name, files.counters[name])
    return files


def load_moments(folder: Path, engine: Any, communicator: Communicator) -> None:
    """Load only the optimizer state into a new engine; a collective call.

    Raises `UserError` when `load_engine` does, and also if the weights in the files differ from the engine's.
    """

    def read() -> None:
        files = _open(folder, engine.module)
        _check_weights(files, engine, communicator)
        _fill(files, engine, communicator, weights=False)

    communicator.on_every_rank(read)


def _check_weights(files: StateFiles, engine: Any, communicator: Communicator) -> None:
    for place in placements(engine, communicator.rank):
        found = files.read(place.name, WEIGHT, place.start, place.stop)
        if not torch.equal(found, place.within(place.master).cpu()):
            raise UserError(
                f"{files.folder} belongs to other weights than this run starts from ({place.name} differs): set "
                "model.pretrained and the precision as they were in its recovery."
            )


def _share(place: Placement, communicator: Communicator) -> Placement:
    """Return the elements that this rank writes: its shard or, if all ranks store the same elements, a part of them."""
    if not place.replicated:
        return place
    part = Partition.of(place.stop - place.start, communicator.rank, min(communicator.world_size, _WRITERS))
    start, stop, offset = place.start + part.start, place.start + part.stop, place.offset + part.start
    return place._replace(start=start, stop=stop, offset=offset)


@torch.no_grad()
def _fill(files: StateFiles, engine: Any, communicator: Communicator, weights: bool = True) -> None:
    """Load this rank's optimizer state and, if `weights` is true, its master weights; set the padding to zero."""
    optimizer = engine.basic_optimizer
    by_master: defaultdict[Tensor, list[Placement]] = defaultdict(list)
    for place in placements(engine, communicator.rank):
        by_master[place.master].append(place)
    for master, places in by_master.items():
        trained = places if master.requires_grad else []
        scalars = {kind: x for place in trained for kind, x in files.replicated(SCALAR, f"{place.name}/").items()}
        kinds = {kind for place in trained for kind in files.kinds(place.name)} - {WEIGHT}
        state = {kind: torch.zeros_like(master) for kind in sorted(kinds)}
        for kind, target in ({WEIGHT: master.zero_(), **state} if weights else state).items():
            for place in places:
                if place.start < place.stop and (kind == WEIGHT or kind in files.kinds(place.name)):
                    place.within(target).copy_(files.read(place.name, kind, place.start, place.stop))
        if state or scalars:
            # a fused optimizer counts its steps on the device; other optimizers count on the CPU
            counted_on = master.device if optimizer.defaults.get("fused") else torch.device("cpu")
            optimizer.state[master] = {**{kind: x.to(counted_on) for kind, x in scalars.items()}, **state}


def _open(folder: Path, module: Any) -> StateFiles:
    """Open the files; raise `UserError` if their parameters differ from the model's in name or shape."""
    files = StateFiles(folder, verified=True)
    found = {name: list(shape) for name, shape in files.shapes.items()}
    wanted = parameter_shapes(module)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"{files.folder} has the parameter {name} in the shape {found.get(name)}, this run's model in "
                f"{wanted.get(name)}: set model.* back, or give the run a new name (--run.name)."
            )
    return files


def _buffers(module: Any) -> dict[str, Tensor]:
    """Return the module's persistent buffers, keyed by name."""
    kept = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


@torch.no_grad()
def _fill_buffers(files: StateFiles, module: Any) -> None:
    buffers, found = _buffers(module), files.replicated(BUFFER)
    if missing := sorted(buffers.keys() - found.keys()):
        raise UserError(
            f"{files.folder} lacks the buffers {missing} of this run's model: set model.* back, or give the run "
            "a new name (--run.name)."
        )
    for name, buffer in buffers.items():
        buffer.copy_(found[name])
