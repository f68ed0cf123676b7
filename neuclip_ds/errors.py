"""The exceptions that end a run with a sentence."""


class UserError(Exception):
    """A mistake in the input; the message names it and the fix. It is printed once, and all ranks exit with 2."""


class TrainingDiverged(Exception):
    """A loss or gradient is not finite; the message names the step and the samples. Exit code 1."""
