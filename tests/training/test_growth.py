"""A run whose data grow while it is interrupted keeps its per-sample state; other data are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sample_log import read_samples
from small_runs import call, newest_checkpoint, train
from tars import write_pairs
from torch import Tensor

from neuclip_ds.data.shards import resolve_shards


def log_u(runs: Path) -> Tensor:
    """(n, 2) of the newest checkpoint."""
    (path,) = newest_checkpoint(runs).glob("samples.*.safetensors")
    (table,) = load_file(path).values()
    return table


@pytest.mark.slow
def test_grown_data(tmp_path: Path) -> None:
    first, more, manifest = tmp_path / "first", tmp_path / "more", str(tmp_path / "manifest")
    write_pairs(first, [13, 13])
    write_pairs(more, [9])
    assert call("tools/build_manifest.py", manifest, str(first), "--processes", "1").returncode == 0

    runs = tmp_path / "runs"
    begun = train(runs, manifest, 6)  # 4 steps an epoch: into the second one
    assert begun.returncode == 0, begun.stderr
    before = log_u(runs)
    assert before.shape == (26, 2)
    assert torch.isfinite(before).all()

    assert call("tools/build_manifest.py", manifest, str(first), str(more), "--update").returncode == 0
    grown = train(runs, manifest, 9)  # 3 steps of the epoch that was begun, and one of the next
    assert grown.returncode == 0, grown.stderr
    assert "changed from 2 shards to 3 (35 samples in use): epoch 2, from step 8 on, is the first" in grown.stderr
    seen = dict(read_samples(runs / "run" / "samples"))
    assert sorted(i for step in range(5, 9) for i in seen[step] if i >= 0) == list(range(26))
    after = log_u(runs)
    assert after.shape == (35, 2)
    assert torch.isneginf(after[[index for index in range(26, 35) if index not in seen[9]]]).all()
    assert torch.isfinite(after[seen[9]]).all()

    epoch = train(runs, manifest, 13, ranks=2)  # the grown data's first epoch, of 5 steps, resumed after its first one
    assert epoch.returncode == 0, epoch.stderr
    assert "changed" not in epoch.stderr
    seen = dict(read_samples(runs / "run" / "samples"))
    assert sorted(i for step in range(9, 14) for i in seen[step] if i >= 0) == list(range(35))

    write_pairs(tmp_path / "other", [14, 13])
    refused = train(runs, str(tmp_path / "other"), 12)
    assert refused.returncode == 2
    assert "written with other data" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("removed", [0, 2])
def test_removed_shards_leave_the_rest_in_place(tmp_path: Path, removed: int) -> None:
    folder, manifest = write_pairs(tmp_path / "shards", [13, 13, 13]), str(tmp_path / "manifest")
    assert call("tools/build_manifest.py", manifest, str(folder), "--processes", "1").returncode == 0

    runs = tmp_path / "runs"
    assert train(runs, manifest, 6).returncode == 0  # one step of the second epoch
    before, begun = log_u(runs), dict(read_samples(runs / "run" / "samples"))[6]
    paths = resolve_shards(str(folder))
    Path(paths.pop(removed)).unlink()
    assert call("tools/build_manifest.py", manifest, *paths, "--update").returncode == 0
    changed = train(runs, manifest, 14)
    assert changed.returncode == 0, changed.stderr
    assert "epoch 2, from step 10 on" in changed.stderr
    after, seen = log_u(runs), dict(read_samples(runs / "run" / "samples"))
    gone = range(13 * removed, 13 * removed + 13)
    assert torch.equal(after[list(gone)], before[list(gone)])
    kept = [index for index in range(39) if index not in gone]
    rest = [i for step in (7, 8, 9, 10) for i in seen[step] if i >= 0]
    assert sorted(rest) == [index for index in kept if index not in begun], "the rest of the epoch"
    assert sorted(i for step in range(11, 15) for i in seen[step] if i >= 0) == kept
