"""The exceptions that end a run with a sentence, or its steps; the removal of secrets from text."""

import re
import signal
from pathlib import Path

_SECRETS = (
    re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s'\"@]+(?=@)"),  # USER:PASSWORD of a URL
    re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s'\"?]*\?)[^\s'\"]+"),  # its query: a signature may have any name
    re.compile(r"(?i)\b(authorization:\s*(?:\w+\s+)?)[^\s'\"*]+"),  # a header in a command
)


def redact(text: str) -> str:
    """Return text with `***` for passwords and queries of URLs, and for headers with a token."""
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text


class UserError(Exception):
    """A mistake in the input; the message names it and the fix. It is printed once, and all ranks exit with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


class TrainingDiverged(Exception):
    """Loss or gradient stay not finite, or ranks differ; the message names the step and the cause. Exit code 1."""


class RollBack(Exception):
    """Ends the steps of a loop, which then resumes from a checkpoint; leaves no loop."""

    def __init__(self, message: str, checkpoint: Path) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class Interrupted(KeyboardInterrupt):
    """A signal stopped the program; the message names it. Exit code 128 + its number, as of a shell."""

    def __init__(self, number: int, where: str = "") -> None:
        """
        Args:
            number: of the signal.
            where: what the program had done by then, for the message.
        """
        super().__init__(f"Stopped{where} by {signal.Signals(number).name}; the same command resumes.")
        self.number = number
        self.code = 128 + number
