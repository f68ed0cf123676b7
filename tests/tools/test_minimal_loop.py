"""The minimal loop lowers the loss, and two ranks print the same losses as one rank."""

import re
from pathlib import Path

import pytest
from small_runs import call, demo_shards


def losses_and_recall(data: Path, ranks: int) -> tuple[list[float], float]:
    """Run the loop on `ranks` ranks; return the printed loss of each epoch and the recall."""
    done = call("tools/minimal_loop.py", f"--data={data}", "--batch=32", "--epochs=3", ranks=ranks)
    (recall,) = re.findall(r"recall@1 ([0-9.]+) \(chance 0\.0625\)", done.stdout)
    return [float(loss) for loss in re.findall(r"batch_loss ([0-9.]+)", done.stdout)], float(recall)


def test_the_loss_falls_alike_on_one_rank_and_two(tmp_path: Path) -> None:
    data = demo_shards(tmp_path / "data", pairs=64, held_out=16).parent
    losses, recall = losses_and_recall(data, ranks=1)
    assert losses[0] > losses[1] > losses[2]
    assert 0 <= recall <= 1
    losses_of_two_ranks, recall_of_two_ranks = losses_and_recall(data, ranks=2)
    assert losses_of_two_ranks == pytest.approx(losses, abs=1e-3)
    assert recall_of_two_ranks == pytest.approx(recall, abs=0.07)  # one pair may rank differently
