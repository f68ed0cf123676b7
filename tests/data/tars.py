"""Write and load small shards for the tests of data loading."""

import io
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.dataset import Batch, PairDataset
from neuclip_ds.data.images import ImageTransform
from neuclip_ds.data.loader import Jobs, Loader, LoaderOptions, eval_jobs, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.shards import resolve_shards

_NOBODY = 65534  # ID of the user `nobody`, who has no rights


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def jpeg(seed: int, width: int = 40, height: int = 30) -> bytes:
    """Return a smooth random image as JPEG bytes."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=90)
    return out.getvalue()


def write_pairs(folder: Path, sizes: Iterable[int], replace: dict[int, dict[str, bytes]] | None = None) -> Path:
    """Write a shard for each number of pairs in `sizes`, and return the folder.

    `replace` maps the global index of a sample to its members by extension.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = 0
    for shard, size in enumerate(sizes):
        members: list[tuple[str, bytes]] = []
        for _ in range(size):
            pair = {"jpg": jpeg(index), "txt": f"caption {index}".encode(), "json": b"{}"}
            pair = (replace or {}).get(index, pair)
            members += [(f"{index:06d}.{extension}", data) for extension, data in pair.items()]
            index += 1
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a folder's shards, without sample tables."""
    return build_manifest(resolve_shards(str(folder)), processes=1)


def assert_same(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for field in ("image", "tokens", "index", "valid"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
        assert ours.bad == theirs.bad


def tokenize(captions: list[str]) -> torch.Tensor:
    """Return each caption's code points, truncated or padded to 12."""
    rows = [[ord(letter) for letter in caption[:12].ljust(12, "\0")] for caption in captions]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(captions), 12)


def load_training(
    manifest: Manifest,
    order: GlobalOrder,
    transform: ImageTransform,
    options: LoaderOptions,
    steps: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    epoch: int = 0,
    step: int = 0,
    parts: int = 1,
) -> Iterator[Batch]:
    """Return an iterator over a rank's batches, loaded as in training."""
    jobs = train_jobs(order, rank, world_size, epoch, step, steps, parts)
    return _load(manifest, transform, options, order.seed, jobs)


def load_evaluation(
    manifest: Manifest,
    transform: ImageTransform,
    options: LoaderOptions,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """Return an iterator over a rank's batches, loaded as in evaluation."""
    return _load(manifest, transform, options, 0, eval_jobs(manifest, rank, world_size, batch_size))


def _load(
    manifest: Manifest, transform: ImageTransform, options: LoaderOptions, seed: int, jobs: Jobs
) -> Iterator[Batch]:
    pairs = PairDataset(manifest, transform, tokenize, seed, options.captions, options.cache)
    with closing(Loader(options, {"pairs": pairs})) as loader:
        yield from loader.batches("pairs", jobs)


@contextmanager
def unprivileged_folder() -> Iterator[Path]:
    """Yield a folder in which this process has no more rights than an ordinary user, even if it runs as root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        user = os.geteuid()
        if user == 0:
            os.seteuid(_NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(user)
