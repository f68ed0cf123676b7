"""The trainer as a library: train from a notebook or a script, and use a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuclip_ds.checkpoint.saved_model import SavedModel, open_model
from neuclip_ds.config import Config
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.recipe import recipe_config
from neuclip_ds.reporting.metrics import read_series
from neuclip_ds.training import trainer
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.hooks.optional import optional_hooks

if TYPE_CHECKING:
    from os import PathLike

_ENCODED_AT_ONCE = 64  # images or texts


def train(recipe: str | Config, *, hooks: Sequence[Hook] = (), **overrides: Any) -> Run:
    """Train a model as `neuclip-ds train` does, on all ranks of a distributed launch or only in this process.

    Args:
        recipe: a recipe's name, the path of a YAML file, or a config.
        hooks: `Hook` objects, whose methods are called before and after training steps.
        overrides: options that override the recipe's, nested or dotted: `optimizer={"lr": 1e-3}` or
            `**{"optimizer.lr": 1e-3}`. They cannot be combined with a config.

    Returns:
        The run, which is complete unless a hook stopped it.

    Raises:
        UserError: the config or the data cannot be used.
        TrainingDiverged: losses or gradients stay non-finite, or replicated state differs between ranks.
        Interrupted: Ctrl-C, SIGTERM or SIGUSR1 stopped the run, which saved a checkpoint if training had started.

    Example:
        run = neuclip_ds.train("demo", max_steps=30, run={"name": "look"})
        run.results["image_to_text_recall@1"]
    """
    if isinstance(recipe, Config):
        if overrides:
            raise TypeError(f"Options {', '.join(overrides)} cannot override a Config: name a recipe.")
        config = recipe
    else:
        config = recipe_config(recipe, overrides)
    trainer.train(config, read_environment(), [*optional_hooks(config), *hooks])
    return Run(config.run.output_dir / str(config.run.name))


def load(model: str | PathLike[str], device: torch.device | str | None = None, *, ema: bool = False) -> Model:
    """Load a model that encodes images and texts.

    Args:
        model: a run's folder (for its newest checkpoint), a checkpoint, or any value that `model.pretrained` accepts.
        device: device for the model; by default, a GPU if available.
        ema: whether to load the moving average of a run's weights (`ema.decay`).

    Raises:
        UserError: the model does not exist, or its files are inconsistent.

    Example:
        model = neuclip_ds.load("runs/demo")
        cosines = model.encode_images(["picture.jpg"]) @ model.encode_texts(["a red circle", "a blue square"]).T
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Model(open_model(str(model), Communicator(device), ema), device)


class Run:
    """A run on disk.

    Attributes:
        folder: folder with the config, log, metrics, checkpoints and report.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def results(self) -> dict[str, float]:
        """Last value of each training and evaluation metric, by name."""
        last_values: dict[str, float] = {}
        for name, (_, values) in read_series(self.folder).items():
            last_values[name] = values[-1]
        return last_values

    def model(self, device: torch.device | str | None = None) -> Model:
        """Load the model from the newest checkpoint."""
        return load(self.folder, device)


class Model:
    """A dual encoder with its preprocessing.

    Attributes:
        module: the torch module; its inputs are uint8 images (b, 3, H, W) or None, and tokens (b, T) or None.
        device: device of the module.
    """

    def __init__(self, saved: SavedModel, device: torch.device) -> None:
        self.module = saved.model.to(device)
        self.device = device
        self._size = saved.preprocessing.size
        self._transform = EvalTransform.of(saved.preprocessing)
        encode = encoder_of(self.module, device)
        communicator = Communicator(device)
        self._encoder = BatchEncoder(encode, saved.tokenizer, communicator, _ENCODED_AT_ONCE, self._transform)

    def encode_images(self, images: Sequence[str | PathLike[str] | bytes | Tensor] | Tensor) -> Tensor:
        """Encode images as L2-normalized float32 features of shape (n, d).

        Args:
            images: paths, encoded bytes, uint8 tensors of shape (3, H, W), or one uint8 tensor of shape (n, 3, H, W).

        Raises:
            ValueError: a tensor is not uint8, or does not have the model's image size.
        """
        return self._encoder.encode_images([self._pixels(image) for image in images])

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Encode texts as L2-normalized float32 features of shape (n, d)."""
        return self._encoder.encode_texts([texts] if isinstance(texts, str) else list(texts))

    def _pixels(self, image: str | PathLike[str] | bytes | Tensor) -> Tensor:
        if isinstance(image, Tensor):
            shape = (3, self._size, self._size)
            if image.dtype != torch.uint8 or image.shape != shape:
                raise ValueError(f"An image is {image.dtype} {tuple(image.shape)}, but must be torch.uint8 {shape}.")
            return image
        return self._transform(image if isinstance(image, bytes) else Path(image).read_bytes())
