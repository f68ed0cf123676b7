"""Progress of an examination, on stderr."""

import sys
import time

from neuclip_ds.distributed.communicator import Communicator


def announce(what: str, communicator: Communicator) -> None:
    """Print on rank 0 what begins now."""
    if communicator.rank == 0:
        print(f"{time.strftime('%H:%M:%S')}  {what} ...", file=sys.stderr, flush=True)
