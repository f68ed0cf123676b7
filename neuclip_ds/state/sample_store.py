"""Per-sample statistics by global index, partitioned over ranks.

A read is one reduce-scatter of (B, f): each owner puts its rows into a zero buffer. A write costs no traffic,
because the values have been gathered for the gradient already and every owner keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.state.partition import Partition, RowTable


class SampleStore:
    """Float fields for each of n samples; this rank holds 4 f ceil(n / K) bytes.

    Args:
        n: samples in the data set; a global index lies in [0, n).
        fields: name -> initial value (`-inf` stands for a logarithm not yet seen).
        communicator: the ranks over which rows are partitioned.
    """

    def __init__(
        self,
        n: int,
        fields: Mapping[str, float],
        communicator: Communicator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.partition = Partition.of(n, communicator.rank, communicator.world_size)
        self.fields = tuple(fields)
        self._communicator = communicator
        initial = torch.tensor(list(fields.values()), dtype=dtype, device=communicator.device)
        self._rows = initial.repeat(self.partition.size, 1)  # (n/K, f)

    def read(self, index: Tensor) -> Tensor:
        """Fields of this rank's rows of the batch.

        Args:
            index: (B,) int64, the global indices of all ranks in rank order, B a multiple of the world size; -1 is
                an empty row.

        Returns:
            (B / K, f): the rank's rows; zeros for empty rows.
        """
        positions, rows = self._owned(index)
        buffer = self._rows.new_zeros((index.shape[0], len(self.fields)))
        buffer.index_copy_(0, positions, self._rows.index_select(0, rows))
        return self._communicator.reduce_scatter(buffer, "state")

    def write(self, index: Tensor, values: Tensor) -> None:
        """Stores (B, f) values of all ranks' samples `index` (B,); rows of other owners and empty rows are skipped."""
        positions, rows = self._owned(index)
        self._rows.index_copy_(0, rows, values.index_select(0, positions).to(self._rows.dtype))

    def rows(self) -> RowTable:
        """The rank's rows, one column tensor a field, for the checkpoint."""
        columns = {name: self._rows[:, column] for column, name in enumerate(self.fields)}
        return RowTable(self.partition, columns)

    def _owned(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Positions in the batch whose samples this rank owns, and their local rows."""
        low, high = self.partition.start, self.partition.stop
        positions = torch.nonzero((index >= low) & (index < high)).squeeze(1)
        return positions, index.index_select(0, positions) - low
