"""Write samples in the format of MosaicML streaming (MDS), if the library is installed."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import RawSample, TarReader

_OVERHEAD, _HEADER = 16, 1 << 12  # approximate bytes that MDS adds to a sample and to a shard


def has_mosaic() -> bool:
    """Return whether MosaicML streaming is installed; if not, print how to install it."""
    if importlib.util.find_spec("streaming") is not None:
        return True
    print("MosaicML streaming is not installed, so it is omitted; to install it, run make peers.")
    return False


def write_mds(manifest: Manifest, folder: Path) -> None:
    """Write the image and the .txt member of every sample in MDS format, in about as many shards as in the manifest."""
    from streaming import MDSWriter

    total = sum(payload_bytes(sample) + _OVERHEAD for sample in samples_of(manifest))
    limit = total // manifest.n_shards + _HEADER
    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "txt": "str"}, size_limit=limit) as out:
        for sample in samples_of(manifest):
            out.write({"jpg": sample.image, "txt": sample.texts["txt"].decode()})


def samples_of(manifest: Manifest) -> Iterator[RawSample]:
    reader = TarReader(manifest)
    return map(reader.read, range(manifest.n))


def payload_bytes(sample: RawSample) -> int:
    """Return the number of bytes in a sample's image and captions."""
    return len(sample.image or b"") + sum(map(len, sample.texts.values()))
