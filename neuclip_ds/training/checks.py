"""Checks that a run and its dry run share: what cannot work is refused, what is likely a slip is reported."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.config import Config, TowerConfig
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.repeats import check_separate
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.start import check_engine_config
from neuclip_ds.evaluation.tasks import Task, load_tasks
from neuclip_ds.evaluation.zero_shot import ZeroShotSet
from neuclip_ds.models.trained_parts import TOWERS
from neuclip_ds.objectives.methods import find_method
from neuclip_ds.reporting.weights_and_biases import require_wandb
from neuclip_ds.training.data import find_split, open_data, resolve
from neuclip_ds.training.phases import Phase
from neuclip_ds.training.schedules import fitted_warmup


class HeldOut(NamedTuple):
    """The sets that a run is evaluated on."""

    val: Manifest | None
    zero_shot: ZeroShotSet | None
    on_disk: list[tuple[Task, Path]]


def check_config(config: Config, world_size: int) -> None:
    """Raise `UserError` for what cannot work whatever the data are; needs no other rank."""
    config.micro_batch(world_size)
    check_engine_config(load_engine_config(config, world_size), config.deepspeed)
    if config.run.wandb is not None:
        require_wandb()


def open_held_out(config: Config, communicator: Communicator, folder: Path, train: Manifest | None) -> HeldOut:
    """Open the held-out sets of a run on all ranks.

    Raises `UserError` if one is named that is not there, or validation holds shards of the training data.
    """
    options = config.data
    val = find_split(options.val, "val", options.train_paths)
    images = find_split(options.zero_shot, "zero_shot", options.train_paths)
    manifest = open_data(val, options, communicator, folder) if val else None
    if train is not None and manifest is not None:
        training, held_out = train, manifest
        communicator.on_rank_zero(lambda: check_separate(training, held_out))
    zero_shot, on_disk = None, []
    if images:
        folder_of_images = Path(communicator.on_rank_zero(lambda: resolve(images)))
        zero_shot = communicator.on_every_rank(lambda: ZeroShotSet.read(folder_of_images))
    if options.evaluation_sets is not None:
        root = options.evaluation_sets
        on_disk = communicator.on_rank_zero(lambda: load_tasks().on_disk([root], options.evaluation_tasks))
    return HeldOut(manifest, zero_shot, on_disk)


def likely_slips(config: Config, phases: Sequence[Phase]) -> list[str]:
    """Return a sentence for each setting that training survives but that hardly anybody means."""
    optimizer, found = config.optimizer, []
    warmups = {(phase.rates_stop - phase.rates_start, phase.rates.warmup_steps): None for phase in phases}
    if optimizer.lr == 0:
        found.append("optimizer.lr=0: the encoders will not learn.")
    else:
        found += [
            f"optimizer.warmup_steps={warmup} is not shorter than the run of {steps} steps: it is fitted to "
            f"{fitted_warmup(warmup, steps)}, a tenth of the run."
            for steps, warmup in warmups
            if warmup >= steps
        ]
    for name in TOWERS:
        tower: TowerConfig = getattr(config.model, name)
        if tower.trained == "frozen" and not (tower.pretrained or config.model.pretrained):
            found.append(
                f"model.{name}.train=frozen freezes random weights: name weights with model.{name}.pretrained."
            )
    if optimizer.min_lr > 0 and optimizer.schedule == "constant":
        found.append("optimizer.min_lr has no effect with optimizer.schedule=constant; cooldown comes down to it.")
    elif optimizer.min_lr > optimizer.lr:
        found.append(f"optimizer.min_lr={optimizer.min_lr:g} is above optimizer.lr={optimizer.lr:g}: exchange them.")
    return found + find_method(config.objective.method).slips(config.objective)
