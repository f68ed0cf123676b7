"""The phases of a run (`phases:`): parts with sizes of images and captions, patch dropout and rates of their own.

A run without them is one phase. Where phases begin is a function of the data's position and the budget, so a run that
resumes is in the phase that its step belongs to.
"""

from collections.abc import Sequence
from typing import NamedTuple

from neuclip_ds.config import BudgetConfig, Config, ModelConfig, OptimizerConfig, VisionConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.towers import check_image_size, taking_other_sizes
from neuclip_ds.training.data_position import DataPosition
from neuclip_ds.training.schedules import learning_rate


class Phase(NamedTuple):
    """Steps [start, stop) with the same inputs, and the schedule of learning rates that they are part of."""

    start: int
    stop: int
    image_size: int | None  # side in pixels; None is the model's
    context_length: int | None  # tokens of a caption, likewise
    patch_drop: float  # share of the image's patches that are left out
    rates: OptimizerConfig
    rates_start: int  # of the schedule, which may span several phases
    rates_stop: int

    def learning_rate(self, step: int) -> float:
        """Return the encoders' learning rate of a step of the run."""
        return learning_rate(step - self.rates_start, self.rates_stop - self.rates_start, self.rates)

    def describe(self) -> str:
        """Return what is special about its inputs."""
        images = "full images" if self.image_size is None else f"images of {self.image_size} pixels"
        captions = "" if self.context_length is None else f", captions of {self.context_length} tokens"
        dropped = f", {self.patch_drop:.0%} of the patches dropped" if self.patch_drop else ""
        return f"steps {self.start + 1} to {self.stop}: {images}{captions}{dropped}, peak lr {self.rates.lr:.3g}"


def plan_phases(config: Config, position: DataPosition, total: int) -> list[Phase]:
    """Return the phases of a run of `total` steps.

    Raises:
        UserError: the first phases leave no step of the budget for the last one.
    """
    if not config.phases:
        return [Phase(0, total, None, None, config.model.vision.patch_drop, config.optimizer, 0, total)]
    edges = [0, *_borders(config, position), total]
    if edges != sorted(set(edges)):
        raise UserError(
            f"phases: the first {len(edges) - 2} take {edges[-2]} steps, and the run has {total}: raise budget.* or "
            "shorten them, as the last one takes the rest."
        )
    schedules = [number for number, phase in enumerate(config.phases) if number == 0 or phase.lr is not None]
    planned = []
    for number, (phase, start, stop) in enumerate(zip(config.phases, edges[:-1], edges[1:], strict=True)):
        first = max(begin for begin in schedules if begin <= number)
        after = min((begin for begin in schedules if begin > number), default=len(config.phases))
        own = config.phases[first]
        chosen = {"lr": own.lr, "warmup_steps": own.warmup_steps}
        rates = config.optimizer.model_copy(update={key: x for key, x in chosen.items() if x is not None})
        drop = config.model.vision.patch_drop if phase.patch_drop is None else phase.patch_drop
        inputs = phase.image_size, phase.context_length, drop
        planned.append(Phase(start, stop, *inputs, rates, edges[first], edges[after]))
    return planned


def _borders(config: Config, position: DataPosition) -> list[int]:
    """Return the steps at which the second and later phases begin."""
    found, epochs, steps = [], 0.0, 0
    for phase in config.phases[:-1]:
        epochs, steps = epochs + (phase.epochs or 0), steps + (phase.steps or 0)
        found.append(position.end(BudgetConfig(epochs=epochs)) if phase.epochs else steps)
    return found


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of a step of the run, counted from 0."""
    return next(phase for phase in phases if step < phase.stop)


def model_for_phases(config: Config) -> ModelConfig:
    """Return the config of the model as it is trained: one that can do what every phase asks of it.

    Raises:
        UserError: the image tower cannot take a phase's images.
    """
    vision = config.model.vision
    sizes = {phase.image_size for phase in config.phases if phase.image_size} - {vision.image_size}
    for size in sorted(sizes):
        check_image_size(vision, size)
    if sizes:
        vision = taking_other_sizes(vision)
    return _with_patch_drop(config, vision, max(_patch_drops(config)))


def largest_model(config: Config) -> ModelConfig:
    """Return the config of the model in the phase that takes the most memory, or more."""
    return _with_patch_drop(config, config.model.vision, min(_patch_drops(config)))


def _patch_drops(config: Config) -> list[float]:
    default = config.model.vision.patch_drop
    return [default if phase.patch_drop is None else phase.patch_drop for phase in config.phases] or [default]


def _with_patch_drop(config: Config, vision: VisionConfig, share: float) -> ModelConfig:
    return config.model.model_copy(update={"vision": vision.model_copy(update={"patch_drop": share})})
