"""Files of a state before they are written: tensors in the safetensors format, or bytes.

The format (https://huggingface.co/docs/safetensors): 8 bytes of length, little-endian; a JSON header with dtype, shape
and byte range of each tensor; the tensors' bytes. The safetensors library reads the files. They are written in chunks,
so that saving a table of gigabytes needs no second copy in memory.
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
    """A safetensors file of a folder: tensors of any device by key."""

    name: str  # relative to the folder
    tensors: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        """Size without the header."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def write(self, folder: Path) -> Checksum:
        """Write the file with at most one chunk of 64 MB in extra memory, and return its checksum."""
        header: dict[str, object] = {}
        end = 0
        for name, tensor in self.tensors.items():
            start, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
        with (folder / self.name).open("wb") as file:
            writer = ChecksumWriter(file)
            writer.write(len(text).to_bytes(8, "little"))
            writer.write(text)
            for tensor in self.tensors.values():
                for chunk in row_chunks(tensor.detach()):
                    writer.write(chunk.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return writer.checksum


class BytesFile(NamedTuple):
    """A small file of a folder by its content."""

    name: str  # relative to the folder
    content: bytes

    @property
    def bytes(self) -> int:
        return len(self.content)

    def write(self, folder: Path) -> Checksum:
        """Write the file."""
        with (folder / self.name).open("wb") as file:
            writer = ChecksumWriter(file)
            writer.write(self.content)
        return writer.checksum


StateFile = TensorFile | BytesFile


def row_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return views of a tensor's rows in chunks of about 64 MB at most."""
    if tensor.numel() == 0 or tensor.ndim == 0:
        return (tensor,)
    row = tensor[0].numel() * tensor.element_size()
    return tensor.split(max(1, CHUNK_BYTES // row))
