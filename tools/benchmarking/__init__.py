"""Code shared by the benchmarks: new processes, interleaved runs, peak memory, and random inputs."""

import argparse
import json
import math
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator

FEATURES = ("random", "matched", "collapsed", "opposed")  # opposed: collapsed onto two opposite directions
PEER = "open_clip ClipLoss"  # name of the loss from `clip_loss` in tables


def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `work(*arguments)` in each of `ranks` fresh processes; return the results, sent as JSON, in rank order."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        mp.spawn(_run_rank, (ranks, port, folder, work, arguments), nprocs=ranks)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def _run_rank(rank: int, ranks: int, port: int, folder: str, work: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo may take long to look up the host name
    Path(folder, str(rank)).write_text(json.dumps(work(*arguments)))
    if dist.is_initialized():
        dist.destroy_process_group()


def connect(device: str) -> Communicator:
    """Initialize this rank's process group, and return its communicator; call this in `on_ranks`.

    The backend is gloo on a CPU, or NCCL with one GPU per rank.
    """
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    dist.init_process_group(backend)
    return Communicator(device)


def in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work(*arguments)` in a new process with the environment of the first call; return its result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarking", "neuclip_ds.data.loader"])  # modules that take seconds to import
    with ProcessPoolExecutor(1, context, initializer=_prepare) as pool:
        return pool.submit(work, *arguments).result()


def _prepare() -> None:
    multiprocessing.set_start_method("fork", force=True)  # start method of loader workers, as in training
    del sys.modules["__main__"].__file__  # spawned processes then need not import the benchmark
    torch.set_num_threads(1)


def in_turns(works: Mapping[str, Callable[[], object]], turns: int, wait: Callable[[], None]) -> dict[str, list[float]]:
    """Run the functions in `works` interleaved, each after a call of `wait`; return each one's seconds in every turn.

    If a GPU is in use, a function's time ends when the GPU has finished.
    """

    def finish() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            wait()
            finish()
            began = time.perf_counter()
            work()
            finish()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def sync(path: Path, forget: bool = False) -> None:
    """Flush a file to disk and, if `forget`, drop it from the page cache, so that the next read uses the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if forget:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def machine(device: str = "cpu") -> str:
    gpu = f"{torch.cuda.get_device_name()}, " if device == "cuda" else ""
    return f"{gpu}{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes: `VmRSS`, or `VmHWM` for the peak since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            kilobytes = int(line.split()[1])
            return kilobytes * 1024
    raise KeyError(field)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(work: Callable[[], object], communicator: Communicator) -> int:
    """Return the peak memory of `work` minus the memory at its start: allocated GPU memory, or resident memory."""
    communicator.barrier()
    if communicator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - allocated
    reset_peak()
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


@dataclass(frozen=True, kw_only=True)
class RandomFeatures:
    """Features of one rank's rows, on the rank's device, and the indices of their samples."""

    image: Tensor  # (b, d), with rows of norm 1
    text: Tensor  # (b, d)
    index: Tensor  # (b,) int64, in host memory


def random_features(rows: int, dim: int, communicator: Communicator, kind: str = "random") -> RandomFeatures:
    """Return this rank's random features; kinds other than `random` resemble features that occur in training."""
    generator = torch.Generator().manual_seed(communicator.rank)
    image = torch.randn(rows, dim, generator=generator)
    text = torch.randn(rows, dim, generator=generator)
    center = torch.ones(dim)
    match kind:
        case "matched":
            text += image  # positive pairs have a similarity of about 0.7
        case "collapsed":
            image = image + 5 * center
            text = text + 5 * center
        case "opposed":
            side = torch.randint(0, 2, (rows, 1), generator=generator) * 2 - 1
            image = image + 2 * side * center
            text = text + 2 * side * center
    device = communicator.device
    return RandomFeatures(
        image=normalize(image, dim=1).to(device),
        text=normalize(text, dim=1).to(device),
        index=torch.arange(rows) + communicator.rank * rows,
    )


def initial_logit_scale(config: Config) -> float:
    """Return the peers' initial log(1/tau): CLIP's value if the config does not set `temperature.initial`."""
    return math.log(1 / (config.objective.temperature.initial or 0.07))


def clip_loss(communicator: Communicator) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return open_clip's loss of this rank as a function of (image, text, logit_scale), in its recommended form."""
    from open_clip.loss import ClipLoss

    return ClipLoss(
        local_loss=True,
        gather_with_grad=True,
        cache_labels=True,
        rank=communicator.rank,
        world_size=communicator.world_size,
    )


def program_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the argument parser for one rank of a program that tools/benchmark_step.py runs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("config", type=Path, help="config of the run")
    parser.add_argument("out", type=Path, help="folder of the run")
    parser.add_argument("--random", action="store_true", help="train on four repeated batches of random pairs")
    parser.add_argument(
        "--caption-tokens", default="full", help="lengths of random captions, as in benchmark_step.py (default: full)"
    )
    parser.add_argument("--bf16", action="store_true", help="run under bf16 autocast")
    return parser
