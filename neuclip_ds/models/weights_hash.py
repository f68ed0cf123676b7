"""Hash of a module's weights, to recognize the model that computed features or scores, or from which a run started."""

import hashlib

import torch
from torch import Tensor, nn

_ADAPTER = ".lora_"  # in the names of peft's tensors


def weights_hash(module: nn.Module, with_adapters: bool = False) -> str:
    """Return a hash (32 hex digits) of the floating-point tensors in a module's state dict, regardless of their names.

    Names and their order differ between libraries that load the same weights. The hash of a timm model includes its
    architecture, because some architectures differ only in their padding, such as efficientnet_lite0 and
    tf_efficientnet_lite0. LoRA adapters are included only if `with_adapters` is true. Call this before the weights are
    cast or partitioned.
    """
    weights = [value for name, value in module.state_dict().items() if with_adapters or _ADAPTER not in name]
    hashes = sorted(_hash(value) for value in weights if value.is_floating_point())
    architecture = getattr(module, "pretrained_cfg", {}).get("architecture", "")  # of timm
    return hashlib.sha256("".join([architecture, *hashes]).encode()).hexdigest()[:32]


def _hash(value: Tensor) -> str:
    result = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    result.update(data.numpy().data)
    return result.hexdigest()
