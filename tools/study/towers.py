"""Runs of the trainer, in which both towers train: their shards, their options, and their scores on held-out pairs."""

import io
import math
import re
import shutil
import tarfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import webdataset
from benchmarking.step_clock import StepClock
from PIL import Image
from safetensors.torch import save_file

import neuclip_ds
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.files import new_folder
from neuclip_ds.reporting.metrics import read_series
from study.features import IMAGE_PACKAGE, TEXT_PACKAGE, captions_of, image_weights, installed, read_samples, tars_in
from study.loop import WARMUP, Run, loss_options
from study.measures import recalls

PHOTOGRAPHS = 2000  # number of photographs to use, from the start of the dataset; each has several captions
POINTS = 20  # number of points in the curve of a run
IMAGE_WEIGHTS = "image.safetensors"


def prepare_shards(source: str, folder: Path) -> None:
    """Write FOLDER/train, FOLDER/test and, for scenes, FOLDER/validation, unless FOLDER exists.

    A training sample has one caption, so each pair has its own index. For photographs, FOLDER/image.safetensors
    contains the weights of the image tower.

    Args:
        source: a folder with shards in train/ and val/, or demo:N for N rendered scenes.

    Raises:
        UserError: a package with a tower is not installed or contains different weights, or there are no shards.
    """
    if folder.exists():
        return
    with new_folder(folder) as staged:
        if source.startswith("demo:"):
            scenes = staged / "scenes"
            make_demo_data(scenes, pairs=int(source.removeprefix("demo:")), held_out=2000, zero_shot=80)
            (scenes / "train").rename(staged / "train")
            for split, name in {"validation": "00000.tar", "test": "00001.tar"}.items():
                (staged / split).mkdir()
                (scenes / "val" / name).rename(staged / split / name)
            shutil.rmtree(scenes)
        else:
            tensors = image_weights(installed(IMAGE_PACKAGE))
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, staged / IMAGE_WEIGHTS)
            write_pairs(Path(source) / "train", staged / "train")
            shutil.copytree(Path(source) / "val", staged / "test")


def write_pairs(source: Path, folder: Path) -> None:
    """Write a shard with one sample per caption, for the first photographs in a folder of shards."""
    folder.mkdir()
    number = 0
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for photograph, sample in enumerate(webdataset.WebDataset(tars_in(source), shardshuffle=False)):
            if photograph == PHOTOGRAPHS:
                break
            for caption in captions_of(sample):
                for extension, content in {"jpg": sample["jpg"], "txt": caption.encode()}.items():
                    member = tarfile.TarInfo(f"{number:09d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                number += 1


def train_towers(shards: Path, split: str, run: Run, name: str) -> dict[str, Any]:
    """Train a model, or resume its training, and return its scores on held-out pairs.

    In the result, `seconds` is the CPU time of this process. Each step except the first takes `step_seconds` on
    average; everything else, such as building the model and scoring it, takes `start_seconds`. The run's folder is
    removed at the end.

    Args:
        shards: the folder that `prepare_shards` wrote.
        split: name of the subfolder of `shards` with the held-out pairs.
        name: name of the run, unique among those on these shards.
    """
    began = time.process_time()
    clock = StepClock()
    recipe = Path(__file__).with_name(run.recipe + ".yaml")
    trained = neuclip_ds.train(str(recipe), hooks=[clock], **train_options(run, shards, name))
    images: list[Image.Image] = []
    texts: list[str] = []
    image_of: list[int] = []
    for image, captions in read_samples(shards / split):
        image_of += [len(images)] * len(captions)
        images.append(image)
        texts += captions
    model = trained.model()
    image_features = model.encode_images(images).cpu()
    text_features = model.encode_texts(texts).cpu()
    scores = recalls(image_features, text_features, torch.tensor(image_of))

    steps, taus = read_series(trained.folder)["tau"]
    curve = [{"step": step, "tau": tau} for step, tau in zip(steps, taus, strict=True)]
    shutil.rmtree(trained.folder)
    seconds = time.process_time() - began
    return {
        **curve[-1],
        **scores,
        "curve": curve,
        "start_seconds": seconds - clock.seconds,
        "step_seconds": clock.seconds_per_step,
        "seconds": seconds,
    }


def train_options(run: Run, shards: Path, name: str) -> dict[str, Any]:
    """Return the options of the trainer for a run, which override its recipe's."""
    samples = count_samples(shards / "train")
    steps = max(1, round(run.epochs * (samples // run.batch)))
    objective = loss_options(run, samples)
    moving_average = objective.get("moving_average", {})
    if run.loss.startswith("fastclip"):
        moving_average.setdefault("gamma_epochs", run.epochs / 2)  # FastCLIP's gamma falls for 18 of 37 epochs
    if run.loss == "siglip":
        objective["siglip"] = {"bias": -math.log(run.batch - 1)}  # log odds that a random pair of the batch matches
    options: dict[str, Any] = {
        "run.name": re.sub(r"[^\w.,=+@-]+", "_", name),
        "run.output_dir": str(shards.with_name("runs")),
        "run.seed": run.seed,
        "run.log_every": max(1, steps // POINTS),
        "data.train": str(shards / "train"),
        "data.batch_size": run.batch,
        "model.embed_dim": run.width,
        "model.projection_dropout": run.dropout,
        "objective": {"method": run.loss, **objective},
        "optimizer.lr": run.lr,
        "optimizer.vision_lr": run.lr * run.tower_rate,
        "optimizer.text_lr": run.lr * run.tower_rate,
        "optimizer.weight_decay": run.weight_decay,
        "optimizer.warmup_steps": round(WARMUP * steps),
        "max_steps": steps,
        "epochs": run.epochs,
    }
    if (shards / IMAGE_WEIGHTS).is_file():
        options["model.vision.pretrained"] = str(shards / IMAGE_WEIGHTS)
        options["model.text.pretrained"] = str(installed(TEXT_PACKAGE) / "model")
    return options


@cache
def count_samples(shards: Path) -> int:
    return build_manifest(resolve_shards(str(shards)), processes=1).n
