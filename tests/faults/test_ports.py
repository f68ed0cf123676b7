"""Strangers at the ports of a run: they may read and write all that they reach, and the run continues to its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from forks import Program, fork
from small_runs import ROOT, demo_shards, environment, training

from neuclip_ds.distributed import failure_detector
from neuclip_ds.distributed.authentication import sign
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.failure_detector import Failure, FailureDetector
from neuclip_ds.distributed.listening import listen_at
from neuclip_ds.distributed.rendezvous import Arrival, open_store, rendezvous
from neuclip_ds.distributed.secret import launch_key
from neuclip_ds.errors import UserError

KEY = b"known to the ranks alone"
FORGED = [
    {"left": True},
    Failure(1, "stranger", "forged", 0, True)._asdict(),
    {"token": "", "rank": 0, "host": "stranger"},
    {},
]


NONCE = "ab" * 16  # that the ranks choose where `recorded` notes what they send


def idle(port: int, number: int = 300) -> Iterator[socket.socket]:
    yield from (socket.create_connection(("127.0.0.1", port)) for _ in range(number))


def idle_thousand(port: int) -> Iterator[socket.socket]:
    yield from idle(port, 1000)


def garbage(port: int) -> Iterator[socket.socket]:
    for data in (b"\0" * 200_000, b"\xff\xfe\n" * 1000, b"[" * 50_000 + b"\n", b"GET / HTTP/1.1\r\n\r\n"):
        stranger = socket.create_connection(("127.0.0.1", port))
        with suppress(OSError):  # closed meanwhile, as it should be
            stranger.sendall(data)
        yield stranger


def forged(port: int) -> Iterator[socket.socket]:
    for message in FORGED:
        stranger = socket.create_connection(("127.0.0.1", port))
        for line in ("00" * 16, f'{"00" * 32} [0, "stranger"]', f"{'00' * 32} {json.dumps(message)}"):
            stranger.sendall(f"{line}\n".encode())
        yield stranger


def replayed(port: int) -> Iterator[socket.socket]:
    """All that the ranks of an earlier run with the same key have sent, from the greeting to `left`."""
    for sent in sorted(Path().glob("sent *")):
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(f"{NONCE}\n".encode() + sent.read_bytes())
        yield stranger


def record(rank: int) -> None:
    """Note, in a rank's process, what it sends to rank 0."""
    failure_detector.secrets.token_hex = lambda size: NONCE  # type: ignore[assignment]
    pack = failure_detector.Channel.pack

    def noting(channel: failure_detector.Channel, message: object) -> bytes:
        line = pack(channel, message)
        if channel._subjects[0] == "client":
            with Path(f"sent {rank}").open("ab") as file:
                file.write(line)
        return line

    failure_detector.Channel.pack = noting  # type: ignore[method-assign]


def one_rank(rank: int, folder: str, work: str) -> None:
    os.chdir(folder)
    sys.stderr = Path(f"{rank}.txt").open("w")  # noqa: SIM115, open until the process ends
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    store = dist.FileStore("store", 2)
    store.set_timeout(timedelta(seconds=30))
    failure_detector._GREETING_TIMEOUT = 1.0
    if work == "recorded":
        record(rank)
    with FailureDetector(RankEnvironment(rank, 0, 2), store, KEY):
        Path("port").write_text(store.get("failure_detector").decode().split()[1])
        Path(f"in {rank}").touch()
        deadline = time.monotonic() + 30
        while not Path("out").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if work == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if work == "killed":
            time.sleep(30)


@contextmanager
def two_ranks(folder: Path, work: str = "") -> Iterator[tuple[int, list[int | None]]]:
    """Yield the failure detector's port while two ranks run, and a list that holds their exit codes afterwards."""
    processes = [fork(one_rank, rank, str(folder), work, variables=os.environ) for rank in range(2)]
    codes: list[int | None] = []
    wait_for(lambda: (folder / "in 0").exists() and (folder / "in 1").exists())
    yield int((folder / "port").read_text()), codes
    (folder / "out").touch()
    for process in processes:
        process.join(40)
        process.kill()
    codes += [process.exitcode for process in processes]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def closed(stranger: socket.socket) -> bool:
    stranger.settimeout(5)
    try:
        while stranger.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("attack", [idle, pytest.param(idle_thousand, marks=pytest.mark.slow), garbage, forged])
def test_strangers_are_closed_and_the_ranks_go_on(
    attack: Callable[[int], Iterator[socket.socket]], tmp_path: Path
) -> None:
    with two_ranks(tmp_path) as (port, codes):
        strangers = list(attack(port))
        assert all(closed(stranger) for stranger in strangers)
    assert codes == [0, 0]
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["", ""]


def test_a_recorded_run_cannot_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("first", "second"):
        Path(part).mkdir()
    with two_ranks(tmp_path / "first", "recorded") as (_, codes):
        pass
    assert codes == [0, 0]
    monkeypatch.chdir("first")
    with two_ranks(tmp_path / "second", "killed") as (port, codes):
        strangers = list(replayed(port))
        assert len(strangers) == 2
        assert all(closed(stranger) for stranger in strangers)
    assert codes == [1, -signal.SIGKILL]


def test_a_killed_rank_ends_all_while_strangers_wait(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "killed") as (port, codes):
        strangers = list(idle(port, 150)) + list(forged(port))
    assert codes == [1, -signal.SIGKILL]
    del strangers


@contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[int, list[Program]]]:
    """Yield the port of a run on two ranks, which have begun to train, and their programs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {**environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    programs = [
        Program(ROOT / "train.py", *options, variables={**where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        log = folder / "run" / "log.txt"
        wait_for(lambda: log.exists() and "pairs in" in log.read_text())
        yield port, programs
    finally:
        for program in programs:
            program.kill()


def listening(process: Program) -> set[str]:
    """Addresses at which a process listens."""
    found = set()
    files = Path(f"/proc/{process._process.pid}/fd").iterdir()
    inodes = {str(entry.readlink()) for entry in files if entry.is_symlink()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            found.add(socket.inet_ntoa(bytes.fromhex(words[1].split(":")[0])[::-1]))
    return found


@pytest.mark.slow
def test_a_run_among_strangers(tmp_path: Path) -> None:
    """They read the whole store, write into it and greet with all that it holds; no port is open to other nodes."""
    data = demo_shards(tmp_path / "data", pairs=40)
    with running(tmp_path, *training(tmp_path, str(data), 250)) as (port, programs):
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5))
        ours = dist.PrefixStore("neuclip_ds/0", store)
        assert not list(tmp_path.glob(".secret*"))
        assert listening(programs[0]) == {"127.0.0.1"}
        held = {name: ours.get(name).decode() for name in ("launch", "failure_detector", "verdict", "arrival/1")}
        hub = int(held["failure_detector"].split()[1])
        strangers = [*idle(hub, 150), *garbage(hub), *forged(hub)]
        for value in held.values():
            strangers += [socket.create_connection(("127.0.0.1", hub))]
            strangers[-1].sendall(f"{value}\n{value}\n".encode())
        for name in (*held, "arrivals", "without secret"):
            ours.set(name, "forged")
        assert all(program.running for program in programs)
        ends = [program.wait() for program in programs]
    assert [end.returncode for end in ends] == [0, 0], ends
    assert "Traceback" not in "".join(end.stderr for end in ends)


def test_forged_arrivals_and_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger arrives as rank 1 with another config; a verdict that rank 0 has not signed is none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    stores = [open_store(rank, timedelta(seconds=10)) for rank in range(2)]
    stranger = Arrival(1, 2, "stranger", {"config": "other"})
    for key in (b"guessed", b""):
        stores[1].set(f"arrival/{stores[1].add('arrivals', 1)}", sign(key, "arrival", json.dumps(stranger)))
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(rendezvous, store, KEY, RankEnvironment(rank, rank, 2), {}, timedelta(seconds=10))
            for rank, store in enumerate(stores)
        ]
        assert [rank.result() for rank in ranks] == [None, None]
    stores[1].set("verdict", sign(b"guessed", "verdict", ""))
    with pytest.raises(UserError, match="changed by another program"):
        rendezvous(stores[1], KEY, RankEnvironment(1, 1, 2), {}, timedelta(seconds=10))


def one_key(rank: int, port: int, folder: str, theirs: str, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        store = open_store(rank, timedelta(seconds=20))
        with launch_key(store, rank, Path(theirs if rank else folder)) as key:
            Path(out, str(rank)).write_text(key.hex())
            store.set(f"has {rank}", "")
            if rank == 0:  # whose end closes the store
                store.wait(["has 1"])
                (file,) = Path(folder).glob(f".secret-{json.loads(store.get('launch'))[0]}")
                Path(out, "mode").write_text(oct(file.stat().st_mode & 0o777))
    except (UserError, dist.DistError) as error:
        Path(out, str(rank)).write_text(str(error))


def keys(folder: Path, theirs: Path) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / "out"
    out.mkdir()
    args = (port, str(folder), str(theirs), str(out))
    ranks = [fork(one_key, rank, *args, variables=os.environ) for rank in range(2)]
    for rank in ranks:
        rank.join(40)
        rank.kill()
    return [(out / str(rank)).read_text() for rank in range(2)]


def test_the_file_of_the_secret(tmp_path: Path) -> None:
    """It is this user's alone and of this start alone, and is gone afterwards, as that of a start that was killed."""
    for name, age in (("recent", 60), ("abandoned", 7200)):
        (tmp_path / f".secret-{name}").write_text("00" * 32)
        os.utime(tmp_path / f".secret-{name}", (time.time() - age,) * 2)
    first, second = keys(tmp_path, tmp_path)
    assert first == second
    assert len(first) == 64
    assert (tmp_path / "out" / "mode").read_text() == "0o600"
    assert [path.name for path in tmp_path.glob(".secret-*")] == [".secret-recent"]


def test_a_name_that_other_nodes_resolve_otherwise_is_served_at_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen_at("127.0.0.3") as one, listen_at("localhost") as two:
        assert one.getsockname()[0] == "127.0.0.3"
        assert two.getsockname()[0] in ("127.0.0.1", "::1")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    with listen_at("gpu01") as anywhere:
        assert anywhere.getsockname()[0] in ("::", "0.0.0.0")
