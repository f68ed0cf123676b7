"""The limit of open files, against what a loader process opens."""

import resource
from collections.abc import Iterator

from neuclip_ds.data.readers import OPEN_SHARDS
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, wrong
from neuclip_ds.doctor.request import Request

_TENSORS = 4  # of a batch, each a descriptor while it is handed over
_OTHERS = 256  # libraries, sockets of other ranks, logs


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    data = request.config.data
    needed = OPEN_SHARDS + _OTHERS + _TENSORS * max(1, data.workers) * data.prefetch
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    there = f"A process may open {'any number of' if unlimited else f'{soft:,}'} files; a run opens up to {needed:,}"
    if unlimited or soft >= needed:
        yield fine(f"{there}.")
        return
    allowed = "any number" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    yield wrong(
        f"{there} (shards, batches that are handed over, connections).",
        f"ulimit -n {max(needed, 65536)} before the launcher, or LimitNOFILE of its service; the hard limit is "
        f"{allowed}.",
    )
