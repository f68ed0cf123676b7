"""Estimate how many hours a run takes, from the measured speed of a short run of the same model."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neuclip_ds.config import Config
from neuclip_ds.errors import UserError, counted, explained
from neuclip_ds.recipe import load_saved
from neuclip_ds.reporting.metrics import read_series

FEWEST_STEPS = 20
_WARM_UP_SHARE = 0.5  # share of the logged speeds that is ignored: the first ones include compilation and cold caches
_SPREAD = 0.05  # smallest deviation, as a share of the speed: speeds vary that much between hours and machines
# assumed bytes per second of a rank if no communication overlaps computation, which is the slow end of the estimate
_SLOW_BANDWIDTH = 10e9
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """Measured speed of a run."""

    run: Path
    ranks: int
    slowest: float  # samples per second of all ranks together
    fastest: float


def read_speed(run: Path, config: Config) -> MeasuredSpeed:
    """Read the speed of a short run, from the second half of its logged throughput.

    Raises UserError if the run logged no throughput at step 20 or later, if its model, DeepSpeed config or method
    differs from the config's, or if one of its files is missing or damaged.
    """
    series = read_series(run)
    measured = load_saved(run / "config.yaml")
    for name, of_run, planned in (
        ("model options", measured.model, config.model),
        ("DeepSpeed configs (deepspeed)", measured.deepspeed, config.deepspeed),
        ("methods (objective.method)", measured.objective.method, config.objective.method),
    ):
        if of_run != planned:
            raise UserError(
                f"The run in --measured={run} and this run have different {name}: train a short run with the options "
                "of this run, and pass its folder to --measured."
            )
    steps, speeds = series.get("samples_per_second", ([], []))
    finite_speeds = [speed for speed in speeds if math.isfinite(speed)]  # NaN in the first step of a launch
    if not finite_speeds or steps[-1] < FEWEST_STEPS:
        raise UserError(
            f"The run in --measured={run} logged too few steps: pass a run of at least {FEWEST_STEPS} steps, for "
            f"example one with --max-steps={2 * FEWEST_STEPS} --run.log-every=1."
        )
    values = np.array(finite_speeds[math.floor(_WARM_UP_SHARE * len(finite_speeds)) :])
    middle = float(np.median(values))
    with explained(f"{run}/environment.json cannot be read", "pass another run"):
        ranks = int(json.loads((run / "environment.json").read_text(encoding="utf-8"))["ranks"])
    return MeasuredSpeed(
        run=run,
        ranks=ranks,
        slowest=min(float(values.min()), (1 - _SPREAD) * middle),
        fastest=max(float(values.max()), (1 + _SPREAD) * middle),
    )


def duration_lines(
    speed: MeasuredSpeed, steps: int, batch_size: int, world_size: int, step_bytes: float
) -> Iterator[str]:
    """Yield lines with the estimated duration of a run, in hours, and the assumptions behind the estimate.

    Args:
        speed: measured speed of a run with the same model.
        steps: training steps.
        batch_size: samples per step.
        world_size: ranks of the planned run.
        step_bytes: bytes that each rank receives in a step.
    """
    scale = world_size / speed.ranks
    shortest = batch_size / (speed.fastest * scale)
    longest = batch_size / (speed.slowest * scale)
    assumption = "the speed of each rank stays as measured"
    if world_size > speed.ranks:
        longest += step_bytes / _SLOW_BANDWIDTH
        assumption += (
            f"; the longer time adds the communication of {step_bytes / 1e6:,.0f} MB per step at "
            f"{_SLOW_BANDWIDTH / 1e9:g} GB/s"
        )
    hours = [steps * seconds / _SECONDS_PER_HOUR for seconds in (shortest, longest)]
    low, high = (f"{value:,.3g}" for value in hours)
    yield f"time       {low} to {high} hours, {world_size * hours[0]:,.3g} to {world_size * hours[1]:,.3g} rank hours"
    yield (
        f"           estimated from {speed.slowest:,.0f} to {speed.fastest:,.0f} samples/s on "
        f"{counted(speed.ranks, 'rank')} in {speed.run}, without evaluations: {assumption}"
    )
