"""Save and restore the state of a loss: as tensors of this rank, or in a folder that any number of ranks can read."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError, explained
from neuclip_ds.losses.base import LossFunction
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.state.shards import INDEX, ShardFiles, replicated_shards, shard_files, table_shards
from neuclip_ds.state.tensor_file import StateFile

_REPLICATED = "objective"  # kind of the shards with the state that is equal on all ranks


def state_of(function: LossFunction) -> dict[str, Any]:
    """Return this rank's state of a loss function, without copying its tensors."""
    tables = {name: dict(table.tensors) for name, table in function.row_tables().items()}
    return {"replicated": function.replicated_state(), "tables": tables}


def restore(function: LossFunction, state: Mapping[str, Any]) -> None:
    """Copy a state that `state_of` returned, on this rank and with equal settings, into a loss function."""
    function.load_replicated_state({name: value.clone() for name, value in state["replicated"].items()})
    for name, table in function.row_tables().items():
        for key, tensor in table.tensors.items():
            tensor.copy_(state["tables"][name][key])


def write(folder: Path, function: LossFunction, metadata: Mapping[str, Any], communicator: Communicator) -> None:
    """Write the state of all ranks to a folder; the index, which `open_folder` requires, is written last.

    All ranks must call this together. Raises `UserError` on all ranks if a rank cannot write its files.
    """

    def explains() -> AbstractContextManager[None]:
        problem = f"The state of the loss cannot be saved in {folder}"
        return explained(problem, "pass a folder that all ranks can write to, on a disk with free space")

    def prepare_folder() -> None:
        with explains():
            folder.mkdir(parents=True, exist_ok=True)
            # an old index next to new rows would describe a state that never existed
            (folder / INDEX).unlink(missing_ok=True)

    def write_files(files: Sequence[StateFile]) -> None:
        with explains():
            for file in files:
                file.write(folder)

    communicator.on_rank_zero(prepare_folder)
    shards = table_shards(function.row_tables())
    if communicator.rank == 0:
        shards |= replicated_shards(_REPLICATED, function.replicated_state())
    tensors, *index_files = shard_files(shards, metadata, communicator)  # only rank 0 has an index file
    communicator.on_every_rank(lambda: write_files([tensors]))
    communicator.on_every_rank(lambda: write_files(index_files))


def open_folder(folder: Path) -> ShardFiles:
    """Open the files that `write` wrote; raise `UserError` if the folder is incomplete or cannot be read."""
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder} does not contain a completely saved loss: {INDEX} is missing. Pass a folder in which save() "
            "has finished."
        )
    return ShardFiles(folder)


def read(files: ShardFiles, function: LossFunction) -> None:
    """Read this rank's state of a loss function; raise `UserError` if a file is missing or cannot be read."""
    files.fill(function.row_tables())
    function.load_replicated_state(files.replicated(_REPLICATED))


def settings_of(config: ObjectiveConfig, dim: int, samples: int) -> dict[str, Any]:
    """Return the settings that must be equal when a state is saved and when it is loaded, by name."""
    settings: dict[str, Any] = {"dim": dim, "samples": samples}
    options = config.model_dump(
        mode="json",
        exclude={
            "chunk_size": True,
            "comm_dtype": True,
            "npn": {"replicas": True},
            "reference_model": True,
            "distill": True,
        },
    )
    for key, value in options.items():
        if isinstance(value, dict) and key != "prefixes":  # the keys of `prefixes` are lengths, not options
            for name, option in value.items():
                settings[f"{key}.{name}"] = option
        else:
            settings[key] = value
    return settings


def require_equal(settings: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` if a setting differs from the saved one; `where` names the saved state in the message."""
    others = [name for name in settings if name != "method"]
    for name in ("method", *others):
        if saved.get(name) != settings[name]:
            raise UserError(
                f"{where} was saved with {name}={saved.get(name)}, but this loss was built with "
                f"{name}={settings[name]}; build the loss with the saved value, or train without the saved state."
            )
