"""Hooks that a config can enable, and the hook that writes the report; the trainer does not depend on them."""

from __future__ import annotations

import logging
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from neuclip_ds.config import Config
from neuclip_ds.errors import TrainingDiverged, require_package
from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.reporting.report import write_report
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.hooks.remote import CopyRun

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

log = logging.getLogger(__name__)

_STEPS_BEFORE_PROFILE = 10  # steps before the profile, in which caches fill and a GPU warms up


def optional_hooks(config: Config) -> list[Hook]:
    """Return the hooks that a config enables, and `WriteReport`; raise `UserError` if one needs a missing library."""
    run = config.run
    hooks: list[Hook] = []
    if run.profile_steps:
        hooks.append(ProfileSteps())
    if run.remote is not None:
        hooks.append(CopyRun(run.remote))
    if run.wandb is not None:
        hooks.append(WeightsAndBiases(run.wandb))
    hooks.append(WriteReport())  # its after_run runs first, so that the copy includes the report
    return hooks


class ProfileSteps(Hook):
    """Profiles `run.profile_steps` steps after the first 10 of a launch, and writes the results to profile/.

    A profiled step includes the wait for its batch.
    """

    def start(self, loop: Loop) -> None:
        steps = loop.context.config.run.profile_steps
        zero_stage = loop.context.engine.zero_stage
        labels = {"method": loop.fingerprint["method"], "zero_stage": zero_stage}
        recorder = Recorder(loop.folder / "profile", loop.context.communicator, steps, _STEPS_BEFORE_PROFILE, labels)
        self._recorder = loop.resources.enter_context(recorder)
        self._step = ExitStack()

    def before_step(self, loop: Loop) -> None:
        self._step.enter_context(self._recorder.step())

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self._step.close()


class WeightsAndBiases(Hook):
    """Sends the TensorBoard metrics from rank 0 to a Weights & Biases project (PROJECT or ENTITY/PROJECT).

    wandb reads its environment variables (WANDB_MODE=offline, WANDB_ENTITY, WANDB_API_KEY, ...). wandb_id.txt stores
    the W&B run ID, so that a resumed run continues the same W&B run. A failure is logged, and training continues.
    """

    def __init__(self, project: str) -> None:
        require_package("wandb", "run.wandb", "wandb")
        self._project = project
        self._run: Any = None  # on rank 0, after `start`

    def start(self, loop: Loop) -> None:
        if loop.context.communicator.rank == 0:
            try:
                self._run = self._begin(loop)
            except Exception as error:  # from wandb, its transport or the operating system
                self._warn(error)

    def close(self, loop: Loop, error: BaseException | None) -> None:
        if self._run is not None:
            try:
                self._run.finish(exit_code=int(error is not None))
            except Exception as failure:
                self._warn(failure)

    def _begin(self, loop: Loop) -> Any:
        import wandb  # optional

        entity, _, project = self._project.rpartition("/")
        id_file = loop.folder / "wandb_id.txt"
        if not (loop.done and id_file.is_file()):
            id_file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        return wandb.init(
            project=project,
            entity=entity or None,
            name=loop.folder.name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(loop.folder),
            config=loop.context.config.model_dump(mode="json"),
            sync_tensorboard=True,
        )

    def _warn(self, error: Exception) -> None:
        log.warning(
            "Weights & Biases failed (%s: %s); the run continues without it, with all metrics in metrics.jsonl. "
            "Set WANDB_MODE=offline if there is no network.",
            type(error).__name__,
            error,
        )


class WriteReport(Hook):
    """Writes report.html when a run completes, stops or diverges, or at the next launch if writing failed."""

    def close(self, loop: Loop, error: BaseException | None) -> None:
        if loop.stop_requested or isinstance(error, TrainingDiverged):
            self._write(loop)

    def after_run(self, loop: Loop) -> None:
        report = loop.folder / "report.html"
        metrics = loop.folder / "metrics.jsonl"
        is_current = report.exists() and metrics.exists() and report.stat().st_mtime_ns >= metrics.stat().st_mtime_ns
        if not is_current:
            self._write(loop)

    def _write(self, loop: Loop) -> None:
        """Write the report on rank 0; training has ended by now, so a failure is only logged as a warning."""
        if loop.context.communicator.rank > 0:
            return
        try:
            log.info("report: %s", write_report(loop.folder))
        except Exception as error:
            log.warning(
                "report.html could not be written (%s: %s); run the training command again to retry",
                type(error).__name__,
                error,
            )
