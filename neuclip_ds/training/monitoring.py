"""What the reports of a stage need to know of its data and config, which `reporting` itself knows nothing of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from neuclip_ds.config import Config
from neuclip_ds.data.loader import PADDING
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.reporting.health import SampleLookup
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.reporting.weights_and_biases import WeightsAndBiases
from neuclip_ds.training.data_position import DataPosition


def open_metrics(config: Config, folder: Path, rank: int, done: int) -> AbstractContextManager[MetricsLog | None]:
    """The numbers of a stage, on rank 0.

    Args:
        config: of the run.
        folder: of the stage.
        rank: of this process.
        done: steps that the stage has behind it.
    """
    if rank != 0:
        return nullcontext()
    if config.run.wandb is None:
        return MetricsLog(folder, done or None)
    name = folder.relative_to(config.run.folder).as_posix()
    online = WeightsAndBiases(config.run.wandb, folder, name, config.model_dump(mode="json"), resumed=done > 0)
    return MetricsLog(folder, done or None, [online])


def samples_of_steps(order: GlobalOrder, manifest: Manifest, position: DataPosition) -> SampleLookup:
    """Which samples all ranks together see in a step, without asking them: the order is a pure function."""
    return SampleLookup(
        lambda step: order.batch(*position.at(step - 1)).tolist(),
        lambda index: manifest.shards[manifest.locate(index)[0]].path,
        PADDING,
    )


def is_rest(order: GlobalOrder, position: DataPosition, number: int) -> bool:
    """Whether step `number` (from 0) sees the rest of an epoch, less than half a batch, whose loss is another one."""
    last = position.at(number)[1] + 1 == order.steps_per_epoch
    return last and 2 * order.last_batch_size < order.batch_size
