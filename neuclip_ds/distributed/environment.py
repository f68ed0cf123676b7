"""What the launcher says about this process, read without torch so that mistakes are reported at once."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import NamedTuple

from neuclip_ds.errors import UserError

# (rank, local rank, world size) as the DeepSpeed and torch launchers and as Open MPI name them
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class RankEnvironment(NamedTuple):
    """This process among those of the launch."""

    rank: int
    local_rank: int
    world_size: int


def read_environment(env: MutableMapping[str, str] = os.environ) -> RankEnvironment:
    """Rank, local rank and world size; (0, 0, 1) when no launcher started this process.

    Raises:
        UserError: a launcher's variables are incomplete or not numbers.
    """
    for names in _LAUNCHERS:
        if names[0] in env and names[2] in env:
            try:
                rank, local_rank, world_size = (int(env.get(name, "0")) for name in names)
            except ValueError as error:
                raise UserError(f"The launcher set {names} to something that is no number: {error}.") from error
            if not 0 <= rank < world_size:
                raise UserError(f"{names[0]}={rank} does not lie below {names[2]}={world_size}; start by a launcher.")
            return RankEnvironment(rank, local_rank, world_size)
    return RankEnvironment(0, 0, 1)


def complete_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Sets what a process group needs where `python train.py` was called without a launcher."""
    if any(names[0] in env for names in _LAUNCHERS):
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
