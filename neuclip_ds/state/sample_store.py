"""Per-sample statistics by global index, partitioned over ranks.

A read of a rank's own rows is one reduce-scatter of (B, f), a read of everyone's one all-reduce: each owner puts its
rows into a zero buffer. A read can be begun while the encoders still run. A write costs no traffic, because what it
stores is known to all ranks and every owner keeps its own. Shapes never depend on who owns what, so that nothing waits
for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator, Pending
from neuclip_ds.state.partition import Partition, RowTable

MAX_DEVICE_BYTES = 2 << 30  # bytes of rows; larger tables lie in pinned memory of the host


class SampleStore:
    """Float fields for each of n samples; this rank holds 4 f ceil(n / K) bytes.

    Args:
        n: samples in the data set; a global index lies in [0, n).
        fields: name -> initial value (`-inf` stands for a logarithm not yet seen).
        communicator: the ranks over which rows are partitioned.
        dtype: of the rows.
        max_device_bytes: bytes up to which a rank's rows lie on its device.
    """

    def __init__(
        self,
        n: int,
        fields: Mapping[str, float],
        communicator: Communicator,
        dtype: torch.dtype = torch.float32,
        max_device_bytes: int = MAX_DEVICE_BYTES,
    ) -> None:
        self.partition = Partition.of(n, communicator.rank, communicator.world_size)
        self.fields = tuple(fields)
        self._communicator = communicator
        shape = (self.partition.size + 1, len(fields))  # the row behind the last takes what other ranks own
        device = torch.device(communicator.device)
        size = shape[0] * shape[1] * dtype.itemsize
        if device.type == "cpu" or size <= max_device_bytes:
            self._rows = torch.empty(shape, dtype=dtype, device=device)
        else:
            self._rows = torch.empty(shape, dtype=dtype, pin_memory=True)
        for column, initial in enumerate(fields.values()):
            self._rows[:, column] = initial

    def begin_read(self, index: Tensor) -> Pending:
        """Fields of this rank's rows of the batch, on their way.

        Args:
            index: (B,) int64, the global indices of all ranks in rank order, B a multiple of the world size; -1 is
                an empty row.

        Returns:
            (B / K, f): the rank's rows; zeros for empty rows.
        """
        return self._communicator.begin_reduce_scatter(self._contribution(index, len(self.fields)), "state")

    def begin_read_all(self, index: Tensor, count: int) -> Pending:
        """The first `count` fields of everyone's rows, on their way: (B, count), zeros for empty rows."""
        return self._communicator.begin_all_reduce(self._contribution(index, count), "state")

    def local_rows(self, index: Tensor) -> Tensor:
        """(B, f): the rows of the batch that this rank owns; what the others own holds numbers without a meaning."""
        return self._rows.index_select(0, self._place(index)[0]).to(index.device)

    def _contribution(self, index: Tensor, count: int) -> Tensor:
        """(B, count): this rank's rows, zeros where it owns none."""
        rows, owned = self._place(index)
        found = self._rows[:, :count].index_select(0, rows).to(index.device, non_blocking=True)
        return found.masked_fill(~owned[:, None], 0.0)

    def write(self, index: Tensor, values: Tensor) -> None:
        """Stores (B, f) values of all ranks' samples `index` (B,); rows of other owners and empty rows are skipped."""
        rows, _ = self._place(index)
        self._rows.index_copy_(0, rows, values.to(self._rows.device, self._rows.dtype))

    def rows(self) -> RowTable:
        """The rank's rows for the checkpoint: one (n/K, f) tensor, named by its fields, joined by commas."""
        return RowTable(self.partition, {",".join(self.fields): self._rows[:-1]}, grows=True)

    def _place(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) local rows where the table lies, and whether this rank owns them: the last row where it does not."""
        low, high = self.partition.start, self.partition.stop
        owned = (index >= low) & (index < high)
        rows = torch.where(owned, index - low, self.partition.size)
        return rows.to(self._rows.device), owned


def columns(table: RowTable) -> dict[str, Tensor]:
    """This rank's rows of a store's table by field; each (n/K,)."""
    return {name: rows[:, place] for key, rows in table.tensors.items() for place, name in enumerate(key.split(","))}
