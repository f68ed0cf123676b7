"""A stopped run that resumes with a different number of ranks sees the same batches and reaches the same state."""

import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from sample_log import read_samples
from small_runs import SMALL, TRAIN, demo_shards, ends, newest_checkpoint, read_options, start, wait_for, weights
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import OBJECTIVE, STATE, StateFiles
from neuclip_ds.state.shards import TABLE

PAIRS, BATCH = 90, 16
EPOCH = 6  # steps; the last batch has 6 padding rows
TINY = [
    f"--data.batch_size={BATCH}",
    "--data.workers=1",
    "--data.val=",
    "--data.zero_shot=",
    "--data.micro_batch=4",
    *SMALL,
    "--objective.method=neuclip",
    "--objective.npn.prototypes=64",
    "--objective.npn.redraw_every=7",
    "--objective.eps=1e-6",
    "--optimizer.warmup_steps=5",
    "--run.log_every=1",
    "--run.checkpoint_every=1000",
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_shards(tmp_path_factory.mktemp("demo") / "data", PAIRS)


class Launch:
    """One launch of a run, with a training process for each rank, as a launcher would start it."""

    def __init__(self, ranks: int, options: Sequence[str], folder: Path) -> None:
        self.metrics = folder / "metrics.jsonl"
        where = [f"--run.output_dir={folder.parent}", f"--run.name={folder.name}"]
        self.programs = start(TRAIN, "demo", *read_options([*TINY, *options]), *where, ranks=ranks)

    def end(self, code: int = 0) -> str:
        """Wait until all ranks exit with `code`; return their stderr."""
        done = ends(self.programs)
        said = "".join(one.stderr for one in done)
        assert [one.returncode for one in done] == [code] * len(done), said
        return said

    def reach(self, step: int) -> None:
        """Wait until the metrics show that a step is done."""
        wait_for(lambda: self.metrics.is_file() and f'"step": {step},' in self.metrics.read_text(), self.programs)

    def stop(self, step: int) -> str:
        """Send SIGTERM to rank 0 after a step; return the run's stderr."""
        self.reach(step)
        self.programs[0].terminate()
        said = self.end(128 + signal.SIGTERM)
        assert "Stopped after step" in said
        return said

    def kill(self) -> None:
        for program in self.programs:
            program.kill()


def options(shards: Path, steps: int, *more: str) -> list[str]:
    return [f"--data.train={shards}", f"--max_steps={steps}", *more]


def checkpoint(run: Path) -> Path:
    return newest_checkpoint(run.parent, run.name)


def tables(run: Path) -> dict[str, Tensor]:
    """Return the whole partitioned tables: u, individual temperatures and NPN columns; a queue is not partitioned."""
    files = StateFiles(checkpoint(run) / STATE)
    return {name: files.read(name, TABLE) for name in files.names(TABLE)}


def same_batches(run: Path, whole: Path, steps: int) -> None:
    found, wanted = (list(read_samples(folder / "samples")) for folder in (run, whole))
    assert [step for step, _ in found] == list(range(1, steps + 1))
    assert found == wanted
    for first in range(0, steps // EPOCH * EPOCH, EPOCH):
        seen = Counter(index for _, indices in found[first : first + EPOCH] for index in indices)
        assert seen.pop(-1) == EPOCH * BATCH - PAIRS
        assert seen == Counter(range(PAIRS)), "every sample exactly once an epoch"


def same_end(run: Path, whole: Path) -> None:
    """Check that two runs end equal up to float32 rounding; all weights are compared as one vector."""
    found, wanted = (torch.cat(list(weights(checkpoint(folder)).values())) for folder in (run, whole))
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    ours, theirs = tables(run), tables(whole)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-4, msg=key)
    ours, theirs = (StateFiles(checkpoint(folder) / STATE).replicated(OBJECTIVE) for folder in (run, whole))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5, msg=key)


Stop = tuple[int, int, str]  # ranks, step after which they are stopped, name in ds_configs/


def elastic(shards: Path, folder: Path, steps: int, method: Sequence[str], stops: Sequence[Stop], ranks: int) -> None:
    """Compare an uninterrupted one-rank run with one stopped repeatedly and finished by `ranks` ranks under ZeRO 3.

    `method` contains the method's name, followed by its options.
    """
    chosen = options(shards, steps, f"--objective.method={method[0]}", *method[1:], "--deepspeed=zero1_fp32")
    Launch(1, chosen, folder / "whole").end()
    for some, step, engine in stops:
        Launch(some, [*chosen, f"--deepspeed={engine}"], folder / "broken").stop(step)
    Launch(ranks, [*chosen, "--deepspeed=zero3_fp32"], folder / "broken").end()
    same_batches(folder / "broken", folder / "whole", steps)
    same_end(folder / "broken", folder / "whole")


def test_one_rank_resumes_a_run_whose_two_ranks_were_killed(shards: Path, tmp_path: Path) -> None:
    """The sample log of rank 1 after the last checkpoint is dropped, although that rank never restarts."""
    method = ["--objective.method=fastclip_v3", "--data.micro_batch=8"]
    chosen = options(shards, 12, *method, "--run.checkpoint_every=4")
    Launch(1, [*chosen, "--deepspeed=zero1_fp32"], tmp_path / "whole").end()
    killed = Launch(2, [*chosen, "--deepspeed=zero3_fp32"], tmp_path / "broken")
    killed.reach(6)
    killed.kill()
    assert (checkpoint(tmp_path / "broken") / STATE / "00001-of-00002.safetensors").is_file()
    Launch(1, [*chosen, "--deepspeed=zero1_fp32"], tmp_path / "broken").end()
    same_batches(tmp_path / "broken", tmp_path / "whole", 12)
    assert tables(tmp_path / "whole"), "u of each sample"
    same_end(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        ["neuclip"],
        ["neuclip", "--objective.temperature.rule=learned"],
        ["neuclip_queue", "--objective.queue.size=64"],
        ["neuclip_queue", "--objective.queue.size=64", "--objective.temperature.rule=robust"],
        ["fastclip_v3"],
        ["fastclip_v2"],
    ],
    ids="-".join,
)
def test_a_run_stopped_on_four_two_and_one_ranks_ends_as_an_uninterrupted_run(
    method: list[str], shards: Path, tmp_path: Path
) -> None:
    stops = [(4, 4, "zero1_fp32"), (2, 12, "zero3_fp32"), (1, 17, "zero0_fp32")]
    elastic(shards, tmp_path, 30, method, stops, 4)
