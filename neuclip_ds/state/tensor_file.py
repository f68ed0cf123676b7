"""Write state files: tensors in the safetensors format, or bytes.

A safetensors file (https://huggingface.co/docs/safetensors) consists of the header's length in 8 little-endian bytes, a
JSON header with the dtype, shape and byte range of each tensor, and the tensors' bytes. The safetensors library reads
the files; this module writes them in chunks, so that saving a large table does not need a second copy in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.files import Checksum, ChecksumWriter

CHUNK_BYTES = 64 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile(NamedTuple):
    """A safetensors file to be written; `tensors` maps keys to tensors on any device."""

    name: str  # relative to the folder
    tensors: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        """Size in bytes, without the header."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def write(self, folder: Path) -> Checksum:
        """Write the file in chunks, using at most about 64 MB of extra memory, and return the file's checksum."""
        header: dict[str, object] = {}
        start = 0
        for name, tensor in self.tensors.items():
            stop = start + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes

        with (folder / self.name).open("wb") as file:
            writer = ChecksumWriter(file)
            writer.write(len(text).to_bytes(8, "little"))
            writer.write(text)
            for tensor in self.tensors.values():
                for chunk in row_chunks(tensor.detach()):
                    chunk_bytes = chunk.cpu().contiguous().flatten().view(torch.uint8)
                    writer.write(chunk_bytes.numpy().data)
        return writer.checksum


class BytesFile(NamedTuple):
    """A small file to be written from bytes in memory."""

    name: str  # relative to the folder
    content: bytes

    @property
    def bytes(self) -> int:
        return len(self.content)

    def write(self, folder: Path) -> Checksum:
        """Write the file and return its checksum."""
        with (folder / self.name).open("wb") as file:
            writer = ChecksumWriter(file)
            writer.write(self.content)
        return writer.checksum


StateFile = TensorFile | BytesFile


def row_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor by rows into views of at most about 64 MB; a larger row is a view by itself."""
    if tensor.numel() == 0 or tensor.ndim == 0:
        return (tensor,)
    row_bytes = tensor[0].numel() * tensor.element_size()
    return tensor.split(max(1, CHUNK_BYTES // row_bytes))
