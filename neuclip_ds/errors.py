"""Exceptions that end a run with one message or roll it back, and functions that format and explain errors."""

import importlib.metadata
import importlib.util
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuclip_ds.limits import fix_of_limit

_LONGEST_CAUSE = 500  # characters of an error that a message contains
_HEAD = 300  # how many of them come from its start; the others come from its end, where libraries name the cause
_SECRETS = (
    re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s'\"@]+(?=@)"),  # USER:PASSWORD of a URL
    re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s'\"?]*\?)[^\s'\"]+"),  # query of a URL: a signature may have any name
    re.compile(r"(?i)\b(authorization:\s*(?:\w+\s+)?)[^\s'\"*]+"),  # an authorization header in a command
)


def redact(text: str) -> str:
    """Return the text with `***` in place of URL credentials, URL queries and the values of authorization headers."""
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text


class UserError(Exception):
    """A problem that you can fix, such as an invalid option or a full disk; the message names the problem and the fix.

    A command that raises this error prints the message and exits with code 2, on all ranks.

    Example:
        import neuclip_ds

        try:
            neuclip_ds.train("demo", optimizer={"learning_rate": 1e-3})
        except neuclip_ds.UserError as error:
            print(error)  # the option is called optimizer.lr
    """

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


class TrainingDiverged(Exception):
    """Losses or gradients stay non-finite, or replicated state differs between ranks. A command exits with code 1.

    Training skips steps with non-finite values. After `run.max_skipped_steps` consecutive skipped steps, it returns to
    the newest checkpoint. It raises this exception if there is no checkpoint, or if as many steps are skipped again
    before training has passed the skipped steps. The message names the step and the cause.

    Example:
        import neuclip_ds

        try:
            neuclip_ds.train("demo", max_steps=3, data={"batch_size": 32}, run={"name": "look"})
        except neuclip_ds.TrainingDiverged as error:
            print("Lower the learning rate:", error)
    """


class RollBack(Exception):
    """The training loop must return to `checkpoint` and continue from there."""

    def __init__(self, message: str, checkpoint: Path) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class Interrupted(KeyboardInterrupt):
    """A signal stopped the program; the message names the signal. The exit code is 128 plus the signal's number."""

    def __init__(self, number: int, where: str = "") -> None:
        """
        Args:
            number: signal number.
            where: point at which the program stopped, such as " after step 5"; part of the message.
        """
        super().__init__(f"Stopped{where} by {signal.Signals(number).name}; to continue, run the same command again.")
        self.number = number
        self.code = 128 + number
        self._where = where

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int, str]]:
        """Pickle the arguments instead of the message: a process pool sends the exception to its parent process."""
        return type(self), (self.number, self._where)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as "1 shard" or "2,000 shards"; by default, the plural ends in s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def is_power_of_two(count: int) -> bool:
    """Return whether a count is 1, 2, 4, 8 ...; of a frequent event, only these occurrences are logged as warnings."""
    return count & (count - 1) == 0


def exit_code(error: BaseException) -> int:
    """Return the exit code of a program that ends with this error."""
    if isinstance(error, Interrupted):
        return error.code
    return 2 if isinstance(error, UserError) else 1


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra of the package, from this clone if the package is not installed."""
    try:
        importlib.metadata.distribution("neuclip_ds")
    except importlib.metadata.PackageNotFoundError:
        clone = Path(__file__).parents[1]
        return f"pip install -e '{clone}[{extra}]'"
    return f"pip install 'neuclip_ds[{extra}]'"


def require_package(module: str, option: str, extra: str) -> None:
    """Raise UserError with the command that installs `extra` if `module`, which `option` needs, is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:  # a folder of that name, such as wandb/, looks like a package
        command = install_command(extra)
        raise UserError(f"{option} needs {module}, which is not installed: run {command}.")


@contextmanager
def explained(problem: str, fix: str) -> Iterator[None]:
    """Convert any `Exception` except UserError into a UserError with the message "PROBLEM (the error); FIX.".

    If the exception reports a limit of this machine, such as the number of open files, advice on this limit replaces
    FIX.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem} ({cause_of(error)}); {fix_of_limit(error) or fix}.") from error


def cause_of(error: BaseException) -> str:
    """Return an error's text on one line, omitting the middle of a long text, or its type's name if it has no text."""
    text = " ".join(str(error).split()).rstrip(".")
    if len(text) > _LONGEST_CAUSE:
        text = f"{text[:_HEAD]} ... {text[_HEAD - _LONGEST_CAUSE :]}"
    return text or type(error).__name__
