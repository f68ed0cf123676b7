"""Build the manifest of a dataset: the list of its shards, and the global index at which each shard starts.

Examples:
  neuclip-ds build-manifest /data/cc12m/manifest '/data/cc12m/{00000..01242}.tar'
  neuclip-ds build-manifest manifests/laion 's3://bucket/laion/{000000..129999}.tar' --from-side-files
  mpirun -n 64 neuclip-ds build-manifest manifests/pool /pool/*.tar --uids dfn_uids.npy
  neuclip-ds build-manifest manifests/dfn shards.txt

The same command resumes a build that was interrupted or that found unusable shards.
"""

import argparse
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import cast

from neuclip_ds.cli.program import Parser, local_path, positive_integer, progress_bar
from neuclip_ds.data.build import write_manifest
from neuclip_ds.data.children import process_pool
from neuclip_ds.data.decoders import Captions
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import is_local, resolve_shards
from neuclip_ds.errors import counted

log = logging.getLogger(__name__)

_MANY_SHARDS = 100  # number of remote shards that triggers a warning
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")  # set by Open MPI, MPICH and SLURM's srun


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds build-manifest", description=__doc__)
    parser.add_argument("folder", type=local_path, help="folder for the manifest")
    parser.add_argument("sources", nargs="+", help="tars, folders, globs, brace patterns, URLs, or .txt lists of these")
    parser.add_argument(
        "--no-checksum",
        action="store_true",
        help="scan local shards faster: read only their tar headers and, with --uids, their JSON; store no checksums",
    )
    parser.add_argument(
        "--from-side-files",
        action="store_true",
        help="read only the counts in img2dataset's files next to the shards, not the shards themselves",
    )
    parser.add_argument(
        "--skip-unreadable",
        action="store_true",
        help="omit unusable shards, and list them in FOLDER/unreadable_shards.jsonl",
    )
    parser.add_argument("--captions", nargs="+", default=["txt"], help="sources of captions, as in data.captions")
    parser.add_argument(
        "--uids",
        nargs="+",
        default=[],
        help=".npy files with the sorted 128-bit uids of the samples to keep (default: all samples)",
    )
    parser.add_argument("--uid-key", default="uid", help="key of the uid in a sample's JSON")
    parser.add_argument(
        "--processes",
        type=positive_integer,
        help="worker processes (default: one per core); no effect under mpirun or srun",
    )
    options = parser.parse(arguments)
    with _workers(options.processes) as executor:
        if executor is not None:  # None on MPI's other ranks after the work is done
            _build(options, executor)


def _workers(processes: int | None) -> AbstractContextManager[Executor | None]:
    """Return a context manager that yields a pool of workers: local processes or, under `mpirun`, the other ranks.

    Under `mpirun`, one rank gets the pool (which runs on that rank if there are no others), and the other ranks get
    None once the work is done.
    """
    if not any(name in os.environ for name in _MPI):
        return process_pool(processes or os.cpu_count() or 1)
    from mpi4py.futures import MPICommExecutor

    return cast("AbstractContextManager[Executor | None]", MPICommExecutor())


def _build(options: argparse.Namespace, executor: Executor) -> None:
    started = time.monotonic()
    Captions(options.captions)
    paths: list[str] = []
    for source in options.sources:
        paths += resolve_shards(source)
    scan = ScanOptions(
        captions=tuple(options.captions),
        checksum=not (options.no_checksum or options.from_side_files),
        uids=tuple(options.uids),
        uid_key=options.uid_key,
        side_files=options.from_side_files,
    )
    remote_shards = sum(not is_local(path) for path in paths)
    if remote_shards >= _MANY_SHARDS and not options.from_side_files:
        log.warning(
            "downloading %d remote shards to scan them; to read only img2dataset's counts, use --from-side-files",
            remote_shards,
        )
    with progress_bar("shards") as on_progress:
        manifest = write_manifest(
            options.folder,
            paths,
            executor,
            scan,
            skip_unreadable=options.skip_unreadable,
            on_progress=on_progress,
        )
    seconds = time.monotonic() - started
    gigabytes = sum(shard.bytes for shard in manifest.shards) / 1e9
    print(
        f"{options.folder}: {manifest.n:,} samples ({manifest.n_bad:,} known to be bad), "
        f"{counted(manifest.n_shards, 'shard')} of {gigabytes:,.2f} GB in total; {seconds:.1f} s."
    )
