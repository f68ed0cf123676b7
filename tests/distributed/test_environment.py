"""Check launchers' environment variables, the refusal of GPUs that torch cannot use, and gloo's interface."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from servers import wait_for
from small_runs import ROOT

from neuclip_ds.distributed import environment
from neuclip_ds.distributed.environment import (
    complete_environment,
    find_gpus,
    find_orphans,
    let_idle_threads_sleep,
    read_environment,
    refuse_missing_gpus,
    use_interface_of,
)
from neuclip_ds.errors import UserError

CHECK = """import neuclip_ds.distributed.environment as checked
checked.find_gpus = list  # none, whatever machine this is
checked.refuse_missing_gpus("torch")
print("fine")
"""
# a fake launcher: a program named like the real one, whose grandchild process is the rank
LAUNCHER = f"""#!{sys.executable}
import subprocess, sys
subprocess.run(["sh", "-c", '"$0" -c "$1"; true', sys.executable, sys.argv[-1]])
"""


def test_without_a_launcher_there_is_one_rank() -> None:
    env: dict[str, str] = {}
    assert read_environment(env) == (0, 0, 1)
    complete_environment(env)
    assert read_environment(env) == (0, 0, 1)
    assert env["MASTER_ADDR"] == "127.0.0.1"


def test_ranks_of_deepspeed_and_open_mpi_are_read() -> None:
    assert read_environment({"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}) == (9, 1, 16)
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert read_environment(mpi) == (3, 1, 4)
    complete_environment(mpi)
    assert "RANK" not in mpi, "left to DeepSpeed's MPI discovery"
    mpi.update(MASTER_ADDR="10.0.0.1", MASTER_PORT="29501")
    complete_environment(mpi)
    assert (mpi["RANK"], mpi["LOCAL_RANK"], mpi["WORLD_SIZE"]) == ("3", "1", "4")


MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PALS_LOCAL_RANKID": "1"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_SIZE": "4"}
STEP = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]"}
PROXY = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    ("env", "has_address"),
    [
        (MPICH, False),
        (CRAY, False),
        (MVAPICH, False),
        ({**MPICH, **PROXY}, False),  # mpiexec starts its proxies with srun
        ({**CRAY, **STEP}, True),  # srun with Cray's PMI
        ({"PMI_RANK": "3", "PMI_SIZE": "4", **STEP}, True),  # srun --mpi=pmi2
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "LOCAL_RANK": "1"}, False),
    ],
)
def test_ranks_of_other_launchers_are_read(env: dict[str, str], has_address: bool) -> None:
    assert read_environment(dict(env)) == (3, 1, 4)
    completed = dict(env)
    complete_environment(completed)
    assert ("RANK" in completed) == has_address, "left to MPI, unless SLURM names the first node"
    completed = {**env, **ADDRESS}
    complete_environment(completed)
    assert (completed["RANK"], completed["LOCAL_RANK"], completed["WORLD_SIZE"]) == ("3", "1", "4")


@pytest.mark.parametrize("env", [MPICH, MVAPICH, CRAY])
def test_one_rank_of_mpi_needs_no_mpi(env: dict[str, str]) -> None:
    single = {name: "1" if name.endswith("SIZE") else "0" for name in env}
    complete_environment(single)
    assert (single["RANK"], single["WORLD_SIZE"], single["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


@pytest.mark.parametrize("name", ["PMIX_RANK", "ALPS_APP_PE", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "PMI_RANK"])
def test_a_launcher_that_does_not_tell_the_number_of_ranks_is_refused(name: str) -> None:
    """Otherwise, every rank would train alone."""
    with pytest.raises(UserError, match=f"{name}=0 shows that a launcher .* set RANK, LOCAL_RANK, WORLD_SIZE"):
        read_environment({name: "0"})


def test_ranks_of_one_gpu_are_not_confused() -> None:
    with pytest.raises(UserError, match="set LOCAL_RANK on each rank"):
        complete_environment({"PMI_RANK": "3", "PMI_SIZE": "4", **ADDRESS})


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--hostfile", "misspelt"], True),
        (["--hostfile=misspelt"], True),
        (["-H", "misspelt", "--num_nodes", "2"], True),
        (["--hostfile", "hostfile"], False),
        (["train.py", "--hostfile", "misspelt"], False),
        ([], False),
    ],
)
def test_a_hostfile_that_does_not_exist_is_refused(options: list[str], refused: bool, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").write_text(LAUNCHER)
    (tmp_path / "deepspeed").chmod(0o755)
    (tmp_path / "hostfile").touch()
    check = "from neuclip_ds.distributed.environment import refuse_missing_hostfile as check; check(); print('fine')"
    command = [str(tmp_path / "deepspeed"), *options, check]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ("The hostfile misspelt does not exist" in done.stderr) == refused, done.stderr
    assert (done.stdout == "fine\n") != refused


def test_ranks_of_a_killed_launcher_are_found(tmp_path: Path) -> None:
    """The launcher of the other rank still runs."""
    rank = f"import time, pathlib, os; pathlib.Path('{tmp_path}', str(os.getpid())).touch(); time.sleep(60)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    variables = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    launchers = []
    ranks: list[int] = []
    try:
        for _ in range(2):
            launchers.append(subprocess.Popen([sys.executable, "-c", launcher], env=variables))
            wait_for(lambda: len(list(tmp_path.iterdir())) == len(launchers))
            ranks += [int(path.name) for path in tmp_path.iterdir() if int(path.name) not in ranks]
        assert not {*ranks, *(launcher.pid for launcher in launchers)} & set(find_orphans())
        launchers[0].kill()
        launchers[0].wait()
        parent = psutil.Process(ranks[0]).parent()
        if parent is not None and parent.pid != 1 and parent.name() != "systemd":
            pytest.skip(f"orphans are adopted by {parent.name()}")
        assert set(ranks) & set(find_orphans()) == {ranks[0]}
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        for process in launchers:
            process.wait()


@pytest.mark.parametrize("env", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_variables_that_do_not_describe_a_rank_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(UserError, match="RANK"):
        read_environment(env)


def test_a_step_of_srun_gets_its_ranks_and_the_address_of_its_first_node() -> None:
    env = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "1234567"}
    env["SLURM_STEP_NODELIST"] = "gpu[007-012,20],cpu1"
    assert read_environment(env) == (3, 1, 4)
    for _ in range(2):
        complete_environment(env)
        assert read_environment({key: env[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}) == (3, 1, 4)
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("gpu007", "24567")
    script = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}
    assert read_environment(script) == (0, 0, 1), "a batch script is one process"


def test_ranks_without_an_address_are_refused() -> None:
    with pytest.raises(UserError, match="MASTER_ADDR"):
        complete_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("options", "accelerator", "refused"),
    [
        (["--num_gpus", "8"], None, True),
        (["--num_gpus", "8"], "cpu", False),
        (["--num_accelerators", "8"], None, False),
    ],
)
def test_num_gpus_without_gpus_is_refused(
    options: list[str], accelerator: str | None, refused: bool, tmp_path: Path
) -> None:
    launcher = tmp_path / "deepspeed"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": accelerator or ""}
    done = subprocess.run([launcher, *options, CHECK], env=variables, capture_output=True, text=True, timeout=60)
    printed = done.stdout + done.stderr
    if refused:
        assert "--num_gpus 8 requests GPUs" in printed and "--num_accelerators 8" in printed
    else:
        assert printed == "fine\n"


def test_idle_threads_of_cpu_runs_sleep_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    libgomp = next(Path(torch.__file__).parent.glob("lib/libgomp*"))
    load = f"import ctypes; ctypes.CDLL({str(libgomp)!r})"  # as importing torch does, which takes seconds
    script = f"from neuclip_ds.cli.main import main; main(['train', '--help']); {load}"
    variables = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    variables |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=120)
    assert "GOMP_SPINCOUNT = '0'" in done.stderr, "set before libgomp is loaded"
    for gpus, chosen in ([], {"GOMP_SPINCOUNT": "9"}), ([], {"OMP_WAIT_POLICY": "ACTIVE"}), (["/dev/nvidia0"], {}):
        monkeypatch.setattr(environment, "find_gpus", lambda gpus=gpus: gpus)
        env = dict(chosen)
        let_idle_threads_sleep(env)
        assert env == chosen


def test_gpus_that_torch_cannot_use_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "dri/renderD128"):  # files that exist without a GPU
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_gpus(tmp_path) == []
    for name in ("nvidia0", "nvidia12", "kfd"):
        (tmp_path / name).touch()
    gpus = find_gpus(tmp_path)
    assert gpus == [str(tmp_path / name) for name in ("kfd", "nvidia0", "nvidia12")]

    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    monkeypatch.setattr(environment, "find_gpus", lambda: gpus)
    monkeypatch.setattr(environment, "_DRIVER", version)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(UserError, match=r"nvidia12\), .* torch 2.15 for CUDA 13.2, .* driver is 535.104.05\. .*cu126"):
        refuse_missing_gpus("torch 2.15 for CUDA 13.2")
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "none")
    with pytest.raises(UserError, match=r"driver is not loaded.* To use the CPU, set DS_ACCELERATOR=cpu"):
        refuse_missing_gpus("torch 2.15 for CUDA 13.2")
    monkeypatch.setattr(environment, "find_gpus", lambda: ["/dev/kfd"])
    with pytest.raises(UserError, match=r"this is torch 2.15 for CUDA 13.2\. Check rocm-smi .* torch for ROCm"):
        refuse_missing_gpus("torch 2.15 for CUDA 13.2")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    refuse_missing_gpus("torch 2.15 for CUDA 13.2")


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.0.0.7", "ib0"), ("fe80::2", "eth0"), ("127.0.1.1", "lo"), ("::1", "lo"), ("10.0.0.8", None)],
)
def test_gloo_takes_the_interface_of_an_address(
    address: str, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ethernet = SimpleNamespace(address="00:00", family=socket.AF_PACKET)

    def ipv4(text: str) -> SimpleNamespace:
        return SimpleNamespace(address=text, family=socket.AF_INET)

    def ipv6(text: str) -> SimpleNamespace:
        return SimpleNamespace(address=text, family=socket.AF_INET6)

    interfaces = {
        "lo": [ethernet, ipv4("127.0.0.1"), ipv6("::1")],
        "eth0": [ethernet, ipv4("192.168.0.7"), ipv6("fe80::2%eth0")],
        "ib0": [ethernet, ipv4("10.0.0.7")],
    }
    monkeypatch.setattr(environment.psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface_of(address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    use_interface_of(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "bond0", "the user's choice stays"
