"""Files with the stored features of one shard each, which readers map into memory.

    part-00000012.safetensors      features of the usable samples in shard 12

    index           int64 (n,)             the samples' global indices, ascending
    image           dtype (n, crops, d)    features of each view of the image; absent if no images were encoded
    text            dtype (m, d)           features of the captions, sample after sample; absent if none were encoded
    text_start      int64 (n + 1,)         the captions of sample i are rows text_start[i] ... text_start[i + 1] - 1
    first_caption   int32 (n,)             number of the sample's first encoded caption among all of its captions

The file's metadata contains the job's hash (`job_hash`), the shard's number and the shard's number of samples.
"""

import hashlib
import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from neuclip_ds.files import atomic_write, safetensors_as_os_error

EMBEDDING = "embedding.json"  # file that marks a folder of features, and describes the job that wrote them
PART_SUFFIX = ".safetensors"
FORMAT = 2  # version of the part files
LAYOUT = "layout"  # field of EMBEDDING: `layout_of_shards` of the data; null, or absent in older folders, if not known
PART_BYTES = "part_bytes"  # field of EMBEDDING: the size of each part, in the order of the shards
TRUNK_OUTPUTS = "trunk_outputs"  # field of EMBEDDING: outputs of the trunks, whose last digits depend on the machine
_NOT_OF_JOB = ("shards", "data", LAYOUT, PART_BYTES, TRUNK_OUTPUTS)  # fields of EMBEDDING that may change during a job
_METADATA = "part"  # the name under which a file's header stores the fields of the part
_HEADER_LENGTH = struct.Struct("<Q")
_DTYPES = {"F16": np.float16, "F32": np.float32, "I64": np.int64, "I32": np.int32}
_TENSORS = ("index", "image", "text", "text_start", "first_caption")


@dataclass(frozen=True, kw_only=True)
class FeaturePart:
    """The features of n usable samples of a shard; `image` or the three arrays of captions may be absent."""

    job: str  # `job_hash` of the job that wrote the part
    shard: int  # number in the manifest
    samples: int  # samples of the shard, including unusable ones
    index: NDArray[np.int64]  # (n,)
    image: NDArray[np.floating] | None = None  # (n, crops, d)
    text: NDArray[np.floating] | None = None  # (m, d)
    text_start: NDArray[np.int64] | None = None  # (n + 1,)
    first_caption: NDArray[np.int32] | None = None  # (n,)


def part_name(shard: int) -> str:
    """Return the name of the file with a shard's features."""
    return f"part-{shard:08d}{PART_SUFFIX}"


def job_hash(embedding: Mapping[str, Any]) -> str:
    """Return a hash (32 hex digits) of the model and options in EMBEDDING; all parts of a job contain this hash."""
    of_job = {name: value for name, value in embedding.items() if name not in _NOT_OF_JOB}
    return hashlib.sha256(json.dumps(of_job, sort_keys=True).encode()).hexdigest()[:32]


def write_part(folder: Path, part: FeaturePart) -> None:
    """Write a part's file, which appears only when it is complete; raise OSError if that fails."""
    tensors = {}
    for name in _TENSORS:
        array = getattr(part, name)
        if array is not None:
            tensors[name] = np.ascontiguousarray(array)
    # all fields in one entry, because safetensors writes several entries in an arbitrary order
    metadata = {_METADATA: json.dumps({"job": part.job, "shard": part.shard, "samples": part.samples})}
    with atomic_write(folder / part_name(part.shard)) as temporary, safetensors_as_os_error():
        save_file(tensors, temporary, metadata)


def map_part(file: FileIO) -> FeaturePart:
    """Map a part's file into memory; the arrays stay readable after the file is closed or removed.

    Raises ValueError if the file is not a complete part, or OSError if it cannot be mapped.
    """
    view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        (header_length,) = _HEADER_LENGTH.unpack_from(view)
        begin = _HEADER_LENGTH.size + header_length
        header = json.loads(bytes(view[_HEADER_LENGTH.size : begin]))
        metadata = json.loads(header.pop("__metadata__")[_METADATA])
        arrays = {}
        for name, tensor in header.items():
            start, _ = tensor["data_offsets"]
            shape = tensor["shape"]
            flat = np.frombuffer(view, _DTYPES[tensor["dtype"]], math.prod(shape), begin + start)
            arrays[name] = flat.reshape(shape)
        return FeaturePart(job=metadata["job"], shard=metadata["shard"], samples=metadata["samples"], **arrays)
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is not a complete file of features ({type(error).__name__}: {error})") from error
