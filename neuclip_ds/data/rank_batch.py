"""A rank's rows of a global batch, in the parts in which loader processes deliver them.

A part is a job of one loader process. Parts are bounded in bytes, so that the memory of batches on their way does not
grow with the batch, and the processes share a large one. Parts are not joined: that would copy all pixels.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from neuclip_ds.data.dataset import BadSample, Batch

PART_BYTES = 1 << 27  # of pixels; torch rounds a block of pinned memory up to a power of two


def part_count(rows: int, image_size: int) -> int:
    """Return into how many parts b rows of (3, image_size, image_size) uint8 pixels are cut."""
    most = max(1, PART_BYTES // (3 * image_size**2))  # rows of a part
    return -(-rows // most)


def part_rows(rows: int, count: int, number: int) -> slice:
    """Return the rows of one of `count` parts of nearly equal size."""
    return slice(rows * number // count, rows * (number + 1) // count)


class RankBatch:
    """A batch of b rows in consecutive parts.

    Attributes:
        index: int64 (b,), global indices.
        valid: bool (b,).
        bad: the samples that could not be used.
    """

    def __init__(self, parts: Sequence[Batch]) -> None:
        self._parts: list[Batch | None] = list(parts)
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part.index))
        self.index: Tensor = _joined([part.index for part in parts])
        self.valid: Tensor = _joined([part.valid for part in parts])
        self.bad: tuple[BadSample, ...] = tuple(sample for part in parts for sample in part.bad)

    def __len__(self) -> int:
        return self._starts[-1]

    def pieces(self, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Return views of these rows' pixels, uint8 (r, 3, H, W), and tokens, int64 (r, T), one pair from each part.

        Raises RuntimeError where they have been released.
        """
        found = []
        for part, start, stop in zip(self._parts, self._starts[:-1], self._starts[1:], strict=True):
            if start < rows.stop and rows.start < stop:
                if part is None:
                    raise RuntimeError(f"Rows {rows.start} to {rows.stop} of a batch have been released.")
                here = slice(max(rows.start - start, 0), min(rows.stop, stop) - start)
                found.append((part.image[here], part.tokens[here]))
        return found

    def release(self, rows: int) -> None:
        """Free the pixels and tokens of all parts that lie within the first `rows` rows."""
        for number, stop in enumerate(self._starts[1:]):
            if stop <= rows:
                self._parts[number] = None


def join_parts(parts: Iterator[Batch], count: int) -> Iterator[RankBatch]:
    """Iterate over the batches that `count` consecutive parts each make."""
    while found := list(islice(parts, count)):
        batch = RankBatch(found)
        del found  # the batch alone decides how long pixels are kept
        yield batch


def _joined(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat(parts)
    return whole.pin_memory() if parts[0].is_pinned() else whole
