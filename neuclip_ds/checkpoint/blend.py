"""Average the weights of models with the same start: a run's start and its result (WiSE-FT), or several runs (soups).

Averages are computed in float64, after LoRA adapters have been merged, and rounded once, to float32. Batch-norm
statistics are averaged like weights; integers, such as batch norm's count of batches, are taken from the last model.
The temperature is averaged as log(1/tau), which is CLIP's parameter; the bias of SigLIP's logits is averaged as it is.
"""

import math
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from neuclip_ds.checkpoint.saved_model import ModelWeights
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.tokenizer import ModelTokenizer

_PROBES = ["a photo of a cat.", string.printable, "Zwei Ärzte, 東京 и кот"]  # captions to compare tokenizers with


def blend(start: ModelWeights, result: ModelWeights, fraction: float) -> ModelWeights:
    """Interpolate from a run's initial weights (fraction 0) to its final weights (1); both ends are exact copies.

    Raises:
        UserError: the models differ in their architecture, preprocessing or tokenizer.
    """
    return weighted_mean([start, result], [1 - fraction, fraction])


def soup(models: Sequence[ModelWeights]) -> ModelWeights:
    """Return the mean of models that were fine-tuned from the same checkpoint (Wortsman et al. 2022).

    Raises:
        UserError: a model did not start from a checkpoint, the models started from different ones, or they differ in
            their architecture, preprocessing or tokenizer.
    """
    first_start = models[0].source.config.pretrained
    first_hash = models[0].start_hash
    for model in models:
        start = model.source.config.pretrained
        if not start:
            raise UserError(
                f"{model.name} did not start from a trained model (model.pretrained is empty), and averaging such "
                "models destroys what they learned. Choose runs that were fine-tuned from the same checkpoint."
            )
        is_same = Path(start).name == Path(first_start).name
        if first_hash is not None and model.start_hash is not None:  # unknown for runs of earlier versions
            is_same = model.start_hash == first_hash
        if not is_same:
            other_start = f"other weights in {start}" if start == first_start else start
            raise UserError(
                f"{models[0].name} was fine-tuned from {first_start}, but {model.name} was fine-tuned from "
                f"{other_start}. Choose runs that were fine-tuned from the same checkpoint."
            )
    return weighted_mean(models, [1 / len(models)] * len(models))


def weighted_mean(models: Sequence[ModelWeights], shares: Sequence[float]) -> ModelWeights:
    """Return the mean of models, weighted by shares that sum to 1; a model with share 1 is reproduced exactly.

    A temperature or bias that some models lack is averaged over the others.

    Raises:
        UserError: the models differ in their architecture, preprocessing or tokenizer.
    """
    _check_alike(models)
    used = [(model, share) for model, share in zip(models, shares, strict=True) if share]
    result, _ = used[-1]
    if len(used) == 1:
        return replace(models[-1], weights=result.weights, logits=result.logits)
    weights = {}
    for name in result.weights:
        weights[name] = _mean_tensor([(model.weights[name], share) for model, share in used])
    log_temperature = _mean_number(
        [(math.log(model.logits.temperature), share) for model, share in used if model.logits.temperature is not None]
    )
    logits = LogitParameters(
        temperature=None if log_temperature is None else math.exp(log_temperature),
        bias=_mean_number([(model.logits.bias, share) for model, share in used if model.logits.bias is not None]),
    )
    return replace(models[-1], weights=weights, logits=logits)


def _mean_tensor(parts: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return the weighted mean of tensors in float32, or the last tensor if they contain integers."""
    last, _ = parts[-1]
    if not last.is_floating_point():
        return last
    total = torch.zeros(last.shape, dtype=torch.float64)
    for tensor, share in parts:
        total.add_(tensor.double(), alpha=share)
    return total.float()


def _mean_number(parts: Sequence[tuple[float, float]]) -> float | None:
    """Return the weighted mean of (number, share) pairs, whose shares may sum to less than 1; None without numbers."""
    if not parts:
        return None
    return sum(number * share for number, share in parts) / sum(share for _, share in parts)


def _check_alike(models: Sequence[ModelWeights]) -> None:
    """Raise `UserError` if a model differs from the first in its architecture, preprocessing or tokenizer."""
    first = models[0]
    for model in models[1:]:
        difference = _difference(first, model)
        if difference is not None:
            raise UserError(
                f"{first.name} and {model.name} cannot be averaged: they differ in {difference}. Choose models with "
                "the same architecture, preprocessing and tokenizer."
            )


def _difference(first: ModelWeights, second: ModelWeights) -> str | None:
    """Return a description of the first difference between two models, or None if they are alike."""
    for name in sorted(first.weights.keys() | second.weights.keys()):
        shapes = [tuple(model.weights[name].shape) if name in model.weights else None for model in (first, second)]
        if shapes[0] != shapes[1]:
            described = ["absent" if shape is None else f"of shape {shape}" for shape in shapes]
            return f"the parameter {name} ({described[0]} and {described[1]})"
    if first.source.preprocessing != second.source.preprocessing:
        return f"their preprocessing ({first.source.preprocessing} and {second.source.preprocessing})"
    if not _tokenize_alike(first.tokenizer, second.tokenizer):
        return "their tokenizers"
    return None


def _tokenize_alike(first: ModelTokenizer, second: ModelTokenizer) -> bool:
    """Return whether two tokenizers give the same tokens for sample captions."""
    return torch.equal(first(_PROBES), second(_PROBES))
