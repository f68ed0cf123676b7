"""The exceptions that end a run with a sentence."""


class UserError(Exception):
    """A mistake in the input; the message names the thing and the mend. It is printed once and all exit with 2."""


class TrainingDiverged(Exception):
    """The run met a number that is not finite; the message names the step and the samples. Exit code 1."""
