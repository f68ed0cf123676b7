"""The training set of a run: one data set, or a weighted mixture of several."""

from collections.abc import Callable

import numpy as np

from neuclip_ds.config import DataConfig
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.manifest import Manifest, join
from neuclip_ds.data.mixture import MixtureOrder
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.errors import UserError


class TrainingSet:
    """The shards of a run's sources.

    Attributes:
        manifest: of all sources, one after the other.
        sources: options of each; empty for a data set that is no mixture.
        parts: (n_shards,) number of samples in use of each shard, 0 for those of other sources, for each source.
    """

    def __init__(self, data: DataConfig, open_one: Callable[[str], Manifest]) -> None:
        """`open_one` opens what a source names; raises `UserError` if there is none."""
        if not data.train_paths:
            raise UserError("Name the training data: --data.train=FOLDER_OF_TARS (or demo:train).")
        self.sources = data.sources
        manifests = [open_one(path) for path in data.train_paths]
        if not self.sources:
            self.manifest = manifests[0]
            self.parts = [self.manifest.sizes]
            return
        self.manifest = join(manifests)
        source_of = np.repeat(np.arange(len(manifests)), [manifest.n_shards for manifest in manifests])
        self.parts = [np.where(source_of == number, self.manifest.sizes, 0) for number in range(len(manifests))]

    def weights(self) -> dict[int, list[float]]:
        """Return the weight of each source, by the step from which they hold."""
        found: list[dict[int, float]] = [
            {0: source.upsample * float(part.sum())} if source.weight is None else _by_step(source.weight)
            for source, part in zip(self.sources, self.parts, strict=True)
        ]
        steps = sorted({step for weights in found for step in weights})
        return {step: [_at(weights, step) for weights in found] for step in steps}

    def interleaves(self, interleave: Interleave) -> list[Interleave]:
        """Return how each source is interleaved: blocks as long as its largest share of the window."""
        if not self.sources:
            return [interleave]
        shares = np.array([np.array(weights) / max(sum(weights), 1e-300) for weights in self.weights().values()])
        blocks = np.maximum(1, np.round(interleave.block * shares.max(axis=0))).astype(int)
        return [interleave._replace(block=int(block)) for block in blocks]

    def mixture(self, batch_size: int, seed: int, interleave: Interleave, stratified: bool) -> MixtureOrder:
        """Return the order of a mixture's samples; raise `UserError` if its weights cannot work."""
        orders = [
            GlobalOrder(self.manifest.starts, part, batch_size, seed, own)
            for part, own in zip(self.parts, self.interleaves(interleave), strict=True)
        ]
        return MixtureOrder(orders, self.weights(), interleave, stratified)

    def describe(self) -> list[str]:
        """Return a line for each source: its samples, and its share of the batches by step."""
        lines = []
        for number, (source, part) in enumerate(zip(self.sources, self.parts, strict=True)):
            shares = [
                f"{weights[number] / sum(weights):.1%}" + (f" from step {step:,}" if step else "")
                for step, weights in self.weights().items()
            ]
            lines.append(f"  {source.path:<12} {int(part.sum()):,} samples, {', '.join(shares)} of each batch")
        return lines


def _by_step(weight: float | list[tuple[int, float]]) -> dict[int, float]:
    return dict(weight) if isinstance(weight, list) else {0: weight}


def _at(weights: dict[int, float], step: int) -> float:
    return weights[max(begin for begin in weights if begin <= step)]


def facts_of(data: DataConfig) -> dict[str, object]:
    """Return what a checkpoint keeps of a mixture: nothing of a single data set."""
    if not data.sources:
        return {}
    described = [source.model_dump(mode="json", exclude={"path"}) for source in data.sources]
    return {"sources": described, "stratified": data.stratified}
