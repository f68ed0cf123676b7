"""Join a loss that has its gradient in closed form to autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def with_gradients(loss: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return `loss` as a scalar whose backward pass gives these gradients to `inputs`.

    Args:
        loss: 0-dim.
        inputs: tensors of any floating dtype; those that require no gradient get none.
        gradients: of the loss, shaped like the inputs; the product with the incoming gradient is formed in their own
            dtype, and returned in that of the input.
    """
    result: Tensor = _WithGradients.apply(loss, len(inputs), *inputs, *gradients)
    return result


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.dtypes = [x.dtype for x in tensors[:count]]
        ctx.save_for_backward(*tensors[count:])
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        scaled = [(g * incoming[0].to(g.dtype)).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (None, None, *scaled, *[None] * len(gradients))
