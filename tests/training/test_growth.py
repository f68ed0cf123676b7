"""A run whose data grow while it is interrupted goes on with its per-sample state; other data are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tars import write_pairs
from torch import Tensor

from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.reporting.sample_log import read_samples

ROOT = Path(__file__).parents[2]
TINY = [
    "demo",
    "--objective.method=fastclip_v3",
    "--data.batch_size=8",
    "--data.workers=0",
    "--model.vision.image_size=16",
    '--model.vision.options={"patch_size":8,"embed_dim":16,"depth":1,"num_heads":2}',
    "--model.text.width=16",
    "--model.text.layers=1",
    "--model.text.heads=2",
    "--model.text.vocab_size=300",
    "--model.embed_dim=16",
    "--run.sample_log=true",
    "--data.val=",
    "--data.zero_shot=",
]


def call(tool: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = [sys.executable, str(ROOT / tool), *options]
    return subprocess.run(done, env=environment, capture_output=True, text=True, timeout=200)


def log_u(runs: Path) -> Tensor:
    """(n, 2) of the newest checkpoint."""
    folder = max((runs / "run" / "checkpoints").glob("step_*"))
    (path,) = folder.glob("samples.*.safetensors")
    (table,) = load_file(path).values()
    return table


def test_grown_data(tmp_path: Path) -> None:
    first, more, manifest = tmp_path / "first", tmp_path / "more", str(tmp_path / "manifest")
    write_pairs(first, [13, 13])
    write_pairs(more, [9])
    assert call("tools/build_manifest.py", manifest, str(first), "--processes", "1").returncode == 0

    def train(steps: int, data: str = manifest) -> subprocess.CompletedProcess[str]:
        where = [f"--run.folder={tmp_path}/runs", "--run.name=run", f"--data.train={data}"]
        return call("train.py", *TINY, *where, f"--budget.steps={steps}")

    begun = train(6)  # 4 steps an epoch: into the second one
    assert begun.returncode == 0, begun.stderr
    before = log_u(tmp_path / "runs")
    assert before.shape == (26, 2)
    assert torch.isfinite(before).all()

    assert call("tools/build_manifest.py", manifest, str(first), str(more), "--update").returncode == 0
    grown = train(7)
    assert grown.returncode == 0, grown.stderr
    assert "changed from 2 shards to 3 (35 samples in use): epoch 2 begins" in grown.stderr
    seen = dict(read_samples(tmp_path / "runs" / "run" / "samples"))
    after = log_u(tmp_path / "runs")
    assert after.shape == (35, 2)
    kept = [index for index in range(26) if index not in seen[7]]
    assert torch.equal(after[kept], before[kept])
    assert torch.isneginf(after[[index for index in range(26, 35) if index not in seen[7]]]).all()
    assert torch.isfinite(after[seen[7]]).all()

    epoch = train(11)  # the grown data's first epoch, of 5 steps, resumed after its first one
    assert epoch.returncode == 0, epoch.stderr
    assert "changed" not in epoch.stderr
    seen = dict(read_samples(tmp_path / "runs" / "run" / "samples"))
    assert sorted(i for step in range(7, 12) for i in seen[step] if i >= 0) == list(range(35))

    write_pairs(tmp_path / "other", [14, 13])
    refused = train(12, str(tmp_path / "other"))
    assert refused.returncode == 2
    assert "written with other data" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("removed", [0, 1])
def test_removed_shards_leave_the_rest_in_place(tmp_path: Path, removed: int) -> None:
    folder, manifest = write_pairs(tmp_path / "shards", [13, 13]), str(tmp_path / "manifest")
    assert call("tools/build_manifest.py", manifest, str(folder), "--processes", "1").returncode == 0

    def train(steps: int) -> str:
        where = [f"--run.folder={tmp_path}/runs", "--run.name=run", f"--data.train={manifest}"]
        done = call("train.py", *TINY, *where, f"--budget.steps={steps}")
        assert done.returncode == 0, done.stderr
        return done.stderr

    train(4)
    before = log_u(tmp_path / "runs")
    paths = resolve_shards(str(folder))
    Path(paths.pop(removed)).unlink()
    assert call("tools/build_manifest.py", manifest, *paths, "--update").returncode == 0
    assert "epoch 1 begins" in train(6)
    after = log_u(tmp_path / "runs")
    gone = range(13) if removed == 0 else range(13, 26)
    assert torch.equal(after[list(gone)], before[list(gone)])
    seen = dict(read_samples(tmp_path / "runs" / "run" / "samples"))
    assert sorted(i for step in (5, 6) for i in seen[step] if i >= 0) == [i for i in range(26) if i not in gone]
