"""Writes safetensors files chunk by chunk: a table of gigabytes needs no second copy in memory to be saved.

The format (https://huggingface.co/docs/safetensors): 8 bytes of length, little-endian; a JSON header with dtype, shape
and byte range of each tensor; the tensors' bytes. Reading is the library's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # bytes
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors from wherever they are; memory used: one chunk of 64 MB."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            for chunk in row_chunks(tensor.detach()):
                file.write(chunk.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def row_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of a tensor's rows, each of about 64 MB at most."""
    if tensor.numel() == 0 or tensor.ndim == 0:
        return (tensor,)
    row = tensor[0].numel() * tensor.element_size()
    return tensor.split(max(1, CHUNK_BYTES // row))
