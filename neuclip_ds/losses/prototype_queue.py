"""A queue of the last m samples' features, from which NeuCLIP draws its prototypes; partitioned over ranks by row."""

import torch

from neuclip_ds.losses.base import LossContext
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.pairs import IMAGE, TEXT
from neuclip_ds.state.partition import Partition


class PrototypeQueue:
    """The image and text features of the last m samples; the run's i-th sample is stored in row i mod m.

    Args:
        partition: the rows of the queue that this rank stores; `partition.rows` is m.
        context: sizes and settings of the run.

    Attributes:
        rows: (2, local rows, d) image and text features in this rank's rows.
        seen: number of samples added so far.
    """

    def __init__(self, partition: Partition, context: LossContext) -> None:
        self._partition = partition
        shape = (2, partition.size, context.dim)
        self.rows = torch.zeros(shape, dtype=context.dtype, device=context.communicator.device)
        self.seen = 0

    @property
    def is_full(self) -> bool:
        """Whether m samples have been added."""
        return self.seen >= self._partition.rows

    def add(self, batch: GatheredFeatures) -> None:
        """Overwrite the oldest rows with the samples of a batch, or with its last m samples if it has more."""
        size = self._partition.rows
        end = self.seen + batch.size
        begin = max(self.seen, end - size)  # samples [begin, end) of the run are stored
        # row 0 stores sample `lap`; after row m - 1, the samples may continue in row 0 of the next lap
        first_lap = begin // size * size
        for lap in (first_lap, first_lap + size):
            first_row = lap + self._partition.start  # number of the sample in this rank's first row
            low = max(begin, first_row)
            high = min(end, lap + self._partition.stop)
            if low < high:
                rows = slice(low - first_row, high - first_row)
                samples = slice(low - self.seen, high - self.seen)
                self.rows[IMAGE][rows] = batch.image[samples]
                self.rows[TEXT][rows] = batch.text[samples]
        self.seen = end
