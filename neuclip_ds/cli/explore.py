"""Serve a local page that searches images with a model, or with two models side by side, and classifies images.

The page shows the images and captions that are nearest to a text that you type or an image that you drop. --images is
a folder of image files (the caption of a.jpg is in a.txt) or shards, as in data.train. MODEL is a run's folder (its
newest checkpoint), a checkpoint, or a pretrained model, as in model.pretrained. The features are computed at each
start, or read from the folders in --features, which `neuclip-ds embed` wrote. By default, only this machine can open
the page, and neither images nor texts leave the machine. docs/how-to/explore.md describes the page.

Examples:
  neuclip-ds explore runs/demo --images demo:val
  neuclip-ds explore openai/clip-vit-base-patch32 runs/tuned --images /data/pictures
  neuclip-ds explore runs/tuned --images manifests/pool --features features/pool
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip_ds.cli.early_checks import check_model, check_path
from neuclip_ds.cli.program import Parser, progress_bar
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import Interrupted, UserError, counted, explained, install_command
from neuclip_ds.files import expand_user

if TYPE_CHECKING:  # torch takes seconds to import
    from neuclip_ds.data.loader import LoaderOptions
    from neuclip_ds.data.manifest import Manifest
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.embedding.collection import Collection
    from neuclip_ds.embedding.nearest import SearchableModel

_PACKAGES = ("gradio", "usearch")
_MOST_MODELS = 2
_TEMPERATURE = 0.01  # for class probabilities if a checkpoint has no temperature: the final value in CLIP's training


@dataclass(frozen=True, kw_only=True)
class _Images:
    """The images, and how to read them."""

    collection: Collection
    manifest: Manifest | None  # None for a folder of image files
    loading: LoaderOptions


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds explore", description=__doc__)
    parser.add_argument(
        "models", metavar="MODEL", nargs="+", help="one or two models, each a run, a checkpoint or a pretrained model"
    )
    parser.add_argument("--images", required=True, help="a folder of images, or shards as in data.train")
    features_help = "folders that `neuclip-ds embed` wrote for these shards, one for each model, in the same order"
    parser.add_argument("--features", nargs="+", metavar="FOLDER", help=features_help)
    captions_help = "sources of captions, as in data.captions (default: txt, or those of --features)"
    parser.add_argument("--captions", nargs="+", metavar="SOURCE", help=captions_help)
    parser.add_argument("--batch-size", type=int, default=64, help="images that are encoded at once")
    parser.add_argument("--workers", type=int, default=4, help="loader processes; 0 loads in the main process")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; with 0.0.0.0, other machines can open the page"
    )
    parser.add_argument("--port", type=int, default=7860, help="port to listen on; 0 chooses a free port")
    options = parser.parse(arguments)
    check_options(options)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    from neuclip_ds.cli.explore_page import build_page, gradio_settings, make_server, open_port

    with open_port(options.host, options.port) as listener:
        models, collection = open_models(options)
        with gradio_settings():
            page = build_page(models, collection, options.images)
            port = listener.getsockname()[1]
            host = f"[{options.host}]" if ":" in options.host else options.host
            print(f"Open http://{host}:{port} in a browser; Ctrl-C stops the server.", flush=True)
            server = make_server(page, options.host)
            with suppress(Interrupted):  # a stop signal is the usual end, after which the query images are deleted
                server.run(sockets=[listener])


def check_options(options: argparse.Namespace) -> None:
    """Raise UserError if a package is missing, a path does not exist, or options are invalid or have no effect."""
    if len(options.models) > _MOST_MODELS:
        raise UserError(f"{len(options.models)} models are given, but the page shows at most two: pass one or two.")
    for model in options.models:
        check_model("MODEL", model)
    check_path("--images", options.images)
    for folder in options.features or []:
        check_path("--features", folder)
        if not is_local(folder):
            raise UserError(f"--features={folder} is remote: copy the folder to this machine, and pass the copy.")
    if options.features is not None and len(options.features) != len(options.models):
        raise UserError(
            f"--features lists {counted(len(options.features), 'folder')} for {counted(len(options.models), 'model')}: "
            "pass one for each model, in the same order."
        )
    if options.features is not None and options.captions is not None:
        raise UserError(
            "--captions has no effect with --features, because the folders record which captions were embedded: omit "
            "--captions."
        )
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise UserError(
                f"neuclip-ds explore needs {package}, which is not installed: run {install_command('explore')}."
            )


def open_models(options: argparse.Namespace) -> tuple[list[SearchableModel], Collection]:
    """Open the images, the models and their features, which are computed unless --features lists them.

    Raises UserError if the images, a model or a folder of features cannot be used.
    """
    import torch

    from neuclip_ds.checkpoint.saved_model import open_model
    from neuclip_ds.data.feature_table import find_table
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.embedding.encoders import TrunkRecords, dual_encoders
    from neuclip_ds.embedding.nearest import SearchableModel, check_features, encode_collection, read_features

    communicator = Communicator(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tables = [find_table(folder) for folder in options.features or []]
    images = open_images(options, [table["embedding"] for table in tables], communicator)
    models = []
    for number, name in enumerate(options.models):
        saved = open_model(name, communicator)
        full_name = str(saved.checkpoint or saved.name)
        model = saved.model.to(communicator.device)
        encoders = dual_encoders(full_name, model, saved.tokenizer, saved.preprocessing, "joint", TrunkRecords())
        if tables:
            assert images.manifest is not None
            features = read_features(tables[number], full_name, images.manifest)
        else:
            with progress_bar(f"Encode with {name}") as report:
                features = encode_collection(
                    images.collection, encoders, images.loading, max(1, options.batch_size), report
                )
        shown_name = name
        if saved.checkpoint is not None and saved.checkpoint.name not in name:
            shown_name = f"{name}, {saved.checkpoint.name}"
        temperature = saved.logits.temperature or _TEMPERATURE
        searchable = SearchableModel(shown_name, encoders, temperature, features)
        if tables:
            check_features(searchable, images.collection, options.features[number])
        models.append(searchable)
    return models, images.collection


def open_images(
    options: argparse.Namespace, embeddings: Sequence[Mapping[str, Any]], communicator: Communicator
) -> _Images:
    """Open --images; `embeddings` are the contents of embedding.json in the folders of --features.

    Raises UserError if the images cannot be opened, if the folders contain features of different captions, or if
    --features is set but --images is a folder of image files.
    """
    from neuclip_ds.data.open_data import loader_options, open_data
    from neuclip_ds.embedding.collection import FolderImages, ShardImages
    from neuclip_ds.recipe import validate

    captions = options.captions or ["txt"]
    takes_first = False
    seed = 0
    for embedding in embeddings:
        if any(embedding[name] != embeddings[0][name] for name in ("captions", "all_captions", "seed")):
            raise UserError(
                "The folders in --features contain features of different captions: run `neuclip-ds embed` with the "
                "same --captions, --all-captions and --seed for all of them."
            )
        captions = embedding["captions"]
        takes_first = embedding["all_captions"]
        seed = embedding["seed"]
    data_options = {"train": options.images, "workers": options.workers, "captions": captions}
    data = validate({"data": data_options}).data
    folder = Path(expand_user(options.images))
    if _is_image_folder(folder):
        if embeddings:
            raise UserError(
                f"--features applies only to shards, but {options.images} contains none: omit --features, or pass the "
                "shards in --images."
            )
        loading = loader_options(data, communicator)
        return _Images(collection=FolderImages(folder, captions), manifest=None, loading=loading)
    with tempfile.TemporaryDirectory() as scratch:
        manifest = open_data(options.images, data, communicator, Path(scratch))
    loading = loader_options(data, communicator, manifest)
    collection = ShardImages(manifest, captions, takes_first, loading.cache, seed)
    return _Images(collection=collection, manifest=manifest, loading=loading)


def _is_image_folder(path: Path) -> bool:
    """Return whether a path is a folder of images, that is, a folder that is not a manifest and has no tar files.

    Raises UserError if the folder cannot be listed.
    """
    from neuclip_ds.data.listing import files_below
    from neuclip_ds.data.manifest_file import is_manifest

    if not path.is_dir() or is_manifest(str(path)):
        return False
    with explained(f"{path} cannot be listed", "make its folders readable"):
        return not files_below(path, [".tar"])
