"""Write the features of a data set with a saved model, and search in them."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from neuclip_ds.checkpoint.saved_model import SavedModel, open_model
from neuclip_ds.config import DataConfig
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import check_shared, connected
from neuclip_ds.embedding.embed import Summary, embed
from neuclip_ds.embedding.nearest import FaissIndex, Match, nearest
from neuclip_ds.embedding.parts import IMAGE, TEXT, Parts
from neuclip_ds.embedding.rows import RowReader
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.recipe import validate
from neuclip_ds.training.data import loader_options, open_data

log = logging.getLogger(__name__)


class Embedding(NamedTuple):
    """Options of `neuclip-ds embed`, whose help explains them."""

    model: str
    shards: str
    out: Path
    ema: bool = False
    features: Sequence[str] = (IMAGE, TEXT)
    format: str = "parquet"
    dtype: str = "float16"
    batch_size: int = 256
    workers: int = 4
    precision: str = "float32"
    captions: Sequence[str] = ("txt",)
    uid_key: str = "uid"
    cache_dir: Path | None = None
    cache_gb: float = 100
    allow_commands: bool = False


def write_features(options: Embedding) -> Summary:
    """Write the features of a data set on all ranks of the launch; return what was done.

    Raises:
        UserError: the model, the data or the folder cannot be used.
    """
    names = ("workers", "captions", "cache_dir", "cache_gb", "allow_commands")
    chosen = {name: getattr(options, name) for name in names}
    data = validate({"data": {"train": options.shards, **chosen}}).data
    task = "\n".join(f"{name}: {value}" for name, value in options._asdict().items())
    with explain_disk(options.out, "choose another --out"):
        options.out.mkdir(parents=True, exist_ok=True)
    with connected(task, options.out, data.max_outage) as communicator:
        check_shared(options.out, communicator)
        return _write_features(open_model(options.model, communicator, options.ema), options, data, communicator)


def _write_features(saved: SavedModel, options: Embedding, data: DataConfig, communicator: Communicator) -> Summary:
    manifest = open_data(options.shards, data, communicator, options.out)
    encode = encoder_of(saved.model.to(communicator.device, getattr(torch, options.precision)), communicator.device)
    kinds = [kind for kind in (IMAGE, TEXT) if kind in options.features]
    probe = encode(None, saved.tokenizer(["a"]))[1]
    assert probe is not None  # as there are tokens
    identity = {
        "model": str(saved.checkpoint or saved.name),
        "ema": options.ema,
        "features": kinds,
        "dim": probe.shape[1],
        "batch_size": max(1, options.batch_size),
        **{name: getattr(options, name) for name in ("format", "dtype", "precision", "uid_key")},
        "captions": list(options.captions),
    }
    parts = communicator.on_rank_zero(lambda: Parts.create(options.out, identity, manifest))
    loading = loader_options(data, manifest, communicator)
    transform = EvalTransform(saved.preprocessing.size, saved.preprocessing.squash)
    reader = RowReader(manifest, transform, saved.tokenizer, kinds, options.uid_key, loading)
    return embed(encode, reader, manifest, parts, identity["batch_size"], loading, communicator)


class Search(NamedTuple):
    """Options of `neuclip-ds nearest`, whose help explains them."""

    features: Path
    text: Sequence[str] = ()
    image: Sequence[Path] = ()
    of: str | None = None
    count: int = 10  # type: ignore[assignment]  # hides tuple.count, which is not used here
    faiss: str | None = None
    nprobe: int = 32
    model: str | None = None


def find_nearest(search: Search) -> list[tuple[str, list[Match]]]:
    """Return each query with its nearest samples; runs on one rank.

    Raises:
        UserError: the features, the model or an image cannot be used.
    """
    parts = Parts(search.features)
    kind = search.of or parts.kinds[0]
    if kind not in parts.kinds:
        raise UserError(f"{search.features} has no features of {kind}s; choose --of={parts.kinds[0]}.")
    if not parts.numbers:
        raise UserError(f"{search.features} has no part yet; run neuclip-ds embed first.")
    communicator = Communicator("cuda" if torch.cuda.is_available() else "cpu")
    average = parts.identity["ema"] and search.model is None
    saved = open_model(search.model or parts.identity["model"], communicator, average)
    encode = encoder_of(saved.model.to(communicator.device), communicator.device)
    encoder = BatchEncoder(encode, saved.tokenizer, communicator, 1)
    queries = []
    if search.text:
        queries.append(encoder.encode_texts(search.text))
    if search.image:
        transform = EvalTransform(saved.preprocessing.size, saved.preprocessing.squash)
        queries.append(encoder.encode_images([_pixels(path, transform) for path in search.image]))
    joined, count = torch.cat(queries), max(1, search.count)
    if joined.shape[1] != parts.identity["dim"]:
        raise UserError(
            f"{saved.name} has features of width {joined.shape[1]}, but those in {search.features} have "
            f"{parts.identity['dim']}: name the model that made them."
        )
    if search.faiss is None:
        found = nearest(parts, kind, joined, count)
    else:
        found = FaissIndex(parts, kind, search.faiss, search.nprobe).nearest(joined, count)
    return list(zip([*search.text, *map(str, search.image)], found, strict=True))


def _pixels(path: Path, transform: EvalTransform) -> torch.Tensor:
    try:
        return transform(path.read_bytes())
    except Exception as error:  # decoders raise anything; all of it is about this one file
        raise UserError(f"{path} cannot be read as an image ({error}); choose another file.") from error
