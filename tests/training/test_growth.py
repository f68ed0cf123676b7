"""A run whose data grow while it is interrupted keeps its per-sample state and its held-out pairs."""

from pathlib import Path

import pytest
import torch
from sample_log import read_samples
from small_runs import call, log_u, newest_checkpoint, train
from tars import write_pairs


@pytest.mark.slow
def test_grown_data(tmp_path: Path) -> None:
    first, more, manifest = tmp_path / "first", tmp_path / "more", str(tmp_path / "manifest")
    write_pairs(first, [15, 15])
    write_pairs(more, [9])
    assert call("tools/build_manifest.py", manifest, str(first), "--processes", "1").returncode == 0

    runs = tmp_path / "runs"
    begun = train(runs, manifest, 6, "--data.val=4")  # 4 steps an epoch: into the second one
    assert begun.returncode == 0, begun.stderr
    assert "evaluations are on 4 pairs held out of data.train" in begun.stderr
    assert "retrieval_pairs: 4" in begun.stderr
    before = log_u(newest_checkpoint(runs))
    held_out, trained = [13, 14, 28, 29], [*range(13), *range(15, 28)]
    assert before.shape == (30, 2)
    assert torch.isfinite(before[trained]).all() and torch.isneginf(before[held_out]).all()
    refused = train(runs, manifest, 7, "--data.val=3")
    assert "the run has held out 4 training pairs from its start" in refused.stderr

    assert call("tools/build_manifest.py", manifest, str(first), str(more), "--update").returncode == 0
    grown = train(runs, manifest, 9, "--data.val=auto")  # 3 steps of the epoch that was begun, and one of the next
    assert grown.returncode == 0, grown.stderr
    assert "changed from 2 shards to 3 (35 samples in use): epoch 2, from step 8 on, is the first" in grown.stderr
    seen = dict(read_samples(runs / "run" / "samples"))
    assert sorted(i for step in range(5, 9) for i in seen[step] if i >= 0) == trained
    after = log_u(newest_checkpoint(runs))
    assert after.shape == (39, 2)
    assert torch.isneginf(after[[*held_out, *(index for index in range(30, 39) if index not in seen[9])]]).all()
    assert torch.isfinite(after[seen[9]]).all()

    epoch = train(runs, manifest, 13, ranks=2)  # the grown data's first epoch, of 5 steps, resumed after its first one
    assert epoch.returncode == 0, epoch.stderr
    assert "changed" not in epoch.stderr
    seen = dict(read_samples(runs / "run" / "samples"))
    assert sorted(i for step in range(9, 14) for i in seen[step] if i >= 0) == [*trained, *range(30, 39)]

    write_pairs(tmp_path / "other", [16, 15])
    refused = train(runs, str(tmp_path / "other"), 12)
    assert refused.returncode == 2
    assert "written with other data" in refused.stderr
    assert "Traceback" not in refused.stderr
