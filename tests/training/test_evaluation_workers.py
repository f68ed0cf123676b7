"""The loader processes of a run's evaluations are those of its first one, and end with the run."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from forks import fork
from small_runs import TINY, environment
from tars import write_pairs

from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse
from neuclip_ds.training import trainer
from neuclip_ds.training.evaluator import Evaluator


def children() -> list[int]:
    return sorted(child.pid or 0 for child in multiprocessing.active_children())


def _train(options: list[str], out: Path, fails: bool) -> None:
    """Train; write the child processes after each evaluation and after the run."""
    evaluate, seen = Evaluator.__call__, list[list[int]]()

    def noting(*arguments: Any) -> dict[str, float]:
        results = evaluate(*arguments)
        seen.append(children())
        if fails and len(seen) == 2:
            raise UserError("enough")
        return results

    Evaluator.__call__ = noting  # type: ignore[method-assign]
    try:
        trainer.train(parse(options).config, read_environment(), open_evaluation=Evaluator)
    except UserError as error:
        assert fails and str(error) == "enough"
    out.write_text(json.dumps([*seen, children()]))


@pytest.mark.parametrize(
    "fails", [pytest.param(False, id="to its end"), pytest.param(True, id="that fails", marks=pytest.mark.slow)]
)
def test_a_run(tmp_path: Path, fails: bool) -> None:
    write_pairs(tmp_path / "val", [9, 17])
    data = write_pairs(tmp_path / "shards", [13, 13])
    where = [f"--run.output_dir={tmp_path}", "--run.name=run", f"--data.train={data}", f"--data.val={tmp_path / 'val'}"]
    how = ["--data.workers=1", "--max_steps=3", "--run.evaluate_every=1", "--run.best_metric=image_to_text_recall@1"]
    process = fork(_train, [*TINY, *where, *how], tmp_path / "seen", fails, variables=environment())
    process.join()
    assert process.exitcode == 0
    first, *others, after = json.loads((tmp_path / "seen").read_text())
    assert len(first) == 1, "training has not begun"
    assert len(others) == (1 if fails else 3)
    assert all(set(first) < set(pids) for pids in others)
    assert after == []
