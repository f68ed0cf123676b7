"""Two nodes on this machine, by every launcher: the same weights as two ranks of one node, and one end for all."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import ROOT, SMALL, demo_shards, environment

from neuclip_ds.recipe import dump, parse

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
DEEPSPEED, TORCHRUN = str(BIN / "deepspeed"), str(BIN / "torchrun")
NODES = ("127.0.0.2", "127.0.0.3")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the data, a recipe (options with quotes and braces do not survive pdsh's shells) and a hostfile."""
    folder = tmp_path_factory.mktemp("launch")
    options = ["--objective.method=fastclip_v3", "--data.batch_size=8", "--data.workers=1", "--data.val="]
    options += ["--data.zero_shot=", f"--data.train={demo_shards(folder / 'data', pairs=80)}"]
    (folder / "small.yaml").write_text(dump(parse(["demo", *SMALL, *options]).config))
    (folder / "hostfile").write_text("".join(f"{node} slots=1\n" for node in NODES))
    return folder


def train(name: str, steps: int = 6) -> list[str]:
    return [str(ROOT / "train.py"), "small.yaml", f"--run.name={name}", f"--budget.steps={steps}"]


def start(folder: Path, *commands: list[str], **variables: str) -> list[subprocess.Popen[str]]:
    """Each with its own output, as in terminals of their own."""
    variables = {**environment(), "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
    return [
        subprocess.Popen(
            command, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for command in commands
    ]


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def succeed(processes: list[subprocess.Popen[str]]) -> None:
    for code, said in ends(processes):
        assert code == 0, said


def by_hand(script: list[str]) -> list[list[str]]:
    """`--no_ssh`, once a node."""
    common = ["--hostfile", "hostfile", "--no_ssh", "--master_addr", NODES[0], "--master_port", free_port()]
    return [[DEEPSPEED, *common, "--node_rank", str(rank), *script] for rank in range(2)]


def state(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """All that the run's checkpoint holds."""
    (checkpoint,) = (folder / "runs" / name / "checkpoints").glob("step_*")
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.relative_to(checkpoint)}:{key}": x for file in files for key, x in load_file(file).items()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Of one node with two ranks."""
    succeed(start(folder, [DEEPSPEED, "--num_accelerators", "2", "--master_port", free_port(), *train("one")]))
    return state(folder, "one")


def check(folder: Path, name: str, expected: dict[str, torch.Tensor]) -> None:
    found = state(folder, name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_without_ssh(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    succeed(start(folder, *by_hand(train("no_ssh"))))
    check(folder, "no_ssh", expected)


def test_torchrun(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    common = [TORCHRUN, "--nnodes=2", "--nproc_per_node=1", f"--master_addr={NODES[0]}", f"--master_port={free_port()}"]
    succeed(start(folder, *([*common, f"--node_rank={rank}", *train("torchrun")] for rank in range(2))))
    check(folder, "torchrun", expected)


def test_mpirun(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Ranks and address by mpi4py."""
    mpirun = shutil.which("mpirun", path=f"{BIN}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("needs Open MPI")
    options = ["-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-x", "MASTER_PORT"]
    succeed(start(folder, [mpirun, *options, sys.executable, *train("mpirun")], MASTER_PORT=free_port()))
    check(folder, "mpirun", expected)


def test_srun(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """What srun would set, as no SLURM is here."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "127.0.0.[2-3]"}
    step.update(SLURM_JOB_ID=free_port())
    processes = [
        process
        for rank in range(2)
        for process in start(folder, [sys.executable, *train("srun")], SLURM_PROCID=str(rank), **step)
    ]
    succeed(processes)
    check(folder, "srun", expected)


@pytest.fixture(scope="module")
def ssh_port(folder: Path) -> Iterator[str]:
    """An ssh server on loopback for this user, by a key of its own."""
    missing = [tool for tool in ("pdsh", "ssh", "ssh-keygen") if shutil.which(tool) is None]
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if missing or server is None:
        pytest.skip("needs pdsh and an ssh server")
    port, files = free_port(), folder / "ssh"
    files.mkdir()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(files / key)], check=True)
    settings = [f"Port {port}", "ListenAddress 0.0.0.0", f"HostKey {files}/host", "StrictModes no", "PidFile none"]
    settings += [f"AuthorizedKeysFile {files}/user.pub", "PermitRootLogin yes", "UsePAM no"]
    (files / "config").write_text("\n".join(settings) + "\n")
    sshd = subprocess.Popen([server, "-D", "-e", "-f", str(files / "config")], stderr=subprocess.DEVNULL)
    (folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\n")  # float sums depend on the number of threads
    yield port
    sshd.terminate()
    sshd.wait()


def pdsh(folder: Path, ssh_port: str, script: list[str]) -> list[subprocess.Popen[str]]:
    options = f"-i {folder}/ssh/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -l {getpass.getuser()}"
    command = [DEEPSPEED, "--hostfile", "hostfile", "--no_ssh_check", "--ssh_port", ssh_port]
    command += ["--master_addr", NODES[0], "--master_port", free_port(), *script]
    return start(folder, command, PDSH_SSH_ARGS_APPEND=options)


def test_pdsh(folder: Path, expected: dict[str, torch.Tensor], ssh_port: str) -> None:
    succeed(pdsh(folder, ssh_port, train("pdsh")))
    check(folder, "pdsh", expected)


def test_variables_reach_the_second_node(folder: Path, ssh_port: str) -> None:
    """From `.deepspeed_env`, and those that DeepSpeed forwards by itself; others do not."""
    (folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nHF_HOME=/weights\nNOTE=two words\n")
    shown = "import os; open(os.environ['RANK'] + '.env', 'w').write(repr(dict(os.environ)))"
    (folder / "show.py").write_text(shown)
    os.environ["NOT_FORWARDED"] = "1"
    try:
        succeed(pdsh(folder, ssh_port, [str(folder / "show.py")]))
    finally:
        del os.environ["NOT_FORWARDED"]
    for rank in range(2):
        found = eval((folder / f"{rank}.env").read_text())
        assert (found["HF_HOME"], found["NOTE"]) == ("/weights", "two words")
        assert str(ROOT) in found["PYTHONPATH"].split(":")
        assert "NOT_FORWARDED" not in found


def rank_process(name: str, rank: int) -> int:
    """The process that is a rank of a run."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
            variables = (entry / "environ").read_text().split("\0")
        except OSError:  # no process, or one that has ended
            continue
        if f"--run.name={name}" in words and f"RANK={rank}" in variables:
            return int(entry.name)
    raise LookupError(f"rank {rank} of {name}")


def wait_for_steps(log: Path) -> None:
    deadline = time.monotonic() + 120
    while not (log.is_file() and "pairs in" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_both_nodes(rank: int, folder: Path) -> None:
    name = f"killed_{rank}"
    nodes = start(folder, *by_hand(train(name, steps=1_000_000)))
    wait_for_steps(folder / "runs" / name / "log.txt")
    os.kill(rank_process(name, rank), signal.SIGKILL)
    found = ends(nodes)
    assert all(code for code, _ in found)
    assert f"because rank {rank} on " in found[1 - rank][1]
    assert "it was killed and reported no error" in found[1 - rank][1]


def test_sigterm_at_the_launcher_saves(folder: Path) -> None:
    """It is enough that one node's launcher is told."""
    nodes = start(folder, *by_hand(train("terminated", steps=1_000_000)))
    wait_for_steps(folder / "runs" / "terminated" / "log.txt")
    time.sleep(1)
    launcher = subprocess.run(["pgrep", "-P", str(nodes[1].pid)], capture_output=True, text=True).stdout.split()[0]
    os.kill(int(launcher), signal.SIGTERM)
    found = ends(nodes)
    assert "Stopped after step" in found[0][1], found
    assert all(code for code, _ in found), found
    assert state(folder, "terminated")


def test_another_config_on_the_second_node(folder: Path) -> None:
    first, second = by_hand(train("differs"))
    found = ends(start(folder, first, [*second, "--optimizer.lr=0.5"]))
    for code, said in found:
        assert code == 2, said
        assert "Traceback" not in said
        assert said.count("lr: 0.5 instead of lr: 0.001") == 1
        assert "rank 1 on " in said


def test_data_that_the_second_node_lacks(folder: Path) -> None:
    """The second node starts in another folder, whose shards and runs are others."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("small.yaml", "hostfile"):
        shutil.copy(folder / name, elsewhere)
    first, second = by_hand(train("elsewhere"))
    found = ends([*start(folder, first), *start(elsewhere, second)])
    assert [code for code, _ in found] == [2, 2], found
    assert "all nodes must share it" in found[0][1]
    assert "rank 1 on " in found[0][1]
