"""GPUs or cores of a node, their memory and driver."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, warning, wrong
from neuclip_ds.doctor.request import Request
from neuclip_ds.planning.memory_check import local_ranks

_FIELDS = "name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
_LIMIT = 30.0  # seconds; the tool hangs where a GPU does
_IN_USE = 0.05  # share of a GPU's memory that the driver and a display may hold


class Gpu(NamedTuple):
    """A GPU as its driver reports it."""

    name: str
    driver: str
    memory: float  # MiB
    used: float  # MiB
    errors: int  # uncorrected ones of its memory since the driver was loaded


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    try:
        gpus = list_gpus()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = " ".join(str(getattr(error, "stderr", "") or error).split())[:200]
        yield wrong(f"nvidia-smi fails: {reason}", "Reload the NVIDIA driver or restart the node; see `dmesg`.")
        gpus = []
    chosen_cpu = request.accelerator == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if not gpus or chosen_cpu:
        yield _cores(hidden=len(gpus))
        return
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
        yield wrong(
            f"torch {torch.__version__}, built {built}, cannot use the {len(gpus)} GPUs of driver {gpus[0].driver}.",
            "Install a torch for CUDA that this driver supports (`nvidia-smi` names its CUDA), or a newer driver.",
        )
        return
    yield from _healths(gpus)
    yield from _count(torch.cuda.device_count(), local_ranks())
    names = sorted({f"{gpu.name}, {gpu.memory / 1024:.0f} GiB" for gpu in gpus})
    described = f"{len(gpus)} x {' and '.join(names)}"
    yield fine(facts={"GPUs": described, "driver": ", ".join(sorted({gpu.driver for gpu in gpus}))})


def list_gpus() -> list[Gpu]:
    """Return the GPUs of this machine, none where no driver is installed.

    Raises `OSError`, `subprocess.SubprocessError` or `ValueError` if nvidia-smi fails, hangs or prints something else.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=True)
    return [parse(line) for line in done.stdout.splitlines() if line.strip()]


def parse(line: str) -> Gpu:
    """Return the GPU that a line of nvidia-smi describes; a field that it does not know counts as zero."""
    name, driver, *numbers = (part.strip() for part in line.split(","))
    memory, used, errors = (float(text) if text.replace(".", "").isdigit() else 0.0 for text in numbers)
    return Gpu(name, driver, memory, used, int(errors))


def _cores(hidden: int) -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    without = f", {hidden} GPUs hidden by DS_ACCELERATOR or CUDA_VISIBLE_DEVICES" if hidden else ", no GPU"
    return fine(facts={"devices": f"CPU, {cores} cores, {memory:,.0f} GB{without}"})


def _healths(gpus: list[Gpu]) -> Iterator[Finding]:
    for number, gpu in enumerate(gpus):
        if gpu.errors:
            yield wrong(
                f"GPU {number} ({gpu.name}) has {gpu.errors} uncorrected memory errors.",
                "Reset it (nvidia-smi -r) or restart the node, and replace it if they return.",
            )
        if gpu.used > _IN_USE * gpu.memory:
            yield warning(
                f"GPU {number} ({gpu.name}) has {gpu.used / 1024:.1f} of {gpu.memory / 1024:.0f} GiB in use.",
                "End the programs that `nvidia-smi` lists, or choose other GPUs.",
            )


def _count(gpus: int, ranks: int) -> Iterator[Finding]:
    if gpus < ranks:
        yield wrong(
            f"{ranks} ranks run here, and torch sees {gpus} GPUs.",
            "Start as many ranks as the node has GPUs (slots of the hostfile), and let each see all of them.",
        )
    elif gpus > ranks:
        yield warning(
            f"Of {gpus} GPUs, {ranks} are examined: one a rank.",
            f"deepspeed --num_gpus {gpus} --module neuclip_ds doctor examines all, and the links between them.",
        )
