"""Metrics of a run in Weights & Biases, if `run.wandb` names a project; the library wandb is optional.

wandb reads its own variables (WANDB_MODE=offline, WANDB_ENTITY, WANDB_API_KEY ...). The run's id is kept in the run's
folder, so that a resumed run continues the same chart. The x axis is the step number: steps that a resumed run repeats
are drawn over the earlier, equal ones.
"""

import importlib.util
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

ID_FILE = "wandb_id.txt"
_UPLOAD_SECONDS = "600"  # limit of the upload at the end of a run, unless WANDB_FINISH_TIMEOUT is set


def require_wandb() -> None:
    """Raise UserError if wandb is not installed."""
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # a folder wandb/ of offline runs looks like a package
        raise UserError(
            "run.wandb needs the library wandb, which is not installed: run pip install wandb, or omit run.wandb."
        )


class WeightsAndBiases:
    """Sink that writes to a run of a project; a failure (network, key) is logged once and stops only the sink.

    Args:
        project: PROJECT or ENTITY/PROJECT.
        folder: of the run; wandb writes its files to FOLDER/wandb.
        name: of the run on the project's page.
        config: uploaded with the run.
        resumed: whether the run continues an earlier one.
    """

    def __init__(self, project: str, folder: Path, name: str, config: Mapping[str, Any], resumed: bool) -> None:
        self._folder = folder
        self._run: Any = None
        with self._guarded():
            self._start(project, name, config, resumed)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step, in the background."""
        if self._run is not None:
            with self._guarded():
                self._run.log({"step": step, **metrics})

    def close(self, failed: bool) -> None:
        """Wait for the upload."""
        if self._run is not None:
            with self._guarded():
                self._run.finish(exit_code=int(failed))

    def _start(self, project: str, name: str, config: Mapping[str, Any], resumed: bool) -> None:
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", _UPLOAD_SECONDS)  # older versions lack the option
        import wandb  # here, as it is optional

        entity, _, project_name = project.rpartition("/")
        id_file = self._folder / ID_FILE
        if not (resumed and id_file.is_file()):
            id_file.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
        self._run = wandb.init(
            project=project_name,
            entity=entity or None,
            name=name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(self._folder),
            config=dict(config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # wandb's own errors, the operating system's and its transport's
            self._run = None
            log.warning(
                "Weights & Biases failed (%s: %s); training continues without it, with all metrics in metrics.jsonl. "
                "Set WANDB_MODE=offline where there is no network.",
                *(type(error).__name__, error),
            )
