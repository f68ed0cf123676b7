"""The one exception for mistakes that a user can mend."""


class UserError(Exception):
    """A mistake in the input; the message names the thing and the mend. The program prints it and exits with 2."""


class TrainingDiverged(Exception):
    """The run met a number that is not finite; the message names the step and the samples. Exit code 1."""
