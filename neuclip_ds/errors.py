"""The exceptions that end a run with a sentence."""


class UserError(Exception):
    """A mistake in the input; the message names the thing and the mend. Rank 0 prints it and all exit with 2."""


class RankError(UserError):
    """A mistake that one rank alone has met, such as a shard that has become unreadable; that rank prints it."""


class TrainingDiverged(Exception):
    """The run met a number that is not finite; the message names the step and the samples. Exit code 1."""
