"""The log of samples: the ranks' lines merge to global batches, also after a resume with another number of ranks."""

from __future__ import annotations

from pathlib import Path

from neuclip_ds.reporting.sample_log import SampleLog, drop_samples_beyond, read_samples


def start(folder: Path, ranks: int, done: int, last: int) -> None:
    """Log steps done + 1 ... last of a run whose global batch of step s is 12 s ... 12 s + 11."""
    drop_samples_beyond(folder, done)
    share = 12 // ranks
    for rank in range(ranks):
        with SampleLog(folder, rank) as log:
            for step in range(done + 1, last + 1):
                first = 12 * step + rank * share
                log.write(step, range(first, first + share))


def batches(last: int) -> list[tuple[int, list[int]]]:
    return [(step, list(range(12 * step, 12 * step + 12))) for step in range(1, last + 1)]


def test_resumes_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    for ranks, done, last in ((4, 0, 5), (2, 3, 8), (1, 7, 12), (12, 11, 14), (3, 14, 15)):
        start(tmp_path, ranks, done, last)
        assert list(read_samples(tmp_path)) == batches(last)
    assert len(list(tmp_path.iterdir())) == 12
    drop_samples_beyond(tmp_path, 0)
    assert list(read_samples(tmp_path)) == []


def test_lines_are_written_at_once(tmp_path: Path) -> None:
    with SampleLog(tmp_path / "samples", 3) as log:
        log.write(1, [5, -1])
        assert (tmp_path / "samples" / "rank00003.jsonl").read_text() == '{"step": 1, "indices": [5, -1]}\n'


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    start(tmp_path, 2, 0, 2)
    with (tmp_path / "rank00001.jsonl").open("a") as file:
        file.write('{"step": 3, "ind')
    start(tmp_path, 2, 2, 4)
    assert list(read_samples(tmp_path)) == batches(4)


def test_no_log_yet(tmp_path: Path) -> None:
    drop_samples_beyond(tmp_path / "none", 3)
    assert list(read_samples(tmp_path / "none")) == []
