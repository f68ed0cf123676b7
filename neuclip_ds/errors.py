"""The exceptions that end a run with a sentence, or its steps."""

from pathlib import Path


class UserError(Exception):
    """A mistake in the input; the message names it and the fix. It is printed once, and all ranks exit with 2."""


class TrainingDiverged(Exception):
    """Loss or gradient stay not finite, or ranks differ; the message names the step and the cause. Exit code 1."""


class RollBack(Exception):
    """Ends the steps of a loop, which then resumes from a checkpoint; leaves no loop."""

    def __init__(self, message: str, checkpoint: Path) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint
