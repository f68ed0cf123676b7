"""Matryoshka training (Kusupati et al. 2022): the first p dimensions of the features are trained as features too.

For prefixes p with weights w_p, and any loss L of this package,

    L(e1, e2) + sum_p w_p L_p(e1[:p]/|e1[:p]|, e2[:p]/|e2[:p]|)

where L_p is the same loss with its own state: temperature, per-sample statistics and networks. The prefixes are cut
from features that have already been gathered, so a prefix sends no features, but adds all other traffic of its loss.

With the unit vector x = e[:p]/r and r = |e[:p]|, the gradient G of L_p with respect to x gives (G - (G . x) x)/r for
the first p dimensions of e.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.distributed.communicator import Pending
from neuclip_ds.errors import UserError
from neuclip_ds.losses.base import (
    LossContext,
    LossFunction,
    LossOutput,
    Position,
    Stateful,
    entries_under,
    with_prefix,
)
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.method import LossBuilder
from neuclip_ds.losses.options import PREFIX, ObjectiveConfig
from neuclip_ds.losses.stored_features import GatheredStored
from neuclip_ds.state.partition import RowTable

_SMALLEST_NORM = 1e-12  # as in torch's `normalize`


def build_function(build: LossBuilder, config: ObjectiveConfig, context: LossContext) -> LossFunction:
    """Build a loss with `build` and, if `objective.prefixes` is set, add the weighted loss of each prefix.

    Raises `UserError` if a prefix is not shorter than the features, and the errors of `build`.
    """
    function = build(config, context)
    if not config.prefixes:
        return function
    of_prefixes: dict[int, LossFunction] = {}
    for length in config.prefixes:
        if length >= context.dim:
            raise UserError(
                f"objective.prefixes contains {length}, but prefixes must be shorter than the features, which have "
                f"{context.dim} dimensions: use shorter prefixes. The full-length features are always trained, with "
                "weight 1."
            )
        of_prefixes[length] = build(config, replace(context, dim=length))
    return PrefixedLoss(function, of_prefixes, config.prefixes, context)


class PrefixedLoss(LossFunction):
    """Sum of the loss of the full-length features and the weighted losses of their prefixes.

    Args:
        whole: the loss of the full-length features.
        prefixes: the loss of each prefix, by its length p.
        weights: the weight of each prefix.
        context: sizes and settings of the run.

    Attributes:
        whole: the loss of the full-length features. The names of its state, its metrics and its statistics do not begin
            with `prefixP/`.
    """

    def __init__(
        self,
        whole: LossFunction,
        prefixes: Mapping[int, LossFunction],
        weights: Mapping[int, float],
        context: LossContext,
    ) -> None:
        self.whole = whole
        self._prefixes = dict(prefixes)
        self._weights = weights
        self._communicator = context.communicator
        components: dict[str, Stateful] = {_name(length): function for length, function in prefixes.items()}
        super().__init__({**components, "": whole})

    def gathers(self, position: Position) -> bool:
        return self.whole.gathers(position)  # the same for every width

    def __call__(self, batch: GatheredFeatures, position: Position, training: bool) -> LossOutput:
        output = self.whole(batch, position, training)
        loss = output.loss
        image_gradient = output.image_gradient.clone()
        text_gradient = output.text_gradient.clone()
        metrics = dict(output.metrics)
        for length, function in self._prefixes.items():
            name = _name(length)
            statistics = entries_under(name, batch.statistics)
            prefix = GatheredStored(
                image=normalize(batch.image[:, :length], dim=1, eps=_SMALLEST_NORM),
                text=normalize(batch.text[:, :length], dim=1, eps=_SMALLEST_NORM),
                comm_dtype=batch.image.dtype,  # the normalized rows are not representable in a smaller dtype
            )
            prefix_output = function(batch.with_features(prefix, statistics), position, training)

            weight = self._weights[length]
            loss = loss + weight * prefix_output.loss
            local = batch.local
            for gradient, features, unit, unit_gradient in (
                (image_gradient, batch.image[local], prefix.image[local], prefix_output.image_gradient),
                (text_gradient, batch.text[local], prefix.text[local], prefix_output.text_gradient),
            ):
                norm = torch.linalg.vector_norm(features[:, :length], dim=1, keepdim=True).clamp_min(_SMALLEST_NORM)
                along = (unit_gradient * unit).sum(dim=1, keepdim=True)
                gradient[:, :length].add_((unit_gradient - along * unit) / norm, alpha=weight)
            metrics[f"{name}loss"] = prefix_output.loss
            metrics |= with_prefix(name, prefix_output.metrics)

        squared_norm = image_gradient.square().sum() + text_gradient.square().sum()
        gradient_norm = self._communicator.all_reduce(squared_norm.view(1), "scalars").squeeze(0).sqrt()
        metrics["feature_grad_norm"] = gradient_norm
        return LossOutput(
            loss=loss,
            image_gradient=image_gradient,
            text_gradient=text_gradient,
            gradient_norm=gradient_norm,
            metrics=metrics,
        )

    def begin_reads(self, padded_index: Tensor) -> dict[str, Pending]:
        reads = self.whole.begin_reads(padded_index)
        for length, function in self._prefixes.items():
            reads |= with_prefix(_name(length), function.begin_reads(padded_index))
        return reads

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        of_whole = dict(state)
        for length, function in self._prefixes.items():
            name = _name(length)
            entries = entries_under(name, state)
            function.load_replicated_state(entries)
            for key in entries:
                del of_whole[name + key]
        self.whole.load_replicated_state(of_whole)

    def row_tables(self) -> dict[str, RowTable]:
        tables = self.whole.row_tables()
        for length, function in self._prefixes.items():
            tables |= with_prefix(_name(length), function.row_tables())
        return tables


def _name(length: int) -> str:
    """Return the start of the names of a prefix's metrics and state."""
    return f"{PREFIX}{length}/"
