"""The command line: parse, then hand over to the trainer; mistakes end with one sentence and exit code 2."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.errors import TrainingDiverged, UserError
from neuclip_ds.recipe import dump, parse

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `train.py`; never returns a status but exits with 0, 1 (training failed) or 2 (mistake in the input)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    exit_on_mistake(lambda: _run(arguments))


def exit_on_mistake(work: Callable[[], T]) -> T:
    """Runs `work`; a `UserError` is printed once a node and ends every rank with exit code 2."""
    try:
        return work()
    except (UserError, TrainingDiverged) as error:
        environment = read_environment()
        if environment.local_rank == 0:
            where = f"{socket.gethostname()}: " if environment.rank else ""
            print(f"error: {where}{error}", file=sys.stderr, flush=True)
        logging.shutdown()
        sys.exit(2 if isinstance(error, UserError) else 1)


def _run(arguments: Sequence[str]) -> None:
    invocation = parse(arguments)
    if invocation.print_config:
        print(dump(invocation.config), end="")
        return
    environment = read_environment()
    if invocation.dry_run:
        from neuclip_ds.planning.dry_run import print_dry_run

        print_dry_run(invocation.config, environment, invocation.hostfile, invocation.gpu_memory)
        return
    # torch and deepspeed take seconds to import: only once the config is known to be sound
    from neuclip_ds.training.trainer import train

    train(invocation.config, environment)
