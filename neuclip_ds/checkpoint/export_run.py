"""Export a run's weights, temperature and tokenizer to the file format of another library."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from neuclip_ds.checkpoint.checkpoints import read_best, step_folder
from neuclip_ds.checkpoint.integrity import verify
from neuclip_ds.checkpoint.model_card import model_card
from neuclip_ds.checkpoint.saved_model import find_checkpoint, open_run
from neuclip_ds.checkpoint.sharded_state import OBJECTIVE, STATE, StateFiles
from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.files import check_unused, new_folder
from neuclip_ds.losses.temperature import trained_temperature
from neuclip_ds.models.conversion import write_library_model
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.source import merged


def export_run(
    path: Path, library: str, folder: Path, best: bool = False, average: bool = False, license: str | None = None
) -> Path:
    """Export a run's checkpoint to the file format of another library.

    Args:
        path: a run's folder (its newest checkpoint is exported), or a checkpoint in it.
        library: whose file format to write: transformers, open_clip or sentence_transformers.
        folder: output folder, which must be absent or empty.
        best: whether to export the best checkpoint (by `run.best_metric`) instead of the newest.
        average: whether to export the moving average of the weights (`ema.decay`).
        license: identifier for the model card, such as apache-2.0.

    Returns the exported checkpoint. Raises `UserError` if the checkpoint does not exist or is damaged, or if the format
    does not support the model.
    """
    check_unused(folder)  # before the checkpoint is read
    if best:
        best_evaluation = read_best(path / "checkpoints")
        if best_evaluation is None:
            raise UserError(f"{path} has no best checkpoint. Train with --run.best_metric=NAME, or omit --best.")
        path = step_folder(path / "checkpoints", best_evaluation.step)
    checkpoint = find_checkpoint(path)
    verify(checkpoint)
    run = open_run(checkpoint)
    state = StateFiles(checkpoint / STATE, verified=True)
    logits = _final_logits(state.replicated(OBJECTIVE), run.config, run.initial_logits)
    source, weights = merged(run.source, run.tokenizer, state.weights(average))
    with new_folder(folder) as unfinished:
        write_library_model(source.to_library_model(run.tokenizer, weights, logits), library, unfinished)
        card = model_card(run.config, checkpoint, library, license, average)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
    return checkpoint


def _final_logits(state: Mapping[str, Tensor], config: Config, initial: LogitParameters) -> LogitParameters:
    """Return the temperature and bias: the final value if trained as a single scalar, else the initial value."""
    temperature = config.objective.temperature.initial or initial.temperature
    final_tau = trained_temperature(state)
    if final_tau is not None:
        temperature = final_tau.item()

    bias: float | None = None
    if "bias" in state:
        bias = state["bias"].item()
    elif config.model.pretrained:
        bias = initial.bias
    return LogitParameters(temperature, bias)
