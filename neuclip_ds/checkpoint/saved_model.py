"""Open the model of a run or checkpoint, or a pretrained model, without DeepSpeed."""

from dataclasses import dataclass
from pathlib import Path

from neuclip_ds.checkpoint.checkpoints import verify_together
from neuclip_ds.checkpoint.integrity import is_complete
from neuclip_ds.checkpoint.sharded_state import STATE, StateFiles
from neuclip_ds.config import Config, ModelConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import LogitParameters, Preprocessing
from neuclip_ds.models.source import ModelSource, locate_on_rank_zero, model_source, open_saved
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.recipe import load_saved


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model with float32 weights, its tokenizer and its image preprocessing."""

    name: str  # the checkpoint's folder, or the pretrained model's name
    model: DualEncoder
    tokenizer: ModelTokenizer
    preprocessing: Preprocessing
    config: Config | None  # config of the run that trained the model; None for a pretrained model
    checkpoint: Path | None  # None for a pretrained model


def open_model(name: str, communicator: Communicator, average: bool = False) -> SavedModel:
    """Open a model by name; a collective call in which only one rank downloads files.

    Args:
        name: a run's folder (its newest checkpoint is opened), a checkpoint in it, or any value of `model.pretrained`.
        average: whether to open the moving average of a run's weights (`ema.decay`).

    Raises `UserError` if the model does not exist or if its files are inconsistent.
    """
    path = Path(name)
    if (path / "checkpoints").is_dir() or is_complete(path):
        checkpoint = Path(communicator.on_rank_zero(lambda: str(find_checkpoint(path))))
        verify_together(checkpoint, communicator)
        run = open_run(checkpoint)
        model = run.source.build(run.tokenizer)
        model.load_state_dict(StateFiles(checkpoint / STATE, verified=True).weights(average))
        return SavedModel(
            name=f"{checkpoint} (ema)" if average else str(checkpoint),
            model=model,
            tokenizer=run.tokenizer,
            preprocessing=run.source.preprocessing,
            config=run.config,
            checkpoint=checkpoint,
        )
    if average:
        raise UserError(f"{name} is not a run of this project, and has no average of its weights: omit --ema.")
    config = ModelConfig(pretrained=name)
    source = model_source(config, locate_on_rank_zero(config, communicator))
    tokenizer = source.tokenizer(_no_tokenizer)
    return SavedModel(
        name=name,
        model=source.load(tokenizer).model,
        tokenizer=tokenizer,
        preprocessing=source.preprocessing,
        config=None,
        checkpoint=None,
    )


def find_checkpoint(path: Path) -> Path:
    """Return a run's newest checkpoint, or `path` if it is a checkpoint; raise `UserError` if none is found."""
    checkpoint: Path | None = path
    if not is_complete(path):
        checkpoint = max((path / "checkpoints").glob("step_*"), default=None)
    if checkpoint is None or not is_complete(checkpoint):
        raise UserError(f"{path} is neither a run with a checkpoint nor a checkpoint. Name a folder runs/NAME.")
    return checkpoint.resolve()


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The config, model source, initial logit parameters and tokenizer of the run that saved a checkpoint."""

    config: Config
    source: ModelSource
    initial_logits: LogitParameters  # temperature and bias at the first step
    tokenizer: ModelTokenizer


def open_run(checkpoint: Path) -> SavedRun:
    """Load the config, model source and tokenizer from a checkpoint that `find_checkpoint` returned."""
    config = load_saved(checkpoint / "config.yaml")
    source, initial_logits = open_saved(config.model, checkpoint / "model")
    tokenizer = source.tokenizer(
        lambda: CaptionTokenizer.load(checkpoint / "tokenizer", config.model.text.context_length)
    )
    return SavedRun(config=config, source=source, initial_logits=initial_logits, tokenizer=tokenizer)


def _no_tokenizer() -> CaptionTokenizer:
    raise AssertionError("a pretrained model has its own tokenizer")
