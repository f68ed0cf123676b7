"""The numbers of a run in Weights & Biases, where `run.wandb` names a project; wandb is an optional library.

wandb reads its own variables (WANDB_MODE=offline, WANDB_ENTITY, WANDB_API_KEY ...). The run's id lies in the run's
folder, so that a resumed run goes on in the same chart. Steps are the x axis by their own number: those that a resumed
run repeats are drawn over those of before, which they equal.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

ID_FILE = "wandb_id.txt"
_UPLOAD_SECONDS = "600"  # that the end of a run waits for an upload, unless WANDB_FINISH_TIMEOUT says otherwise


def require_wandb() -> None:
    """
    Raises:
        UserError: wandb is not installed.
    """
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # a folder wandb/ that offline runs have left passes for a package
        raise UserError("run.wandb needs the library wandb, which is not installed: pip install wandb, or drop it.")


class WeightsAndBiases:
    """One run of a project. What fails in it (a network, a key) is told once and ends it, not the training."""

    def __init__(self, project: str, folder: Path, name: str, config: Mapping[str, Any], resumed: bool) -> None:
        """
        Args:
            project: PROJECT or ENTITY/PROJECT.
            folder: of the run; wandb's own files go to FOLDER/wandb.
            name: that the run is shown by.
            config: uploaded with it.
            resumed: whether it goes on where an earlier start has ended.
        """
        self._folder = folder
        self._run: Any = None
        self._guarded(lambda: self._start(project, name, config, resumed))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step, in the background."""
        if self._run is not None:
            self._guarded(lambda: self._run.log({"step": step, **metrics}))

    def close(self, failed: bool) -> None:
        """Waits for the upload."""
        if self._run is not None:
            self._guarded(lambda: self._run.finish(exit_code=int(failed)))

    def _start(self, project: str, name: str, config: Mapping[str, Any], resumed: bool) -> None:
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", _UPLOAD_SECONDS)  # a variable, as older versions lack the option
        import wandb  # here, for it is optional

        entity, _, own = project.rpartition("/")
        self._run = wandb.init(
            project=own,
            entity=entity or None,
            name=name,
            id=self._id(resumed),
            resume="allow",
            dir=str(self._folder),
            config=dict(config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _id(self, resumed: bool) -> str:
        """That of the start before; a new one for a run that begins anew."""
        path = self._folder / ID_FILE
        if resumed and path.is_file():
            return path.read_text(encoding="utf-8").strip()
        new = uuid.uuid4().hex[:8]
        path.write_text(new + "\n", encoding="utf-8")
        return new

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # wandb raises its own, the operating system's and its transport's
            self._run = None
            log.warning(
                "Weights & Biases failed (%s: %s); training goes on without it, and everything is in metrics.jsonl. "
                "WANDB_MODE=offline needs no network.",
                *(type(error).__name__, error),
            )
