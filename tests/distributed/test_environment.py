"""What the launchers' variables say."""

from __future__ import annotations

import pytest

from neuclip_ds.distributed.environment import complete_environment, read_environment
from neuclip_ds.errors import UserError


def test_no_launcher_is_one_rank() -> None:
    env: dict[str, str] = {}
    assert read_environment(env) == (0, 0, 1)
    complete_environment(env)
    assert read_environment(env) == (0, 0, 1)
    assert env["MASTER_ADDR"] == "127.0.0.1"


def test_deepspeed_and_open_mpi() -> None:
    assert read_environment({"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}) == (9, 1, 16)
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert read_environment(mpi) == (3, 3, 4)
    complete_environment(mpi)
    assert "RANK" not in mpi, "left to DeepSpeed's MPI discovery"


@pytest.mark.parametrize("env", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_senseless_variables(env: dict[str, str]) -> None:
    with pytest.raises(UserError, match="RANK"):
        read_environment(env)
