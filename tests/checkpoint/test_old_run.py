"""A run that an earlier version left after 4 of its 6 steps resumes and exports (tests/fixtures)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from small_runs import call

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives.methods.neuclip import NpnConfig

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "run_of_0.1.tar.gz"
OPTIONS = [  # of that run, with today's names
    *(
        "demo",
        "--model.vision.name=vit_tiny_patch16_224",
        "--objective.method=neuclip",
        "--run.name=old",
        "--run.folder=runs",
        "--run.report=false",
        "--run.log_every=1",
    ),
    *("--data.train=shards", "--data.val=", "--data.zero_shot=", "--data.batch_size=8", "--data.workers=0"),
    *("--model.vision.image_size=16", "--model.text.width=8", "--model.text.layers=1", "--model.text.heads=2"),
    '--model.vision.options={"patch_size":8,"embed_dim":8,"depth":1,"num_heads":2}',
    *("--model.text.vocab_size=300", "--model.text.context_length=8", "--model.embed_dim=8"),
    *("--objective.npn.prototypes=8", "--objective.npn.updates=2", "--run.checkpoint_every=2"),
    *("--run.keep_checkpoints=9", "--optimizer.warmup_steps=2", "--budget.steps=6"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def losses(path: Path) -> dict[int, Any]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


def test_it_resumes_to_the_losses_of_the_uninterrupted_run(folder: Path) -> None:
    done = call("train.py", *OPTIONS, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 steps of which 4 are done" in done.stdout + done.stderr
    assert losses(folder / "runs/old/metrics.jsonl") == pytest.approx(losses(folder / "expected.jsonl"), rel=1e-4)


def test_its_model_opens(folder: Path) -> None:
    saved = open_model(str(folder / "runs/old"), Communicator())
    assert saved.config is not None and saved.config.objective.section(NpnConfig).prototypes == 8
    _, text = saved.model(None, saved.tokenizer(["a red cat", "a blue house"]))
    assert text.shape == (2, 8)
