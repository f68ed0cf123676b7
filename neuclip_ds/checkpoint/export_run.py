"""Export a run's weights, temperature and tokenizer to the file format of another library."""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.checkpoint.blend import blend, soup
from neuclip_ds.checkpoint.integrity import verify
from neuclip_ds.checkpoint.model_card import model_card, public_name
from neuclip_ds.checkpoint.saved_model import (
    ModelWeights,
    find_best_checkpoint,
    find_checkpoint,
    open_run,
    read_result,
    read_start,
)
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import counted
from neuclip_ds.files import check_unused, explain_disk, new_folder
from neuclip_ds.models.conversion import write_library_model


def export_run(
    path: Path,
    library: str,
    folder: Path,
    best: bool = False,
    average: bool = False,
    license: str | None = None,
    fraction: float = 1.0,
) -> Path:
    """Export a run's checkpoint to the file format of another library.

    Args:
        path: a run's folder (its newest checkpoint is exported), or a checkpoint in it.
        library: library whose file format to write: transformers, open_clip or sentence_transformers.
        folder: output folder, which must be absent or empty.
        best: whether to export the best checkpoint (by `run.best_metric`) instead of the newest; `path` must then be a
            run's folder.
        average: whether to export the moving average of the weights (`ema.decay`).
        license: identifier for the model card, such as apache-2.0; `unknown` by default.
        fraction: position of the exported weights between the run's start (0) and its result (1).

    Returns:
        The exported checkpoint.

    Raises:
        UserError: `folder` is not empty or cannot be written, the checkpoint does not exist, is damaged or lacks the
            moving average, the format does not support the model, a package that the format or the model needs is not
            installed, or the run's start cannot be blended with the checkpoint.
    """
    check_unused(folder)  # before the checkpoint is read
    checkpoint = find_best_checkpoint(path) if best else find_checkpoint(path)
    verify(checkpoint)
    model = read_result(checkpoint, average)
    mixture = None
    if fraction != 1:
        start = read_start(checkpoint, Communicator())
        model = blend(start, model, fraction)
        mixture = f"a blend of `{public_name(start.name)}` ({1 - fraction:g}) and this run ({fraction:g})"
    _write(model, checkpoint, library, folder, average, license, mixture)
    return checkpoint


def export_soup(
    paths: Sequence[Path],
    library: str,
    folder: Path,
    best: bool = False,
    average: bool = False,
    license: str | None = None,
) -> list[Path]:
    """Export the mean of the weights of several runs, which were fine-tuned from the same checkpoint.

    The arguments are as in `export_run`. Returns the checkpoint of each run. Raises `UserError` as `export_run` does,
    and if `model.pretrained` was empty in a run, or the runs differ in their start, architecture, preprocessing or
    tokenizer.
    """
    check_unused(folder)
    checkpoints = []
    for path in paths:
        checkpoints.append(find_best_checkpoint(path) if best else find_checkpoint(path))
    models = []
    for checkpoint in checkpoints:
        verify(checkpoint)
        models.append(read_result(checkpoint, average))
    names = ", ".join(f"`{open_run(checkpoint).config.run.name}`" for checkpoint in checkpoints)
    number = counted(len(models), "run")
    mixture = f"the mean of the weights of {number} ({names}); this card describes the last of them"
    _write(soup(models), checkpoints[-1], library, folder, average, license, mixture)
    return checkpoints


def _write(
    model: ModelWeights,
    checkpoint: Path,
    library: str,
    folder: Path,
    average: bool,
    license: str | None,
    mixture: str | None,
) -> None:
    """Write a model to a new folder in a library's format, with the model card of a checkpoint's run."""
    library_model = model.source.to_library_model(model.tokenizer, model.weights, model.logits)
    card = model_card(open_run(checkpoint).config, checkpoint, library, license, average, mixture)
    with explain_disk(folder, "choose another folder"), new_folder(folder) as unfinished:
        write_library_model(library_model, library, unfinished)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
