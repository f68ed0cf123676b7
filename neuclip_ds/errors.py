"""The exceptions that end a run with a sentence."""

import signal


class UserError(Exception):
    """A mistake in the input; the message names it and the fix. It is printed once, and all ranks exit with 2."""


class TrainingDiverged(Exception):
    """A loss or gradient is not finite; the message names the step and the samples. Exit code 1."""


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
