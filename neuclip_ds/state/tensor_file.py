"""Write safetensors files in chunks, so that saving a table of gigabytes needs no second copy in memory.

The format (https://huggingface.co/docs/safetensors): 8 bytes of length, little-endian; a JSON header with dtype, shape
and byte range of each tensor; the tensors' bytes. The safetensors library reads the files.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
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
    """Save tensors of any device with at most one chunk of 64 MB in extra memory."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            for chunk in row_chunks(tensor.detach()):
                file.write(chunk.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def row_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return views of a tensor's rows in chunks of about 64 MB at most."""
    if tensor.numel() == 0 or tensor.ndim == 0:
        return (tensor,)
    row = tensor[0].numel() * tensor.element_size()
    return tensor.split(max(1, CHUNK_BYTES // row))
