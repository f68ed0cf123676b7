"""The plan of a run: its phases, and its place in the data when it resumes.

If the data have grown while a run was interrupted, the epoch in progress ends with the shards that it began with, and
the next one has the new shards too. A run without `phases:` is one phase; a run that resumes is in the phase that its
step belongs to.
"""

import logging
from collections.abc import Mapping
from typing import Any

from neuclip_ds.config import Config, ModelConfig, PhaseConfig, VisionConfig
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.mixture import BatchOrder
from neuclip_ds.errors import UserError
from neuclip_ds.models.image_models import check_image_size, taking_other_sizes
from neuclip_ds.training.schedule import DataPosition, Phase, Span

log = logging.getLogger(__name__)


def check_data(saved: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise `UserError` unless the data equal a checkpoint's data or have grown from them."""
    if manifest.hash_of_first(saved["shards"]) != saved["hash"] or manifest.n_shards < saved["shards"]:
        raise UserError(
            f"The checkpoint was written with other data (hash {saved['hash']}, {saved['shards']} shards; now "
            f"{manifest.content_hash}, {manifest.n_shards}): name the data it was trained on, or a manifest that "
            "`neuclip-ds build-manifest --update` has made from theirs, or give the run another name (--run.name)."
        )


def resume(saved: Mapping[str, Any], done: int, manifest: Manifest, order: BatchOrder) -> DataPosition:
    """Return the position of a run that resumes after `done` steps.

    Args:
        saved: the checkpoint's record.
        order: order of the current data, which may have grown or lack removed shards; rows of removed shards stay empty
        in an epoch in progress.

    Raises:
        UserError: the data differ from the record.
    """
    check_data(saved, manifest)
    before = DataPosition([_build(span, manifest, order) for span in saved["spans"]])
    last = before.spans[-1]
    if (manifest.n_shards, manifest.removed) == (last.shards, last.removed):
        return before
    under_way = before.at(done)
    step = done + -under_way.step % under_way.order.steps_per_epoch
    after = Span(step, under_way.epoch + (under_way.step > 0), order, manifest.n_shards, manifest.removed)
    log.warning(
        "the data have changed from %d shards to %d (%d samples in use): epoch %d, from step %d on, is the first with "
        "these",
        *(last.shards, manifest.n_shards, manifest.n_used, after.epoch, step),
    )
    return DataPosition([*[span for span in before.spans if span.step <= done][-1:], after] if step > done else [after])


def _build(span: Mapping[str, Any], manifest: Manifest, order: BatchOrder) -> Span:
    shards, removed = span["shards"], tuple(span["removed"])
    if (shards, removed) != (manifest.n_shards, manifest.removed):
        order = order.of_shards(manifest.sizes_without(removed)[:shards], manifest.removed)
    return Span(span["step"], span["epoch"], order, shards, removed)


def plan_phases(config: Config, position: DataPosition, total: int) -> list[Phase]:
    """Return the phases of a run of `total` steps.

    Raises:
        UserError: the first phases leave no step of the budget for the last one.
    """
    phases, drops, edges = config.phases or [PhaseConfig()], _patch_drops(config), [0]
    epochs, steps = 0.0, 0
    for phase in phases[:-1]:
        epochs, steps = epochs + (phase.epochs or 0), steps + (phase.steps or 0)
        edges.append(position.end(epochs) if phase.epochs else steps)
    edges.append(total)
    if edges != sorted(set(edges)):
        raise UserError(
            f"phases: the first {len(edges) - 2} take {edges[-2]} steps, and the run has {total}: raise epochs or "
            "max_steps, or shorten them, as the last one takes the rest."
        )
    planned = []
    schedules = [number for number, phase in enumerate(phases) if number == 0 or phase.lr is not None]
    for first, after in zip(schedules, [*schedules[1:], len(phases)], strict=True):
        chosen = phases[first].model_dump(include={"lr", "warmup_steps"}, exclude_none=True)
        rates = config.optimizer.model_copy(update=chosen)
        for number in range(first, after):
            inputs = phases[number].image_size, phases[number].context_length, drops[number]
            planned.append(Phase(edges[number], edges[number + 1], *inputs, rates, edges[first], edges[after]))
    return planned


def model_for_phases(config: Config) -> ModelConfig:
    """Return a config of the model that supports the inputs of every phase.

    Raises:
        UserError: the image tower does not support a phase's image size.
    """
    vision = config.model.vision
    sizes = {phase.image_size for phase in config.phases if phase.image_size} - {vision.image_size}
    for size in sorted(sizes):
        check_image_size(vision, size)
    if sizes:
        vision = taking_other_sizes(vision)
    return _with_patch_drop(config, vision, max(_patch_drops(config)))


def largest_model(config: Config) -> ModelConfig:
    """Return a config of the model that takes at least the memory of every phase."""
    return _with_patch_drop(config, config.model.vision, min(_patch_drops(config)))


def _patch_drops(config: Config) -> list[float]:
    default = config.model.vision.patch_drop
    return [default if phase.patch_drop is None else phase.patch_drop for phase in config.phases] or [default]


def _with_patch_drop(config: Config, vision: VisionConfig, share: float) -> ModelConfig:
    return config.model.model_copy(update={"vision": vision.model_copy(update={"patch_drop": share})})
