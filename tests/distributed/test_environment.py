"""Reading and completing the launchers' environment variables."""

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


def test_a_step_of_srun() -> None:
    env = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "1234567"}
    env["SLURM_STEP_NODELIST"] = "gpu[007-012,20],cpu1"
    assert read_environment(env) == (3, 1, 4)
    complete_environment(env)
    assert read_environment({key: env[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}) == (3, 1, 4)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("gpu007", "24567")
    complete_environment(env)
    assert env["MASTER_ADDR"] == "gpu007"


def test_a_batch_script_of_slurm_is_one_process() -> None:
    env = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}
    assert read_environment(env) == (0, 0, 1)


def test_open_mpi_with_an_address_needs_no_discovery() -> None:
    env = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    env.update(MASTER_ADDR="10.0.0.1", MASTER_PORT="29501")
    complete_environment(env)
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == ("3", "1", "4")


def test_ranks_without_an_address() -> None:
    with pytest.raises(UserError, match="MASTER_ADDR"):
        complete_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
