"""Export the model of a run to the file format of another library: weights, temperature and tokenizer."""

from pathlib import Path

from safetensors.torch import load_file

from neuclip_ds.checkpoint.checkpoints import read_best, step_folder
from neuclip_ds.checkpoint.integrity import read_meta, verify
from neuclip_ds.checkpoint.saved_model import find_checkpoint, open_run
from neuclip_ds.checkpoint.sharded_state import StateFiles
from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.models.export import export
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.source import merged
from neuclip_ds.objectives.temperature import trained_temperature

_LOADING = {
    "transformers": """```python
from transformers import AutoModel, AutoProcessor

model, processor = AutoModel.from_pretrained("."), AutoProcessor.from_pretrained(".")
```""",
    "open_clip": """```python
import open_clip

model, preprocess = open_clip.create_model_from_pretrained("local-dir:.")
tokenizer = open_clip.get_tokenizer("local-dir:.")
```""",
}


def export_run(path: Path, form: str, folder: Path, best: bool = False, average: bool = False) -> Path:
    """Export a checkpoint.

    Args:
        path: a run's folder, whose newest checkpoint is taken, or a checkpoint in it.
        form: `transformers` or `open_clip`.
        folder: where to write; absent or empty.
        best: take the checkpoint that `run.best_metric` kept instead of the newest.
        average: take the moving average of the weights (`ema.decay`).

    Returns the exported checkpoint. Raises `UserError` if there is none, it is damaged, or the format cannot express
    the model.
    """
    checkpoint = find_checkpoint(_best(path) if best else path)
    verify(checkpoint)
    run = open_run(checkpoint)
    logits = _logits(checkpoint, run.config, run.start)
    trained = StateFiles(checkpoint / "engine", verified=True).weights(average)
    source, weights = merged(run.source, run.tokenizer, trained)
    package = source.package(run.tokenizer, weights, logits)
    export(package, form, folder, _card(run.config, checkpoint, form))
    return checkpoint


def _best(run: Path) -> Path:
    found = read_best(run / "checkpoints")
    if found is None:
        raise UserError(f"{run} keeps no best checkpoint. Train with --run.best_metric=NAME, or omit --best.")
    return step_folder(run / "checkpoints", found.step)


def _logits(checkpoint: Path, config: Config, start: LogitParameters) -> LogitParameters:
    """Return temperature and bias as trained, or those of the start (individual temperatures, no bias)."""
    state = load_file(checkpoint / "objective.safetensors")
    tau = trained_temperature(state)
    temperature = config.objective.temperature.initial or start.temperature if tau is None else tau.item()
    bias = start.bias if config.model.pretrained else None
    return LogitParameters(temperature, state["bias"].item() if "bias" in state else bias)


def _card(config: Config, checkpoint: Path, form: str) -> str:
    """Return README.md: what the model is, how it was trained, how to load it."""
    step = read_meta(checkpoint)["step"]
    base = config.model.pretrained
    origin = f"fine-tuned from `{base}`, whose licence it inherits" if base else "trained from random weights"
    library = "open_clip" if form == "open_clip" else "transformers"
    return f"""---
library_name: {library}
pipeline_tag: zero-shot-image-classification
tags:
- clip
---
# {config.run.name}

A dual encoder of images and texts, {origin}.

| | |
|---|---|
| trained with | neuclip_ds, `objective.method={config.objective.method}` |
| data | `{", ".join(config.data.train_paths)}` |
| steps | {step:,} of {config.data.batch_size:,} pairs |
| learning rate | {config.optimizer.lr:g} ({config.optimizer.name}, weight decay {config.optimizer.weight_decay:g}) |

{_LOADING[form]}
"""
