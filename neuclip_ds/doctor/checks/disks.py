"""Disks of the run folder and of the shard cache: room for what a run writes there, and the speed of durable writes."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.cache import private_folder
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, warning, wrong
from neuclip_ds.doctor.request import Request
from neuclip_ds.models.dual_encoder import parameter_count
from neuclip_ds.planning.memory import MemoryQuery

_STATE = 12  # bytes a parameter in a checkpoint: the float32 weight and AdamW's two moments
_BLOCK = 8 << 20
_WRITTEN = 256 << 20  # bytes
_SLOW = 50e6  # bytes a second


class Place(NamedTuple):
    """A folder that a run writes to."""

    name: str
    folder: Path
    needed: float  # bytes
    purpose: str
    fix: str
    required: bool  # whether the run ends where they do not fit


def examine_space(request: Request, communicator: Communicator) -> Iterator[Finding]:
    for place in places(request):
        free = shutil.disk_usage(_existing(place.folder)).free
        there = f"{place.folder} ({place.name}) has {free / 1e9:,.1f} GB free"
        if place.needed:
            there += f", {place.purpose} take {place.needed / 1e9:,.2f} GB"
        if free >= place.needed:
            yield fine(f"{there}.")
        else:
            yield (wrong if place.required else warning)(f"{there}.", place.fix)


def examine_speed(request: Request, communicator: Communicator) -> Iterator[Finding]:
    for place in places(request):
        try:
            speed = written_per_second(_existing(place.folder))
        except OSError as error:
            yield wrong(f"{place.folder} ({place.name}) cannot be written: {error.strerror}.", place.fix)
            continue
        yield fine(figures={f"write and fsync, {place.name}, MB/s": speed / 1e6})
        if speed < _SLOW:
            seconds = place.needed / speed
            yield warning(
                f"{place.folder} ({place.name}) is written at {speed / 1e6:.0f} MB/s, {place.purpose} in "
                f"{seconds:,.0f} s.",
                place.fix,
            )


def places(request: Request) -> list[Place]:
    """Return what a run writes to on a node.

    Raises:
        UserError: the model cannot be built, or the cache folder is not safe.
    """
    run, data = request.config.run, request.config.data
    kept = run.keep_checkpoints + 1 + (run.best_metric is not None)  # one more while the oldest is replaced
    state = _STATE * parameter_count(MemoryQuery(request.config, 1).build())
    other = "Make room there, or choose another --run.folder; run.keep_checkpoints keeps fewer."
    found = [Place("run folder", run.folder, kept * state, f"{kept} checkpoints", other, True)]
    cached = data.cache_dir is not None or data.cache_local
    fix = "Set data.cache_dir to a folder on a larger or faster local disk, or lower data.cache_gb."
    cache, size = data.cache_dir or private_folder(), data.cache_gb * 1e9 if cached else 0.0
    found.append(Place("shard cache", cache, size, "the shards of data.cache_gb", fix, False))
    return found


def written_per_second(folder: Path, size: int = _WRITTEN) -> float:
    """Return bytes a second of a file that is written and has reached the disk; it is removed again."""
    block = os.urandom(_BLOCK)  # file systems may compress
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        began = time.perf_counter()
        for _ in range(max(1, size // _BLOCK)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return max(_BLOCK, size) / (time.perf_counter() - began)


def _existing(folder: Path) -> Path:
    """Return the folder, or the one above in which it will be created."""
    absolute = folder.expanduser().absolute()
    return next(path for path in (absolute, *absolute.parents) if path.is_dir())
