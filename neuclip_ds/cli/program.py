"""Code that all commands share: the argument parser, the progress bar, and the handling of user errors and signals."""

import argparse
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from neuclip_ds.distributed.environment import RankEnvironment, read_environment
from neuclip_ds.distributed.stop_signals import raising_interrupted
from neuclip_ds.errors import Interrupted, TrainingDiverged, UserError, exit_code
from neuclip_ds.files import expand_user
from neuclip_ds.recipe import nearest, respell

log = logging.getLogger(__name__)


@contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Print an error once per node, and exit on every rank: with code 2 for a `UserError`, or 1 if training diverged.

    After a stop signal, print one line and exit with code 128 plus the signal's number. Once several ranks have
    connected, `FailureDetector` reports errors and ends the ranks instead.
    """
    try:
        with raising_interrupted():
            yield
    except (UserError, TrainingDiverged, Interrupted) as error:
        environment = RankEnvironment(rank=0, local_rank=0, world_size=1)
        with suppress(UserError):  # invalid environment variables: `error` already reports this
            environment = read_environment()
        host = "" if environment.rank == 0 else f"{socket.gethostname()}: "
        is_first_of_node = environment.local_rank == 0
        if is_first_of_node and isinstance(error, Interrupted):
            log.warning("%s%s", host, error)
        elif is_first_of_node:
            print(f"error: {host}{error}", file=sys.stderr, flush=True)
        logging.shutdown()
        sys.exit(exit_code(error))


class Parser(argparse.ArgumentParser):
    """Argument parser that accepts dashes or underscores in options and raises `UserError`; --help shows defaults."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, formatter_class=_Formatter, **options)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the values of all arguments; raise UserError if an argument is unknown, missing or invalid."""
        options, unknown = self.parse_with_overrides(arguments)
        if unknown:
            kind = "option" if unknown[0].startswith("-") else "argument"
            hint = nearest(unknown[0].split("=")[0], self._option_string_actions) or "."
            raise UserError(f"Unknown {kind} {unknown[0]}{hint} See {self.prog} --help.")
        return options

    def parse_with_overrides(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the values of the known arguments, and the other arguments, which should be options of `train`.

        Raises UserError if a known argument is missing or invalid.
        """
        return self.parse_known_args([respell(argument, "_", "-") for argument in arguments])

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; see {self.prog} --help.")


def local_path(text: str) -> Path:
    """Parse a path on the command line, and expand `~`, which shells do not expand in --NAME=~/PATH."""
    return Path(expand_user(text))


def fraction(text: str) -> float:
    """Parse a number from 0 to 1 on the command line; raise `ArgumentTypeError` for any other text."""
    with suppress(ValueError):
        number = float(text)
        if 0 <= number <= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")


def positive_integer(text: str) -> int:
    """Parse a positive integer on the command line; raise `ArgumentTypeError` for any other text."""
    with suppress(ValueError):
        number = int(text)
        if number >= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default in ([], ""):
            return action.help
        if isinstance(default, list):
            return f"{action.help} (default: {' '.join(map(str, default))})"
        return super()._get_help_string(action)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr while the block runs; yield a function that takes (items done, total items)."""
    from rich.console import Console  # slow to import
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title)
        yield lambda done, total: progress.update(task, completed=done, total=total)
