"""Agreement of the nodes' clocks, which outages of storage, locks and signed requests are judged by."""

import socket
import time
from collections.abc import Iterator

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, warning, wrong
from neuclip_ds.doctor.request import Request

_APART = 2.0  # seconds
_FAR_APART = 60.0  # remote stores refuse requests that are signed minutes off
_FIX = "Run chrony or another NTP client on all nodes."


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    communicator.barrier()
    times = communicator.gather_objects((time.time(), socket.gethostname()))
    if communicator.rank or len({host for _, host in times}) == 1:
        return
    (first, early), (last, late) = min(times), max(times)
    apart = last - first
    if apart < _APART:
        yield fine(f"The nodes' clocks are within {apart:.1f} s.")
        return
    yield (wrong if apart > _FAR_APART else warning)(f"The clock of {late} is {apart:,.0f} s ahead of {early}'s.", _FIX)
