"""The trainer as a library: train from a notebook or a script, and use a trained model."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from neuclip_ds.checkpoint.saved_model import SavedModel, open_model
from neuclip_ds.config import Config
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.losses.arithmetic import restored_tf32
from neuclip_ds.recipe import recipe_config
from neuclip_ds.reporting.log import restored_logging
from neuclip_ds.reporting.metrics import read_series
from neuclip_ds.training import trainer
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.hooks.optional import optional_hooks

OneImage = str | PathLike[str] | bytes | Image.Image | NDArray[np.uint8] | Tensor
"""One image, in any form that `Model.encode_images` accepts."""

_ENCODED_AT_ONCE = 64  # maximum number of images or texts in one batch
_DEFAULT_NAME = "run"  # name of a run that is trained from a `Config` without `run.name`

_training = threading.RLock()  # held while a thread trains


def train(recipe: str | Config, *, hooks: Sequence[Hook] = (), **overrides: Any) -> Run:
    """Train a model as `neuclip-ds train` does, on all ranks of a distributed launch or only in this process.

    On several ranks, an error that occurs after the ranks have connected is not raised to the caller: it ends all
    processes, with the exit code of `neuclip-ds train`.

    Args:
        recipe: a recipe's name, the path of a YAML file, or a `Config`. If a `Config` does not set `run.name`, the run
            is called `run`.
        hooks: `Hook` objects, whose methods are called around each training step and at the start and end of the run.
        overrides: options that override the recipe's, nested or dotted: `optimizer={"lr": 1e-3}` or
            `**{"optimizer.lr": 1e-3}`. They cannot be combined with a `Config`.

    Returns:
        The run, which is complete unless a hook stopped it.

    Raises:
        UserError: the config, the data or a checkpoint cannot be used, another thread of this process is training, or
            there is another problem that you can fix, such as a full disk.
        TypeError: a `Config` is combined with overrides.
        TrainingDiverged: losses or gradients stay non-finite, or replicated state differs between ranks.
        Interrupted: Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP stopped the run, which saved a checkpoint if training had
            started and no rank was waiting for failing remote storage. The exception is a `KeyboardInterrupt`.

    Example:
        import neuclip_ds

        run = neuclip_ds.train("demo", max_steps=3, data={"batch_size": 32}, run={"name": "look"})
        print(run.folder, run.results["image_to_text_recall@1"])
    """
    if isinstance(recipe, Config):
        if overrides:
            names = ", ".join(overrides)
            raise TypeError(
                f"A Config already contains all options: set {names} in it, or pass a recipe's name instead."
            )
        config = recipe
        if config.run.name is None:
            config = config.model_copy(update={"run": config.run.model_copy(update={"name": _DEFAULT_NAME})})
    else:
        config = recipe_config(recipe, overrides)
    folder = (config.run.output_dir / str(config.run.name)).absolute()  # the caller may change the working directory
    with _one_thread(), restored_logging(), _default_settings():
        trainer.train(config, read_environment(), [*optional_hooks(config), *hooks])
    # frees the model and the process group; a process that the caller forks would wait forever for the group's threads
    gc.collect()
    return Run(folder)


def load(model: str | PathLike[str], device: torch.device | str | None = None, *, ema: bool = False) -> Model:
    """Load a model that encodes images and texts.

    Args:
        model: a run's folder (for its newest checkpoint), a checkpoint, or any value that `model.pretrained` accepts.
        device: device for the model; by default, a GPU if one is available, otherwise the CPU.
        ema: whether to load the moving average of a run's weights (`ema.decay`).

    Returns:
        The model in evaluation mode.

    Raises:
        UserError: the model does not exist, cannot be downloaded or is not supported; its files are damaged or
            inconsistent; a package that it needs is not installed; or `ema` is true and no average was saved.

    Example:
        import neuclip_ds

        model = neuclip_ds.load("exported/demo")  # or a run, such as "runs/demo"
        probabilities = model.logits("picture.jpg", ["a red circle", "a blue square"]).softmax(dim=1)  # (1, 2)
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with _default_settings():
        return Model(open_model(str(model), _this_rank(device), ema), device)


def _this_rank(device: torch.device) -> Communicator:
    """Return a communicator that sends nothing: a program may load and use a model on some of its ranks only."""
    return Communicator(device).single_rank()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let one thread train at a time, because threads share the process group; raise `UserError` if another trains."""
    if not _training.acquire(blocking=False):
        raise UserError("Another thread of this process is training: wait for it, or train in another process.")
    try:
        yield
    finally:
        _training.release()


@contextmanager
def _default_settings() -> Iterator[None]:
    """Use torch's default settings in the block; at its end, restore the caller's settings and random state."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    device = torch.get_default_device()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            restored_tf32(),
            torch.random.fork_rng(gpus),
            torch.inference_mode(False),
            torch.enable_grad(),
            nullcontext() if device.type == "cpu" else torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


class Run:
    """A run on disk, as returned by `train`.

    Attributes:
        folder: folder with the config, log, metrics, checkpoints and report.

    Example:
        import neuclip_ds

        # resumes this run if it is unfinished; a complete run is not trained again
        run = neuclip_ds.train("demo", max_steps=3, data={"batch_size": 32}, run={"name": "look"})
        print(run.results["loss"])
        features = run.model().encode_texts("a red circle")  # (1, d)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def results(self) -> dict[str, float]:
        """Last value of each training and evaluation metric, by name; recalls and accuracies are fractions."""
        last_values: dict[str, float] = {}
        for name, (_, values) in read_series(self.folder).items():
            last_values[name] = values[-1]
        return last_values

    def model(self, device: torch.device | str | None = None) -> Model:
        """Load the model from the newest checkpoint; see `load` for the argument and the errors."""
        return load(self.folder, device)


class Model:
    """A dual encoder with its preprocessing, as returned by `load`.

    Texts that are longer than the model's context are truncated.

    Attributes:
        module: the torch module; its inputs are uint8 images (b, 3, H, W) or None, and tokens (b, T) or None.
        device: device of the module.
        temperature: divisor of the cosine similarities; None if the model's checkpoint has none. For a run whose loss
            has no temperature, or one for each sample, this is the run's initial temperature.
        bias: number that is added to the logits of SigLIP models; None for other models.

    Example:
        import neuclip_ds

        model = neuclip_ds.load("exported/demo")
        images = model.encode_images(["picture.jpg", "picture.jpg"])  # (2, d)
        texts = model.encode_texts(["a red cat", "a blue house", "a tree"])  # (3, d)
        best = (images @ texts.T).argmax(dim=1)  # (2,): the most similar text of each image
    """

    def __init__(self, saved: SavedModel, device: torch.device) -> None:
        self.module = saved.model.to(device)
        self.device = device
        self.temperature = saved.logits.temperature
        self.bias = saved.logits.bias
        self._size = saved.preprocessing.size
        self._transform = EvalTransform.of(saved.preprocessing)
        self._tokenizer = saved.tokenizer

    def encode_images(self, images: OneImage | Sequence[OneImage] | Tensor | NDArray[np.uint8]) -> Tensor:
        """Encode images as L2-normalized float32 features of shape (n, d).

        Args:
            images: one image or a sequence of n >= 1 images. An image is a path, the bytes of an image file, a PIL
                image, a uint8 array of shape (H, W, 3), or a uint8 tensor of shape (3, H, W) in the model's image size.
                A batch may also be one array of shape (n, H, W, 3) or one tensor of shape (n, 3, H, W).

        Raises:
            ValueError: `images` is empty, or an array or a tensor is not uint8 or has the wrong shape.
            DecodeError: a file or the given bytes do not contain a usable image. The class is in
                `neuclip_ds.data.decoders`.
            OSError: a file does not exist or cannot be read.
        """
        is_one = isinstance(images, (str, PathLike, bytes, Image.Image))
        is_one = is_one or (isinstance(images, (Tensor, np.ndarray)) and images.ndim == 3)
        several: Sequence[Any] = [images] if is_one else images  # type: ignore[assignment]
        return self._encoder_of(len(several)).encode_images([self._pixels(image) for image in several])

    def encode_texts(self, texts: str | Sequence[str]) -> Tensor:
        """Encode one text or n >= 1 texts as L2-normalized float32 features of shape (n, d).

        Raises `ValueError` if there is no text.
        """
        several = [texts] if isinstance(texts, str) else list(texts)
        return self._encoder_of(len(several)).encode_texts(several)

    def logits(
        self, images: OneImage | Sequence[OneImage] | Tensor | NDArray[np.uint8], texts: str | Sequence[str]
    ) -> Tensor:
        """Return the (n, m) logits of n images and m texts: cosine similarities / temperature + bias.

        A softmax over the texts classifies the images. For SigLIP models, the sigmoid of a logit is the probability
        that the image and the text match. See `encode_images` for the accepted images and the exceptions. Also raises
        `ValueError` if there is no text, or if the model has no temperature.
        """
        if self.temperature is None:
            raise ValueError(
                "The model's checkpoint has no temperature, which logits need: use the cosine similarities of "
                "encode_images and encode_texts."
            )
        logits = self.encode_images(images) @ self.encode_texts(texts).T / self.temperature
        return logits if self.bias is None else logits + self.bias

    def _encoder_of(self, rows: int) -> BatchEncoder:
        """Return an encoder with a batch size that splits `rows` rows into few batches with little padding."""
        if rows == 0:
            raise ValueError("There is nothing to encode: pass at least one image or text.")
        batches = -(-rows // _ENCODED_AT_ONCE)
        batch_size = -(-rows // batches)
        encode = encoder_of(self.module, self.device)
        return BatchEncoder(encode, self._tokenizer, _this_rank(self.device), batch_size, self._transform)

    def _pixels(self, image: OneImage) -> Tensor:
        """Return the pixels of an image in the model's size, uint8 (3, H, W)."""
        if isinstance(image, Tensor):
            shape = (3, self._size, self._size)
            if image.dtype != torch.uint8 or image.shape != shape:
                raise ValueError(
                    f"An image is a tensor of dtype {image.dtype} and shape {tuple(image.shape)}, but must have dtype "
                    f"torch.uint8 and shape {shape}."
                )
            return image
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise ValueError(
                    f"An image is an array of dtype {image.dtype} and shape {image.shape}, but must have dtype uint8 "
                    "and shape (H, W, 3)."
                )
            image = Image.fromarray(image)
        if isinstance(image, Image.Image):
            return self._transform.resize(image.convert("RGB"))
        return self._transform(image if isinstance(image, bytes) else Path(image).read_bytes())
