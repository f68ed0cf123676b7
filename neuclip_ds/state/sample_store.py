"""Per-sample statistics, stored by global sample index and partitioned over ranks.

Reading f fields of each rank's samples takes one reduce-scatter of a (B, f) tensor; reading the whole batch takes one
all-reduce. For both, each rank copies its local rows into a zero-filled buffer. Reads can overlap the encoders' forward
pass. Writes need no communication, because all ranks have the values. The host never waits for the device: shapes do
not depend on which rank stores a row, and tables in host memory are updated once the new values have arrived.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator, HostCopy, Pending, to_device
from neuclip_ds.state.partition import Partition, RowTable

MAX_DEVICE_BYTES = 2 << 30  # larger tables are kept in pinned host memory


class SampleStore:
    """Table of f floating-point fields for n samples; each of the K ranks stores 4 f ceil(n / K) bytes in float32.

    Args:
        n: number of samples in the dataset; a global index is in [0, n).
        fields: name -> initial value (`-inf` for a logarithm that has no value yet).
        communicator: the ranks over which rows are partitioned.
        dtype: dtype of the rows.
        max_device_bytes: size of the largest table to keep on a device; larger tables are in pinned host memory.
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
        shape = (self.partition.size + 1, len(fields))  # the extra last row absorbs writes to rows of other ranks
        device = torch.device(communicator.device)
        size = shape[0] * shape[1] * dtype.itemsize
        pinned = device.type != "cpu" and size > max_device_bytes
        self._table = torch.empty(shape, dtype=dtype, device="cpu" if pinned else device, pin_memory=pinned)
        for column, initial in enumerate(fields.values()):
            self._table[:, column] = initial
        self._arriving: tuple[Tensor, HostCopy] | None = None  # row numbers and new values, for a table in host memory
        self._overwritten: tuple[Tensor, Tensor]  # row numbers of the last write, and the rows' previous values

    @property
    def _rows(self) -> Tensor:
        """The table, after waiting for the values of the last write to arrive."""
        if self._arriving is not None:
            rows, values = self._arriving
            self._arriving = None
            self._table.index_copy_(0, rows, values.wait())
        return self._table

    def begin_read(self, index: Tensor) -> Pending:
        """Start reading the fields of this rank's samples in the batch.

        Args:
            index: (B,) int64 in host memory: the global sample indices of all ranks in rank order, where -1 marks an
                empty row; B must be a multiple of the world size.

        Returns:
            A pending (B / K, f) tensor with this rank's rows, and zeros for empty rows.
        """
        return self._communicator.begin_reduce_scatter(self._contribution(index, len(self.fields)), "state")

    def begin_read_all(self, index: Tensor, count: int) -> Pending:
        """Start reading the whole batch's first `count` fields, as a (B, count) tensor with zeros for empty rows."""
        return self._communicator.begin_all_reduce(self._contribution(index, count), "state")

    def local_rows(self, index: Tensor) -> Tensor:
        """Return the batch's (B, f) rows; the values of rows that other ranks store are undefined."""
        return to_device(self._rows.index_select(0, self._locate(index)[0]), self._communicator.device)

    def _contribution(self, index: Tensor, count: int) -> Tensor:
        """Return this rank's (B, count) contribution to a read's sum over ranks: local rows, with zeros elsewhere."""
        rows, is_local = self._locate(index)
        found = self._rows[:, :count].index_select(0, rows)
        return to_device(found.masked_fill_(~is_local[:, None], 0.0), self._communicator.device)

    def write(self, index: Tensor, values: Tensor) -> None:
        """Write (B, f) values for all ranks' (B,) sample indices; if an index is repeated, its last row is stored.

        Empty rows and rows stored by other ranks are skipped.
        """
        rows, _ = self._locate(index)
        self._overwritten = rows, self._rows.index_select(0, rows)
        last = _last_of_each(rows)  # on a GPU, index_copy_ writes repeated rows in an undefined order
        values = values.to(self._table.dtype).index_select(0, to_device(last, values.device))
        if values.device == self._table.device:
            self._table.index_copy_(0, rows, values)
        else:
            self._arriving = rows, HostCopy(values)

    def undo(self) -> None:
        """Restore the rows that the last `write` changed."""
        rows, before = self._overwritten
        self._rows.index_copy_(0, rows, before)  # a repeated row has the same values each time

    def rows(self) -> RowTable:
        """Return this rank's rows for the checkpoint: one (n/K, f) tensor whose name lists the fields."""
        return RowTable(self.partition, {",".join(self.fields): self._rows[:-1]}, per_sample=True)

    def _locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B,) local row numbers of sample indices, and a (B,) mask that is True for local rows.

        Rows of other ranks map to the extra last row. Both tensors are on the table's device.
        """
        index = to_device(index, self._table.device)
        low, high = self.partition.start, self.partition.stop
        is_local = (index >= low) & (index < high)
        return torch.where(is_local, index - low, self.partition.size), is_local


def _last_of_each(rows: Tensor) -> Tensor:
    """For each of the B row numbers in `rows`, return its last position, without synchronizing with the host."""
    places = torch.arange(len(rows), device=rows.device)
    bits = len(rows).bit_length()
    keys = (rows << bits) + places  # ordered by row number, then by position
    # numpy sorts ten times as fast as torch on the CPU
    keys = torch.from_numpy(np.sort(keys.numpy())) if keys.device.type == "cpu" else keys.sort().values
    ordered, order = keys >> bits, keys & ((1 << bits) - 1)
    ends = torch.ones_like(ordered, dtype=torch.bool)
    ends[:-1] = ordered[1:] != ordered[:-1]
    if ends.device.type == "cpu" and bool(ends.all()):  # no row repeats, by far the most common case
        return places
    last = torch.where(ends, places, len(rows)).flip(0).cummin(0).values.flip(0)  # end of each run of equal rows
    return torch.empty_like(order).scatter_(0, order, order.index_select(0, last))
