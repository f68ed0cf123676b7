"""Write the features of a data set with a saved model."""

import argparse

import torch

from neuclip_ds.checkpoint.saved_model import SavedModel, open_model
from neuclip_ds.config import DataConfig
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import check_shared, connected
from neuclip_ds.embedding.embed import Parts, RowReader, Summary, embed
from neuclip_ds.evaluation.encoding import encoder_of
from neuclip_ds.files import explain_disk
from neuclip_ds.recipe import validate
from neuclip_ds.training.data import loader_options, open_data


def write_features(options: argparse.Namespace) -> Summary:
    """Write the features of a data set on all ranks of the launch, by the options of `neuclip-ds embed`.

    Raises:
        UserError: the model, the data or the folder cannot be used.
    """
    names = ("workers", "captions", "cache_dir", "cache_gb", "allow_commands")
    chosen = {name: getattr(options, name) for name in names}
    data = validate({"data": {"train": options.shards, **chosen}}).data
    task = "\n".join(f"{name}: {value}" for name, value in vars(options).items())
    with explain_disk(options.out, "choose another --out"):
        options.out.mkdir(parents=True, exist_ok=True)
    with connected(task, data.max_outage) as communicator:
        check_shared(options.out, communicator)
        return _write_features(open_model(options.model, communicator, options.ema), options, data, communicator)


def _write_features(
    saved: SavedModel, options: argparse.Namespace, data: DataConfig, communicator: Communicator
) -> Summary:
    manifest = open_data(options.shards, data, communicator, options.out)
    encode = encoder_of(saved.model.to(communicator.device, getattr(torch, options.precision)), communicator.device)
    identity = {
        "model": str(saved.checkpoint or saved.name),
        "ema": options.ema,
        "batch_size": max(1, options.batch_size),
        **{name: getattr(options, name) for name in ("format", "dtype", "precision", "uid_key")},
        "captions": list(options.captions),
    }
    loading = loader_options(data, manifest, communicator)
    transform = EvalTransform(saved.preprocessing.size, saved.preprocessing.squash)
    reader = RowReader(manifest, transform, saved.tokenizer, options.uid_key, loading)
    parts = Parts(options.out, identity)
    return embed(encode, reader, manifest, parts, identity["batch_size"], loading, communicator)
