"""For developers of neuclip_ds: measure the time that stored features save, and the time to compute and compare them.

The model has a timm ViT-B/32 and a text tower of CLIP's size, with random weights; the images are the demo's scenes,
enlarged to 224 px. Only the projections train: first with the frozen towers in place, then on their stored outputs.
Then `neuclip-ds filter --near-duplicates` compares random image features. Times are CPU seconds with one thread; those
of the commands include their imports.

Example: python tools/benchmark_stored_features.py
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from benchmarking.step_clock import StepClock
from time_tutorials import cpu_time_of_children

import neuclip_ds
from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.data.feature_parts import EMBEDDING, FORMAT, FeaturePart, job_hash, part_name, write_part

CLIP_B32 = {
    "model.vision.name": "vit_base_patch32_clip_224",
    "model.vision.image_size": 224,
    "model.vision.options": {},
    "model.text": {"vocab_size": 1000, "context_length": 77, "width": 512, "layers": 12, "heads": 8},
    "model.embed_dim": 512,
}
HEADS = {"model.vision.trainable": "projection", "model.text.trainable": "projection", "data.crop_scale": 1}
WIDTH = 512  # of the features that are compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="pairs per step (default: 64)")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of each run; the first one is not timed (default: 4)"
    )
    compared = "number of features that `neuclip-ds filter` compares (default: 40000)"
    parser.add_argument("--compared", type=int, default=40_000, help=compared)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with exit_on_mistake(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        samples = options.batch * options.steps
        make_demo_data(folder / "data", pairs=samples, held_out=1, zero_shot=1, processes=1)

        # one step from random weights, to save a model
        train(folder, "start", options.batch, 1, CLIP_B32)
        start = folder / "start"
        heads = HEADS | {"model.pretrained": str(start)}

        in_place = train(folder, "in_place", options.batch, options.steps, heads)
        trunks = folder / "trunks"
        embedding = cpu_time_of(
            "embed", str(start), str(folder / "data" / "train"), f"--out={trunks}", "--output=trunk", "--workers=0"
        )
        stored = heads | {"data.image_features": str(trunks), "data.text_features": str(trunks)}
        on_features = train(folder, "stored", options.batch, options.steps, stored)

        write_random_features(folder / "random", options.compared)
        comparing = cpu_time_of(
            "filter", str(folder / "random"), "--near-duplicates=0.95", f"--out={folder / 'distinct.npy'}"
        )

    rows = {
        f"a step on {options.batch} pairs, frozen towers in place": in_place,
        f"a step on {options.batch} pairs, stored features": on_features,
        "`neuclip-ds embed`, per sample": embedding / samples,
        f"`neuclip-ds filter --near-duplicates`, {options.compared} samples": comparing,
    }
    print("| what | CPU s |\n|---|---|")
    for name, seconds in rows.items():
        print(f"| {name} | {seconds:.2g} |")


def train(folder: Path, name: str, batch: int, steps: int, options: Mapping[str, Any]) -> float:
    """Train on FOLDER/data/train; return the mean CPU seconds of the steps after the first."""
    clock = StepClock()
    fixed: dict[str, Any] = {
        "data.train": str(folder / "data" / "train"),
        "data.val": "",
        "data.zero_shot": "",
        "data.workers": 0,
        "data.batch_size": batch,
        "run.output_dir": str(folder),
        "run.name": name,
        "run.evaluate_every": 0,
        "max_steps": steps,
    }
    neuclip_ds.train("demo", hooks=[clock], **fixed, **options)
    return clock.seconds_per_step


def cpu_time_of(*arguments: str) -> float:
    """Run a command of neuclip-ds in a new process; return its CPU seconds, imports included."""
    before = cpu_time_of_children()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "neuclip_ds", *arguments]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return cpu_time_of_children() - before


def write_random_features(folder: Path, samples: int) -> None:
    """Write random image features, and random similarities to captions, in the format of `neuclip-ds embed`."""
    generator = np.random.default_rng(0)
    features = generator.standard_normal((samples, WIDTH), dtype=np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    identity = {"format": FORMAT, "image_width": WIDTH, "text_width": None}
    folder.mkdir()
    (folder / EMBEDDING).write_text(json.dumps(identity))
    part = FeaturePart(
        job=job_hash(identity),
        shard=0,
        samples=samples,
        index=np.arange(samples),
        image=features[:, np.newaxis],
        text=None,
        text_start=None,
        first_caption=None,
    )
    write_part(folder, part)
    columns = {"uid": [f"{row:032x}" for row in range(samples)], "similarity": generator.random(samples)}
    pq.write_table(pa.table(columns), (folder / part_name(0)).with_suffix(".parquet"))


if __name__ == "__main__":
    main()
