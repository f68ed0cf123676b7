"""Train on two simulated nodes with every launcher: weights equal those of one node, and a failure ends both nodes."""

import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import ROOT, SMALL, demo_shards, environment

from neuclip_ds.config import dump
from neuclip_ds.distributed.environment import free_port
from neuclip_ds.recipe import parse

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
DEEPSPEED, TORCHRUN = str(BIN / "deepspeed"), str(BIN / "torchrun")
NODES = ("127.0.0.2", "127.0.0.3")
LIMIT = 1200  # seconds after which a launch counts as stuck; a loaded machine takes far less


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, a hostfile and a recipe, because pdsh's shells break options with quotes or braces."""
    folder = tmp_path_factory.mktemp("launch")
    options = ["--objective.method=fastclip_v3", "--data.batch_size=8", "--data.workers=1", "--data.val="]
    options += ["--data.zero_shot=", f"--data.train={demo_shards(folder / 'data', pairs=80)}"]
    (folder / "small.yaml").write_text(dump(parse(["demo", *SMALL, *options]).config))
    (folder / "hostfile").write_text("".join(f"{node} slots=1\n" for node in NODES))
    return folder


def train(name: str, steps: int = 6) -> list[str]:
    return [str(ROOT / "train.py"), "small.yaml", f"--run.name={name}", f"--max_steps={steps}"]


def start(folder: Path, *commands: list[str], **variables: str) -> list[subprocess.Popen[str]]:
    """Start each command in a process with separate output, as if each ran in its own terminal."""
    variables = {**environment(), "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
    return [
        subprocess.Popen(
            command, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for command in commands
    ]


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return the exit code and the output of each process."""
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, outputs, strict=True)]


def succeed(processes: list[subprocess.Popen[str]]) -> None:
    for code, output in ends(processes):
        assert code == 0, output


def by_hand(script: list[str]) -> list[list[str]]:
    """Return the commands that start each of the two nodes by hand, with `--no_ssh`."""
    common = ["--hostfile", "hostfile", "--no_ssh", "--master_addr", NODES[0], "--master_port", str(free_port())]
    return [[DEEPSPEED, *common, "--node_rank", str(rank), *script] for rank in range(2)]


def state(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return all tensors in the run's only checkpoint."""
    (checkpoint,) = (folder / "runs" / name / "checkpoints").glob("step_*")
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.relative_to(checkpoint)}:{key}": x for file in files for key, x in load_file(file).items()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Return the state of a run on one node with two ranks."""
    succeed(start(folder, [DEEPSPEED, "--num_accelerators", "2", "--master_port", str(free_port()), *train("one")]))
    return state(folder, "one")


def check(folder: Path, name: str, expected: dict[str, torch.Tensor]) -> None:
    tensors = state(folder, name)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def under_torchrun(folder: Path, script: list[str]) -> list[subprocess.Popen[str]]:
    common = [TORCHRUN, "--nnodes=2", "--nproc_per_node=1", f"--master_addr={NODES[0]}", f"--master_port={free_port()}"]
    commands = [[*common, f"--node_rank={rank}", *script] for rank in range(2)]
    return start(folder, *commands)


def under_mpirun(folder: Path, script: list[str]) -> list[subprocess.Popen[str]]:
    """Start two ranks with mpirun; DeepSpeed finds their ranks and address with mpi4py."""
    mpirun = shutil.which("mpirun", path=f"{BIN}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("needs Open MPI")
    options = ["-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-x", "MASTER_PORT"]
    return start(folder, [mpirun, *options, sys.executable, *script], MASTER_PORT=str(free_port()))


def under_srun(folder: Path, script: list[str]) -> list[subprocess.Popen[str]]:
    """Start two ranks with the variables that srun would set, because SLURM is not installed here."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "127.0.0.[2-3]"}
    step.update(SLURM_JOB_ID=str(free_port()))
    return [start(folder, [sys.executable, *script], SLURM_PROCID=str(rank), **step)[0] for rank in range(2)]


LAUNCHERS: dict[str, Callable[[Path, list[str]], list[subprocess.Popen[str]]]] = {
    "no_ssh": lambda folder, script: start(folder, *by_hand(script)),
    "torchrun": under_torchrun,
    "mpirun": under_mpirun,
    "srun": under_srun,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_nodes_train_the_same_weights_as_one(
    launcher: str, folder: Path, expected: dict[str, torch.Tensor]
) -> None:
    succeed(LAUNCHERS[launcher](folder, train(launcher)))
    check(folder, launcher, expected)


@pytest.fixture(scope="module")
def ssh_port(folder: Path) -> Iterator[str]:
    """Start an ssh server that accepts this user with a new key, and yield its port."""
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
    # float sums depend on the device and the number of threads
    (folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    yield str(port)
    sshd.terminate()
    sshd.wait()


def test_pdsh_starts_two_nodes_that_train_the_same_weights_as_one(
    folder: Path, expected: dict[str, torch.Tensor], ssh_port: str
) -> None:
    options = f"-i {folder}/ssh/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -l {getpass.getuser()}"
    command = [DEEPSPEED, "--hostfile", "hostfile", "--no_ssh_check", "--ssh_port", ssh_port]
    command += ["--master_addr", NODES[0], "--master_port", str(free_port()), *train("pdsh")]
    succeed(start(folder, command, PDSH_SSH_ARGS_APPEND=options))
    check(folder, "pdsh", expected)


def rank_process(name: str, rank: int) -> int:
    """Return the process ID of a rank of a run."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
            variables = (entry / "environ").read_text().split("\0")
        except OSError:  # not a process, or a process that has ended
            continue
        if f"--run.name={name}" in words and f"RANK={rank}" in variables:
            return int(entry.name)
    raise LookupError(f"rank {rank} of {name}")


def endless(folder: Path, name: str) -> list[subprocess.Popen[str]]:
    """Start both nodes of a run that does not end on its own, and return them after its first step."""
    nodes = start(folder, *by_hand(train(name, steps=1_000_000)))
    log = folder / "runs" / name / "log.txt"
    deadline = time.monotonic() + LIMIT
    while not (log.is_file() and "step 1/" in log.read_text()):
        running = all(node.poll() is None for node in nodes)
        assert running and time.monotonic() < deadline, ends(nodes)
        time.sleep(0.2)
    return nodes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_both_nodes(rank: int, folder: Path) -> None:
    nodes = endless(folder, f"killed_{rank}")
    os.kill(rank_process(f"killed_{rank}", rank), signal.SIGKILL)
    ended = ends(nodes)
    assert all(code for code, _ in ended)
    assert f"because rank {rank} on " in ended[1 - rank][1]
    assert "it was killed and reported no error" in ended[1 - rank][1]


def test_torchrun_restarts_the_ranks_of_two_nodes(folder: Path) -> None:
    """The agent of the node whose rank was killed counts a restart, but the other node's agent does not."""
    endpoint = f"{NODES[0]}:{free_port()}"
    common = [TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--max-restarts=2", "--rdzv-backend=c10d"]
    common += [f"--rdzv-endpoint={endpoint}", "--rdzv-id=one", "--monitor-interval=0.1"]
    steps = ["--run.checkpoint_every=10", "--run.log_every=1"]
    commands = [[*common, f"--local-addr={node}", *train("restarted", steps=60), *steps] for node in NODES]
    nodes = start(folder, *commands)
    deadline = time.monotonic() + LIMIT
    checkpoints = folder / "runs" / "restarted" / "checkpoints"
    while not list(checkpoints.glob("step_*")):
        assert time.monotonic() < deadline and all(node.poll() is None for node in nodes), ends(nodes)
        time.sleep(0.05)
    os.kill(rank_process("restarted", 1), signal.SIGKILL)
    succeed(nodes)
    assert (checkpoints / "step_000000060").exists()
    log = (folder / "runs" / "restarted" / "log.txt").read_text()
    assert log.count(", 0 of 60 steps done") == 1, "the restarted ranks resume"


def test_a_sigterm_to_a_launcher_saves_a_checkpoint_and_ends_both_nodes(folder: Path) -> None:
    nodes = endless(folder, "terminated")
    launcher = subprocess.run(["pgrep", "-P", str(nodes[1].pid)], capture_output=True, text=True).stdout.split()[0]
    os.kill(int(launcher), signal.SIGTERM)
    ended = ends(nodes)
    assert "Stopped after step" in ended[0][1], ended
    assert all(code for code, _ in ended), ended
    assert state(folder, "terminated")


def test_nodes_that_do_not_share_a_folder_are_refused(folder: Path) -> None:
    """The second node starts in a different folder, so it does not share the run's folder with the first node."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("small.yaml", "hostfile"):
        shutil.copy(folder / name, elsewhere)
    first, second = by_hand(train("elsewhere"))
    ended = ends([*start(folder, first), *start(elsewhere, second)])
    assert [code for code, _ in ended] == [2, 2], ended
    assert "all nodes must share it" in ended[0][1]
    assert "rank 1 on " in ended[0][1]
