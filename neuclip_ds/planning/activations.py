"""Count the memory that the towers' forward and backward passes need, without allocating it or using a device.

The model runs on tensors that have shapes but no data (torch's FakeTensorMode), so that views, in-place operations and
recomputation under activation checkpointing are accounted for. The kernels are torch's CPU kernels, whose flash
attention stores O(T) values per head for T tokens, as on a GPU. Memory allocated inside a kernel is not counted.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # described in torch's docs, but without a public name
from torch.utils._python_dispatch import TorchDispatchMode  # as above
from torch.utils._pytree import tree_leaves  # as above

from neuclip_ds.data.stored_towers import IMAGE, TEXT
from neuclip_ds.models.towers import DualEncoder


class Activations(NamedTuple):
    """Peak bytes of one micro-batch's forward and backward passes, excluding weights and inputs."""

    alone: int
    with_gradients: int  # including weight gradients, each from the moment when the backward pass computes it


def count_activations(
    model: DualEncoder,
    rows: int,
    image_size: int,
    context_length: int,
    dtype: torch.dtype,
    trunk_widths: Mapping[str, int] = {},
) -> Activations:
    """Count the activations of a model on the meta device, for captions that fill the context.

    Padded captions are counted; packed captions that fill the context need no more. The model is unusable afterward.
    The trunks in `trunk_widths` (`image_features`, `text_features`) do not run: their outputs of these widths are
    stored.
    """
    model = model.to(dtype).train()
    model.text.packed = False
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        image = torch.empty(rows, 3, image_size, image_size, dtype=torch.uint8)
        if IMAGE in trunk_widths:
            image = torch.empty(rows, trunk_widths[IMAGE])
        tokens = torch.empty(rows, context_length, dtype=torch.int64)
        if TEXT in trunk_widths:
            tokens = torch.empty(rows, trunk_widths[TEXT])
        live = LiveBytes()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(live.take_gradient)
        with live:
            features = model(image, tokens)
            torch.stack([part.sum() for part in features]).sum().backward()
    return Activations(live.peak, live.peak_with_gradients)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate on one type of device, until the storages are freed.

    Attributes:
        now: bytes of the storages that exist now.
        peak: maximum of `now`.
        peak_with_gradients: maximum of the sum of `now` and the bytes of gradients that `take_gradient` has freed.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self._device_type = device_type
        self.now = 0
        self.peak = 0
        self.peak_with_gradients = 0
        self._gradients = 0  # bytes of the gradients that `take_gradient` has freed
        self._counted_storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._counted_storages.add(leaf.untyped_storage())  # weights and inputs, allocated elsewhere
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            is_here = isinstance(leaf, Tensor) and leaf.device.type == self._device_type
            if is_here and leaf.untyped_storage() not in self._counted_storages:
                self._count(leaf.untyped_storage())
        return result

    def take_gradient(self, parameter: Tensor) -> None:
        """Free a parameter's gradient and count its bytes separately from then on."""
        assert parameter.grad is not None
        self._gradients += parameter.grad.nbytes
        parameter.grad = None

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._counted_storages.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self.peak_with_gradients = max(self.peak_with_gradients, self.now + self._gradients)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size
