"""Pairs of a batch: blocks of similarities, and the closed-form gradient of a weighted sum over pairs.

All methods but SigLIP share the feature gradient of

    L = 1/B sum_i [ W1_i g1_i + W2_i g2_i ],   g1_i = 1/(B-1) sum_{j != i} exp(l(s_ij - s_ii) / tau1_i),
                                               g2_i = 1/(B-1) sum_{j != i} exp(l(s_ji - s_ii) / tau2_i)

where s_ij = e1_i . e2_j is the similarity of image i and text j, l is the pair loss, and the weights W are constant.
Image i is the anchor of g1_i, and text i is the anchor of g2_i; an anchor's partners are the features that it is
compared with.

Gradient. The similarity of a negative pair (i, j) appears in the sums of its two anchors, image i and text j:

    dL/ds_ij = w1_ij + w2_ij,   w1_ij = W1_i/(B (B-1)) exp(l(x)/tau1_i) l'(x)/tau1_i   at x = s_ij - s_ii,
                                w2_ij = W2_j/(B (B-1)) exp(l(x)/tau2_j) l'(x)/tau2_j   at x = s_ij - s_jj
    dL/ds_ii = - sum_{j != i} (w1_ij + w2_ji)
    dL/de1_i = sum_j dL/ds_ij e2_j,   dL/de2_j = sum_i dL/ds_ij e1_i

Two passes over the pairs. The first pass computes log g of every anchor, from which the caller computes W. The second
pass computes the gradient. Ranks exchange features and weights, but not gradients.

Arithmetic. Every pair loss satisfies (x + m) l'(x) = p l(x) with constants m (margin) and p (power). Dividing x + m by
r = tau^(1/p) therefore divides l(x) by tau: l/tau is a function of y - o alone, where y = s_ij/r is the divided
similarity and o = (s_ii - m)/r is the anchor's origin. Since l/tau = l'/tau (x + m)/p, the derivative of L with respect
to log tau is minus the sum of w_ij (x + m)/p over all pairs and both anchors of each pair.

Reference model. With the similarities r_ij of a reference model, s_ij - r_ij replaces s_ij everywhere (DRRho-CLIP). The
features of both models, side by side as (e1_i, -r1_i) and (e2_j, r2_j), have these similarities, so that the two passes
need no changes (`GatheredFeatures.minus_reference`). The gradient's columns for the reference's features are needed for
the derivative with respect to tau; afterward, they are dropped, because these features are constants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.compiler import Compiler
from neuclip_ds.losses.arithmetic import bounded_exp_, exp_, log_sum_exp, pair_products, products_exact_for

if TYPE_CHECKING:
    from neuclip_ds.losses.gather import GatheredFeatures

IMAGE = 0
TEXT = 1

CACHED_BYTES = 1_024_000_000
"""Bytes per rank for caching similarities between the two passes; larger sets of similarities are recomputed."""

_CPU_BLOCK = 1 << 20  # bytes per thread, so that the block stays in the core's cache after the matmul
# bytes; the host takes longer to launch smaller blocks than the GPU takes to compute them: on an H200, a step with a
# batch of 16,384 takes 17 ms with these blocks (not compiled) and 71 ms with 16 MiB blocks, although those fit into the
# L2 cache
_GPU_BLOCK = 1 << 27
# number of pairs, B^2/K, at which compiled kernels save about 1 ms per step, scaled from 7.6 ms for 2^28 pairs in bf16
# on an H200 (tools/measurements/objective_h200.csv)
_COMPILED_PAIRS = 1 << 25


def block_bytes(device_type: str) -> int:
    """Return the maximum size in bytes of a block of similarities on a device."""
    if device_type == "cpu":
        return _CPU_BLOCK * torch.get_num_threads()
    return _GPU_BLOCK


def compiles(device_type: str, pairs: int) -> bool:
    """Return whether to compile a block's elementwise operations into one kernel: true for many pairs on a GPU."""
    return device_type == "cuda" and pairs >= _COMPILED_PAIRS


def factors_exponentials(device_type: str) -> bool:
    """Return whether to compute one exponential per pair where possible (`FactoredSimilarities`): true on a CPU."""
    return device_type == "cpu"


def slices(start: int, stop: int, size: int) -> list[slice]:
    """Cut the range [start, stop) into slices of at most `size`."""
    return [slice(low, min(low + size, stop)) for low in range(start, stop, size)]


# ---------------------------------------------------------------------------------------------------------------------
# Pair losses
# ---------------------------------------------------------------------------------------------------------------------


class PairLoss:
    """Pair loss l(x) of x = s_ij - s_ii: here the identity, as in every method but `tuneclip`. SigLIP has no pair loss.

    Attributes:
        margin, power: constants m and p of the equation (x + m) l'(x) = p l(x); 0 and 1 for the identity.
        divisor_offset: 1, or 0 in TuneCLIP's losses. The sum over negatives in a batch of B rows is divided by
            B - divisor_offset.
        is_identity: whether l(x) = x.
    """

    is_identity = True
    margin = 0.0
    power = 1.0

    def __init__(self, divisor_offset: int = 1) -> None:
        self.divisor_offset = divisor_offset

    def value_(self, x: Tensor) -> Tensor:
        """Overwrite x with l(x)."""
        return x

    def exponent(self, y: Tensor, origin: Tensor, out: Tensor | None) -> Tensor:
        """Return l/tau without the anchor's constant (see `omitted_constant`); the result may be `out` or y.

        Args:
            y: (rows, columns) similarities of a block, divided by r = tau^(1/power).
            origin: (rows, 1) or (1, columns) values (s_ii - margin)/r of the anchors.
            out: (rows, columns) buffer to overwrite, which may be y; None for a new tensor.
        """
        return y

    def omitted_constant(self, origin: Tensor) -> Tensor:
        """Return the constant that `exponent` omits from an anchor's l/tau; `origin` has shape (2, rows)."""
        return -origin

    def weight(self, y: Tensor, origin: Tensor, log_factor: Tensor, out: Tensor | None, spare: Tensor | None) -> Tensor:
        """Return the (rows, columns) values of exp(l/tau + log_factor) l'/power at y - origin.

        The arguments are those of `exponent`, the anchors' `log_factor`, and `spare`, which is None or a second buffer
        that is not y.
        """
        return bounded_exp_(torch.add(y, log_factor - origin, out=out))


class Hinge(PairLoss):
    """Hinge pair loss l(x) = max(x + margin, 0)^2 (TuneCLIP eq. 8); pairs with x < -margin have zero gradient."""

    is_identity = False
    power = 2.0

    def __init__(self, margin: float) -> None:
        super().__init__(divisor_offset=0)
        self.margin = margin

    def value_(self, x: Tensor) -> Tensor:
        return x.add_(self.margin).clamp_(min=0).square_()

    def exponent(self, y: Tensor, origin: Tensor, out: Tensor | None) -> Tensor:
        return torch.sub(y, origin, out=out).clamp_(min=0).square_()

    def omitted_constant(self, origin: Tensor) -> Tensor:
        return torch.zeros_like(origin)

    def weight(self, y: Tensor, origin: Tensor, log_factor: Tensor, out: Tensor | None, spare: Tensor | None) -> Tensor:
        above = torch.sub(y, origin, out=spare).clamp_(min=0)
        exponent = torch.square(above, out=out).add_(log_factor)
        return bounded_exp_(exponent).mul_(above)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of similarities
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of similarities: some of this rank's rows, and some columns from the other modality."""

    row_modality: int  # IMAGE: rows are images and columns are texts; TEXT: vice versa
    rows: slice  # among this rank's rows
    columns: slice  # among the B rows of the batch
    local_columns: slice | None  # the columns among this rank's rows; None if other ranks have them

    @property
    def column_modality(self) -> int:
        """Modality of the columns: the one that is not `row_modality`."""
        return 1 - self.row_modality

    @property
    def local_anchors(self) -> list[tuple[tuple[int, slice], int]]:
        """This rank's anchors in the block: the rows and, if the columns are local, the columns.

        Each element is a pair: the anchors' index into a (2, local) tensor, and the block dimension of their partners.
        """
        anchors = [((self.row_modality, self.rows), 1)]
        if self.local_columns is not None:
            anchors.append(((self.column_modality, self.local_columns), 0))
        return anchors

    def view(self, buffer: Tensor) -> Tensor:
        """Return the start of a flat buffer, viewed in the shape of the block."""
        rows = self.rows.stop - self.rows.start
        columns = self.columns.stop - self.columns.start
        return buffer[: rows * columns].view(rows, columns)


class PairGrid:
    """Features of a batch with B >= 2 valid rows, and the blocks of the similarities that one rank computes.

    A rank needs the similarities of its local images with all texts, S = E1 E2^T, and of its local texts with all
    images, T = E2 E1^T. Where both the anchor and the partner are local, T is the transpose of S, so one matrix product
    gives the blocks of both.

    Attributes:
        local: slice of this rank's rows among the B rows.
        size: number of valid rows, B.
        positive: (B,) similarities s_ii of the positive pairs.
        has_reference: whether the similarities of a reference model are subtracted, which gives values in [-2, 2].
        caches_similarities: whether the similarities of all blocks are cached, because they fit in `budget`.
        compiles: whether a block's elementwise operations are compiled.
    """

    def __init__(self, batch: GatheredFeatures, columns: int | None, budget: float) -> None:
        """Plan the blocks.

        Args:
            batch: the gathered features.
            columns: largest number of columns of a block; by default, chosen for the device and the number of rows.
            budget: largest size in bytes of the similarities of all blocks for which they are cached.
        """
        self.local = batch.local
        self.size = batch.size
        self.positive = batch.positive
        self.has_reference = batch.has_reference_columns
        self._features = (batch.image, batch.text)
        self._local_features = (batch.image[batch.local], batch.text[batch.local])
        self._local_size = batch.local.stop - batch.local.start
        self._width = batch.width
        self._dtype = batch.comm_dtype

        device_type = batch.image.device.type
        itemsize = batch.image.element_size()
        local_pairs = self._local_size**2
        all_pairs = self._local_size * self.size
        self.caches_similarities = (2 * all_pairs - local_pairs) * itemsize <= budget
        self.compiles = compiles(device_type, all_pairs)

        # Blocks of many rows are about square; blocks of few rows are wider.
        elements = block_bytes(device_type) // itemsize
        square = 1 << (elements.bit_length() - 1) // 2
        if self.compiles:
            square *= 2  # code compiled for a square block would work for square blocks only
        if not columns:
            columns = max(square, elements // max(1, self._local_size))
        self._block_columns = min(columns, self.size)
        self._block_rows = max(1, elements // self._block_columns)

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks: local columns once (image rows), other ranks' columns twice (image rows and text rows)."""
        start = self.local.start
        stop = self.local.stop
        all_rows = slices(0, self._local_size, self._block_rows)
        for columns in slices(start, stop, self._block_columns):
            local_columns = slice(columns.start - start, columns.stop - start)
            for rows in all_rows:
                yield Block(row_modality=IMAGE, rows=rows, columns=columns, local_columns=local_columns)
        for columns in slices(0, start, self._block_columns) + slices(stop, self.size, self._block_columns):
            for modality in (IMAGE, TEXT):
                for rows in all_rows:
                    yield Block(row_modality=modality, rows=rows, columns=columns, local_columns=None)

    def similarity(self, block: Block) -> Tensor:
        """Return the (rows, columns) similarities of a block."""
        rows = self._local_features[block.row_modality][block.rows]
        columns = self._features[block.column_modality][block.columns]
        return pair_products(rows, columns, self._dtype)

    def select_anchors(self, values: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Select a block's anchors from (..., 2, B) `values`, as (..., rows, 1) and (..., 1, columns) tensors."""
        rows = values[..., block.row_modality, self.local][..., block.rows].unsqueeze(-1)
        columns = values[..., block.column_modality, block.columns].unsqueeze(-2)
        if self.compiles:  # torch.compile would recompile for a view at a different offset in the same memory
            return rows.clone(), columns.clone()
        return rows, columns

    def positive_pairs(self, x: Tensor, block: Block) -> Tensor:
        """Return the block's positive pairs as a view of x, which has the block's shape; the view may be empty."""
        if block.local_columns is None:
            return x.new_empty(0)
        return x.diagonal(offset=block.rows.start - block.local_columns.start)

    def per_local_anchor(self, value: float) -> Tensor:
        """Return a (2, local) tensor with `value` for each local anchor."""
        return self.positive.new_full((2, self._local_size), value)

    def buffers(self, count: int) -> list[Tensor]:
        """Return flat buffers of a block's size, to be reused for every block so that they stay in a CPU's cache."""
        size = min(self._block_rows, self._local_size) * self._block_columns
        return [self.positive.new_empty(size) for _ in range(count)]

    def gradient(self, derivative: Callable[[Block], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the feature gradient of a function of the similarities: (local, d) for images and for texts.

        With a reference, the gradient's columns for the reference's features follow; `trained_columns` drops them.
        `derivative` returns the (rows, columns) derivative of the function with respect to a block's similarities.
        """
        image, text = self._features
        image_grad = image.new_zeros((self._local_size, image.shape[1]))
        text_grad = text.new_zeros((self._local_size, text.shape[1]))
        grads = (image_grad, text_grad)
        # docs: gradient
        for block in self.blocks():
            grad_similarity = derivative(block)
            with products_exact_for(self._dtype):
                columns = self._features[block.column_modality][block.columns]
                grads[block.row_modality][block.rows].addmm_(grad_similarity, columns)
                if block.local_columns is not None:
                    rows = self._local_features[block.row_modality][block.rows]
                    grads[block.column_modality][block.local_columns].addmm_(grad_similarity.T, rows)
            # docs: end
            del grad_similarity  # frees the memory for the next block
        return grads

    def weighted_sum(self, grads: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sum of derivative times similarity over local images and all texts, from the result of `gradient`.

        Summed over ranks, the result includes each pair once.
        """
        return (self._local_features[IMAGE] * grads[IMAGE]).sum()

    def add_positives(self, grads: tuple[Tensor, Tensor], grad_positive: Tensor) -> None:
        """Add the gradients of a function of the positives s_ii, given its (local,) derivative `grad_positive`."""
        grads[IMAGE].addcmul_(grad_positive.unsqueeze(1), self._local_features[TEXT])
        grads[TEXT].addcmul_(grad_positive.unsqueeze(1), self._local_features[IMAGE])

    def trained_columns(self, grads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the (local, d) gradients of the trained features, without the columns of the reference's features."""
        return grads[IMAGE][:, : self._width], grads[TEXT][:, : self._width]


# ---------------------------------------------------------------------------------------------------------------------
# The two passes
# ---------------------------------------------------------------------------------------------------------------------


class PairGradient(NamedTuple):
    """Gradient of L, and the statistic that the temperature update needs.

    `weighted_logits`, of shape (2, local), is W_i/(B-1) sum_j exp(t_ij) t_ij with t_ij = l(s_ij - s_ii)/tau. If all
    anchors share tau, it is this rank's 0-dim contribution to the sum over all 2B anchors, which equals -B tau dL/dtau.
    """

    image: Tensor  # (local, d)
    text: Tensor  # (local, d)
    weighted_logits: Tensor


def pair_similarities(grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> PairSimilarities | FactoredSimilarities:
    """Return a batch's similarities, over which the caller makes two passes: `log_mean_exp`, then `gradient`.

    If the similarities fit in the grid's budget, they are cached for the second pass; otherwise, they are recomputed.

    Args:
        grid, pair_loss: the pairs and the pair loss l.
        tau: the temperature, 0-dim if all anchors share it, else (2, B).
    """
    can_factor = pair_loss.is_identity and tau.ndim == 0 and not grid.has_reference
    if can_factor and factors_exponentials(tau.device.type):
        return FactoredSimilarities(grid, pair_loss, tau)
    return PairSimilarities(grid, pair_loss, tau)


class PairSimilarities:
    """Similarities of a batch for any pair loss and temperatures.

    Each pair costs one exponential for each of its two anchors. Each anchor's sum is computed relative to the largest
    term, and a pair's weight is one exponential of a sum of logarithms, so that no significant term underflows or
    overflows. On a GPU, the host never waits for the device.
    """

    def __init__(self, grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> None:
        """Prepare the two passes; `tau` is 0-dim if all anchors share it, else (2, B)."""
        self._grid = grid
        self._pair_loss = pair_loss
        self._tau = tau
        self._shares_tau = tau.ndim == 0
        self._divisor = grid.size - pair_loss.divisor_offset  # B - 1, or B
        self._cached: deque[Tensor] = deque()  # the blocks of the first pass, for the second pass
        self._buffers: list[Tensor] = []

    @cached_property
    def _tau_root(self) -> Tensor:
        """(2, B) r = tau^(1/power)."""
        return self._tau.pow(1 / self._pair_loss.power).expand(2, self._grid.size)

    @cached_property
    def _origin(self) -> Tensor:
        """(2, B) o = (s_ii - margin)/r."""
        return (self._grid.positive - self._pair_loss.margin) / self._tau_root

    def log_mean_exp(self) -> Tensor:
        """Return the (2, local) log g of this rank's anchors."""
        grid = self._grid
        log_sums = compiled(_log_sums) if grid.compiles else _log_sums
        anchor_values = torch.stack([self._row_numbers(), self._tau_root, self._origin])
        total = grid.per_local_anchor(-math.inf)
        for block in grid.blocks():
            similarity = self._similarity(block)
            if grid.caches_similarities:
                self._cached.append(similarity)
            anchors = self._block_anchors(anchor_values, block)
            block_sums = log_sums(self._pair_loss, similarity, anchors, self._block_buffers(block, 1))
            for (index, _), log_sum in zip(block.local_anchors, block_sums, strict=True):
                torch.logaddexp(total[index], log_sum, out=total[index])
        self._buffers.clear()
        log_sum = total + self._pair_loss.omitted_constant(self._origin[:, grid.local])
        return log_sum - math.log(self._divisor)

    def gradient(self, log_weight: Tensor) -> PairGradient:
        """Return the gradient of L for the (2, B) weights W = exp(log_weight)."""
        grid = self._grid
        pair_loss = self._pair_loss
        weights = compiled(_weights) if grid.compiles else _weights
        # w_ij = exp(l/tau + log_factor) l'/power
        log_factor = log_weight - math.log(self._divisor * grid.size) + (pair_loss.power / self._tau_root).log()
        anchor_values = torch.stack([self._row_numbers(), self._tau_root, self._origin, log_factor])
        weight_sum = grid.per_local_anchor(0.0)  # sum_j w_ij
        product_sum = grid.per_local_anchor(0.0)  # sum_j w_ij s_ij, unless all anchors share tau

        def derivative(block: Block) -> Tensor:
            similarity = self._cached.popleft() if self._cached else self._similarity(block)
            anchors = self._block_anchors(anchor_values, block)
            buffers = self._block_buffers(block, 3)
            block_derivative, sums = weights(pair_loss, similarity, anchors, buffers, not self._shares_tau)
            for (index, _), (block_weight_sum, block_product_sum) in zip(block.local_anchors, sums, strict=True):
                weight_sum[index].add_(block_weight_sum)
                if block_product_sum is not None:
                    product_sum[index].add_(block_product_sum)
            return block_derivative

        grads = grid.gradient(derivative)
        # sum_j w_ij (x + m) = sum_j w_ij s_ij + (m - s_ii) sum_j w_ij
        constant_sum = (pair_loss.margin - grid.positive[grid.local]) * weight_sum
        if self._shares_tau:
            local_product_sum = grid.weighted_sum(grads)
            logit_sum = local_product_sum + constant_sum.sum()
        else:
            logit_sum = product_sum + constant_sum
        grid.add_positives(grads, -weight_sum.sum(dim=0))
        weighted_logits = logit_sum / pair_loss.power * grid.size
        image, text = grid.trained_columns(grads)
        return PairGradient(image=image, text=text, weighted_logits=weighted_logits)

    @property
    def _divides_at_once(self) -> bool:
        """Whether similarities are divided by the shared r as soon as they are computed."""
        return self._shares_tau and not self._grid.compiles

    def _similarity(self, block: Block) -> Tensor:
        similarity = self._grid.similarity(block)
        if self._divides_at_once:
            similarity.div_(self._tau_root[0, 0])
        return similarity

    def _row_numbers(self) -> Tensor:
        """Return row numbers in the dtype of the anchors' other values; they are exact up to 2^24 rows in float32."""
        return torch.arange(self._grid.size, device=self._tau.device).to(self._tau.dtype).expand(2, -1)

    def _block_anchors(self, anchor_values: Tensor, block: Block) -> BlockAnchors:
        """Return the anchors of a block with their values from `anchor_values`, a (values, 2, B) tensor."""
        rows, columns = self._grid.select_anchors(anchor_values, block)
        positives_offset = None
        if block.local_columns is not None and not self._grid.compiles:
            positives_offset = block.rows.start - block.local_columns.start
        return BlockAnchors(
            rows=rows,
            columns=columns,
            columns_are_local=block.local_columns is not None,
            positives_offset=positives_offset,
            is_divided=self._divides_at_once,
        )

    def _block_buffers(self, block: Block, count: int) -> Buffers:
        """Return block-shaped buffers, which all blocks of a pass share, or Nones if operations are compiled."""
        if self._grid.compiles:
            return [None] * count
        if not self._buffers:
            self._buffers.extend(self._grid.buffers(count))
        return [block.view(buffer) for buffer in self._buffers]


# ---------------------------------------------------------------------------------------------------------------------
# The arithmetic of a block, which is compiled for large batches on a GPU
# ---------------------------------------------------------------------------------------------------------------------

Buffers = Sequence[Tensor | None]  # outputs of operations; None allocates a new tensor, which the compiler avoids

# an anchor's values in `BlockAnchors`
_ROW_NUMBER = 0
_TAU_ROOT = 1  # r = tau^(1/power)
_ORIGIN = 2  # see `PairLoss.exponent`
_LOG_FACTOR = 3  # see `PairLoss.weight`; only in the second pass


@dataclass(frozen=True, kw_only=True)
class BlockAnchors:
    """The anchors of a block, in the form that the functions below take."""

    rows: Tensor  # (values, rows, 1)
    columns: Tensor  # (values, 1, columns)
    columns_are_local: bool  # whether the columns, like the rows, are this rank's anchors
    positives_offset: int | None  # diagonal of the positives; None if there are no positives or if compiled
    is_divided: bool  # whether similarities are already divided by r

    def divide(self, similarity: Tensor, tau_root: Tensor, out: Tensor | None) -> Tensor:
        """Return similarities divided by r, stored in `out`, or the input if it is already divided."""
        if self.is_divided:
            return similarity
        return torch.div(similarity, tau_root, out=out)

    def fill_positives(self, x: Tensor, value: float) -> Tensor:
        """Return x with the positives replaced by `value`; x is overwritten if the positives' diagonal is known."""
        if self.positives_offset is not None:
            x.diagonal(self.positives_offset).fill_(value)
            return x
        if self.columns_are_local:
            return x.masked_fill(self.rows[_ROW_NUMBER] == self.columns[_ROW_NUMBER], value)
        return x


def _log_sums(pair_loss: PairLoss, similarity: Tensor, block: BlockAnchors, buffers: Buffers) -> list[Tensor]:
    """Return the logsumexp over each local anchor's negatives in a block: for the rows, then for any local columns.

    `buffers` contains one tensor in the shape of the block, which is overwritten, or None.
    """
    (out,) = buffers

    def log_sum(anchors: Tensor, partner_dim: int) -> Tensor:
        y = block.divide(similarity, anchors[_TAU_ROOT], out)
        exponent = pair_loss.exponent(y, anchors[_ORIGIN], out)
        # this may overwrite the positives of `similarity` itself, but the second pass ignores their values too
        return log_sum_exp(block.fill_positives(exponent, -math.inf), partner_dim, out)

    if block.columns_are_local:
        return [log_sum(block.rows, 1), log_sum(block.columns, 0)]
    return [log_sum(block.rows, 1)]


def _weights(
    pair_loss: PairLoss, similarity: Tensor, block: BlockAnchors, buffers: Buffers, with_products: bool
) -> tuple[Tensor, list[tuple[Tensor, Tensor | None]]]:
    """Return a block's derivative of L with respect to the similarities, and sums over the local anchors' negatives.

    The sums are over the weights w_ij and, if `with_products`, over w_ij s_ij, for the rows and then for any local
    columns. `buffers` contains three tensors, which are overwritten, or three Nones.
    """
    row_buffer, column_buffer, spare = buffers

    def weight(anchors: Tensor, out: Tensor | None) -> Tensor:
        y = block.divide(similarity, anchors[_TAU_ROOT], out)
        with_positives = pair_loss.weight(y, anchors[_ORIGIN], anchors[_LOG_FACTOR], out, spare)
        return block.fill_positives(with_positives, 0.0)

    def sums(weight_of_anchors: Tensor, partner_dim: int) -> tuple[Tensor, Tensor | None]:
        weight_sum = weight_of_anchors.sum(partner_dim)
        if not with_products:
            return weight_sum, None
        return weight_sum, torch.mul(weight_of_anchors, similarity, out=spare).sum(partner_dim)

    row_weight = weight(block.rows, row_buffer)
    sums_of_anchors = [sums(row_weight, 1)]
    column_weight = weight(block.columns, column_buffer)
    if block.columns_are_local:
        sums_of_anchors.append(sums(column_weight, 0))
    return row_weight.add_(column_weight), sums_of_anchors


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with torch.compile for tensors of any size; if that fails, call the function directly.

    The function must leave its arguments unchanged. If it cannot be compiled, others passed to this function still are.
    """
    return Compiler("the loss runs uncompiled and slower").compiled(function, dynamic=True)


# ---------------------------------------------------------------------------------------------------------------------
# On CPUs only: one exponential per pair
# ---------------------------------------------------------------------------------------------------------------------


class FactoredSimilarities:
    """Similarities with l(x) = x and one temperature: exp((s_ij - s_ii)/tau) = exp(s_ij/tau - c) exp(c - s_ii/tau).

    It is not used with a reference model, because it requires similarities in [-1, 1]. The first factor is the same for
    both anchors of a pair and in both passes, so a pair costs one exponential. To keep this factor representable, c
    lowers the largest possible exponent, 1/tau, to `_limit`. If significant terms would still underflow, or an
    anchor's factor is not representable, `PairSimilarities` takes over; the host reads values to decide this.
    """

    def __init__(self, grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> None:
        self._grid = grid
        self._tau = tau
        self._exact = PairSimilarities(grid, pair_loss, tau)
        self._divisor = grid.size - pair_loss.divisor_offset
        # leaves room for a sum of B terms and for the product with the anchor's factor
        self._limit = 0.8 * math.log(torch.finfo(tau.dtype).max)
        self._tiny = torch.finfo(tau.dtype).tiny
        self._shift = max(1 / float(tau) - self._limit, 0.0)  # c
        self._log_anchor_factor = self._shift - grid.positive / tau  # (B,)
        self._sums = grid.per_local_anchor(0.0)  # of the first factor over each local anchor's negatives
        self._is_representable = True  # whether the first pass found no underflow
        self._exponentials: deque[Tensor] = deque()  # the blocks of the first pass, for the second pass

    def log_mean_exp(self) -> Tensor:
        """Return the (2, local) log g of this rank's anchors."""
        grid = self._grid
        for block in grid.blocks():
            exponential = self._exponential(block)
            if grid.caches_similarities:
                self._exponentials.append(exponential)
            for index, partner_dim in block.local_anchors:
                self._sums[index].add_(exponential.sum(partner_dim))
        log_sums = self._sums.log()
        self._is_representable = bool((log_sums > -self._limit).all())
        if not self._is_representable:
            self._exponentials.clear()
            return self._exact.log_mean_exp()
        return log_sums + self._log_anchor_factor[grid.local] - math.log(self._divisor)

    def gradient(self, log_weight: Tensor) -> PairGradient:
        """Return the gradient of L for the (2, B) weights W = exp(log_weight)."""
        if not self._is_representable:
            return self._exact.gradient(log_weight)
        grid = self._grid
        log_factor = log_weight - math.log(self._divisor * grid.size) + self._log_anchor_factor
        if not float(log_factor.abs().max()) < 1.1 * self._limit:  # also if the maximum is NaN
            self._exponentials.clear()
            return self._exact.gradient(log_weight)
        factor = log_factor.exp().div_(self._tau)  # (2, B)
        (buffer,) = grid.buffers(1)

        def derivative(block: Block) -> Tensor:
            exponential = self._exponentials.popleft() if self._exponentials else self._exponential(block)
            row_factor, column_factor = grid.select_anchors(factor, block)
            product = torch.add(row_factor, column_factor, out=block.view(buffer)).mul_(exponential)
            return torch.threshold_(product, self._tiny, 0.0)

        grads = grid.gradient(derivative)
        weight_sum = factor[:, grid.local] * self._sums
        logit_sum = grid.weighted_sum(grads) - (grid.positive[grid.local] * weight_sum).sum()
        grid.add_positives(grads, -weight_sum.sum(dim=0))
        return PairGradient(image=grads[IMAGE], text=grads[TEXT], weighted_logits=logit_sum * grid.size)

    def _exponential(self, block: Block) -> Tensor:
        """Return exp(s/tau - c) of a block, with zeros for the positives."""
        exponent = self._grid.similarity(block).div_(self._tau)
        if self._shift:
            exponent.sub_(self._shift)
            # subnormal results become zero, which, unlike exp of `lowest_exponent`, adds nothing to a vanishing sum
            torch.threshold_(exponent, math.log(self._tiny), 2 * math.log(self._tiny))
        exponential = exp_(exponent)
        self._grid.positive_pairs(exponential, block).fill_(0.0)
        return exponential
