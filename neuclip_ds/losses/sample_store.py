"""Per-sample statistics, stored by global sample index and partitioned over ranks.

Reading f fields of each rank's local samples takes one reduce-scatter of a (B, f) tensor; reading those of the whole
batch on every rank takes one all-reduce. For both, each rank copies the rows that it stores into a zero-filled buffer.
Reads can overlap the encoders' forward pass. Writes need no communication, because all ranks have the values. The host
does not wait for the device, because shapes do not depend on which rank stores a row; only the first access to a table
in host memory after a write waits until the new values have arrived.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator, HostCopy, Pending, to_device
from neuclip_ds.state.partition import Partition, RowTable

MAX_DEVICE_BYTES = 2 << 30  # larger tables are kept in pinned host memory


class SampleStore:
    """Table of f floating-point fields for n samples; each of the K ranks stores about 4 f n / K bytes in float32.

    Args:
        n: number of rows: one for each sample of the dataset, and any spare rows; a global index is in [0, n).
        fields: name -> initial value (`-inf` for a logarithm that has no value yet).
        communicator: communicator between the ranks over which rows are partitioned.
        dtype: dtype of the rows.
        max_device_bytes: largest size of a rank's rows, in bytes, that is kept on a GPU (default: 2 GiB); larger
            tables are kept in pinned host memory.
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
        table_bytes = shape[0] * shape[1] * dtype.itemsize
        in_host_memory = device.type != "cpu" and table_bytes > max_device_bytes
        table_device = torch.device("cpu") if in_host_memory else device
        self._table = torch.empty(shape, dtype=dtype, device=table_device, pin_memory=in_host_memory)
        for column, initial in enumerate(fields.values()):
            self._table[:, column] = initial
        # row numbers and new values of the last write, if they are on their way to a table in host memory
        self._pending_write: tuple[Tensor, HostCopy] | None = None
        # row numbers of the last write, and the rows' previous values
        self._overwritten: tuple[Tensor, Tensor]

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
        local_index, _ = self._locate(index)
        return to_device(self._written_table().index_select(0, local_index), self._communicator.device)

    def write(self, index: Tensor, values: Tensor) -> None:
        """Write (B, f) values for all ranks' (B,) sample indices; if an index is repeated, its last row is stored.

        Empty rows and rows stored by other ranks are skipped.
        """
        local_index, _ = self._locate(index)
        self._overwritten = (local_index, self._written_table().index_select(0, local_index))
        # on a GPU, index_copy_ writes repeated rows in an undefined order, so all repetitions get the last value
        last = to_device(_last_positions(local_index), values.device)
        values = values.to(self._table.dtype).index_select(0, last)
        if values.device == self._table.device:
            self._table.index_copy_(0, local_index, values)
        else:
            self._pending_write = (local_index, HostCopy(values))

    def undo(self) -> None:
        """Restore the rows that the last `write` changed."""
        local_index, previous_values = self._overwritten
        # a repeated row has the same values each time
        self._written_table().index_copy_(0, local_index, previous_values)

    def rows(self) -> RowTable:
        """Return this rank's rows for the checkpoint: one (n/K, f) tensor whose name lists the fields."""
        return RowTable(self.partition, {",".join(self.fields): self._written_table()[:-1]}, per_sample=True)

    def _written_table(self) -> Tensor:
        """Return the table after the values of the last write have arrived."""
        if self._pending_write is not None:
            local_index, values = self._pending_write
            self._pending_write = None
            self._table.index_copy_(0, local_index, values.wait())
        return self._table

    def _contribution(self, index: Tensor, count: int) -> Tensor:
        """Return this rank's (B, count) contribution to a read's sum over ranks: local rows, with zeros elsewhere."""
        local_index, is_local = self._locate(index)
        rows = self._written_table()[:, :count].index_select(0, local_index)
        rows.masked_fill_(~is_local[:, None], 0.0)
        return to_device(rows, self._communicator.device)

    def _locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B,) local row numbers of sample indices, and a (B,) mask that is True for local rows.

        Rows of other ranks map to the extra last row. Both tensors are on the table's device.
        """
        index = to_device(index, self._table.device)
        start = self.partition.start
        is_local = (index >= start) & (index < self.partition.stop)
        return torch.where(is_local, index - start, self.partition.size), is_local


def _last_positions(rows: Tensor) -> Tensor:
    """For each of the B row numbers in `rows`, return its last position, without synchronizing with the host."""
    count = len(rows)
    positions = torch.arange(count, device=rows.device)

    # Sort by row number, then by position: each key contains both.
    bits = count.bit_length()
    keys = (rows << bits) + positions
    if keys.device.type == "cpu":
        sorted_keys = np.sort(keys.numpy())  # ten times as fast as torch on the CPU
        keys = torch.from_numpy(sorted_keys)
    else:
        keys = keys.sort().values
    sorted_rows = keys >> bits
    sorted_positions = keys & ((1 << bits) - 1)

    # Equal rows are now a run whose last element has the last position.
    ends_run = torch.ones_like(sorted_rows, dtype=torch.bool)
    ends_run[:-1] = sorted_rows[1:] != sorted_rows[:-1]
    if rows.device.type == "cpu" and bool(ends_run.all()):  # no row repeats, by far the most common case
        return positions
    end_of_run = torch.where(ends_run, positions, count).flip(0).cummin(0).values.flip(0)
    last_positions = sorted_positions.index_select(0, end_of_run)
    return torch.empty_like(sorted_positions).scatter_(0, sorted_positions, last_positions)
