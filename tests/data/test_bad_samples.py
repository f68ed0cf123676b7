"""Check that each bad sample is listed once and counted by cause over all ranks, and that too many stop the run."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.dataset import BadSample, Batch
from neuclip_ds.errors import UserError
from neuclip_ds.files import records


def bad_batch(indices: list[int], size: int = 10, reason: str = "no image") -> Batch:
    index = torch.tensor([*indices, *([1000 + i for i in range(size - len(indices))])])
    bad = tuple(BadSample(index=i, shard="s.tar", key=f"{i:03d}", reason=reason) for i in indices)
    empty = torch.zeros(size)
    return Batch(empty, empty, index, torch.ones(size, dtype=torch.bool), bad)


def merged(log: BadSampleLog, *batches: Batch) -> None:
    for batch in batches:
        log.record(batch)
    log.merge([log.take_new()])


def listed(folder: Path) -> list[int]:
    return [json.loads(line)["index"] for line in (folder / "bad_samples.jsonl").read_text().splitlines()]


def test_each_sample_is_listed_once(tmp_path, caplog):
    log = BadSampleLog(tmp_path / "run", 0.5)
    merged(log, bad_batch([]))
    assert not (tmp_path / "run").exists()
    merged(log, bad_batch([1, 2]), bad_batch([2, 3, 4]))
    assert listed(tmp_path / "run") == [1, 2, 3, 4]
    first = json.loads(log.path.read_text().splitlines()[0])
    assert first == {"index": 1, "shard": "s.tar", "key": "001", "reason": "no image"}
    assert (log.seen, log.bad) == (30, 5)
    assert len(caplog.records) == 3  # for the 1st, 2nd and 4th bad samples


def test_a_resumed_run_does_not_list_again_and_mends_a_broken_line(tmp_path):
    before = BadSampleLog(tmp_path, 0.5)
    merged(before, bad_batch([1, 2]))
    with before.path.open("a") as file:
        file.write('{"index": 9, "sh')
    after = BadSampleLog(tmp_path, 0.5)
    merged(after, bad_batch([2, 5]))
    assert listed(tmp_path) == [1, 2, 5]


def test_ranks_settle_together(tmp_path):
    ours, theirs = BadSampleLog(tmp_path, 0.5), BadSampleLog(tmp_path, 0.5, writes=False)
    ours.record(bad_batch([1]))
    theirs.record(bad_batch([7, 8], reason="read failed: lost"))
    new_of_ranks = [ours.take_new(), theirs.take_new()]
    theirs.merge(new_of_ranks)
    assert not theirs.path.exists()
    ours.merge(new_of_ranks)
    assert (ours.seen, ours.causes) == (20, {"no image": 1, "read failed": 2})
    assert sorted(listed(tmp_path)) == [1, 7, 8]


def test_bad_fraction_stops_the_run(tmp_path):
    log = BadSampleLog(tmp_path, 0.01)
    merged(log, bad_batch(list(range(10))))  # exactly the limit for up to 1000 samples
    with pytest.raises(UserError, match=r"^11 of 20 samples .*max_bad_fraction=0.01 .*no image.*bad_samples.jsonl"):
        merged(log, bad_batch([10]))
    merged(log, bad_batch([], size=1080))  # 11 of 1100 samples
    with pytest.raises(UserError, match="12 of 1101"):
        merged(log, bad_batch([11], size=1))


def test_a_node_that_reads_nothing_stops_a_long_run(tmp_path):
    """One rank of two cannot read its data, after so many good samples that the limit for the whole run is far away."""
    logs = [BadSampleLog(tmp_path, 0.01, writes=False) for _ in range(2)]
    logs[0].restore(10**6, {})

    def ten_steps(bad: bool) -> None:
        for number, log in enumerate(logs):
            for _ in range(10):
                indices = list(range(10)) if bad and number == 1 else []
                log.record(bad_batch(indices, reason="read failed: [Errno 5] Input/output error"))
        new_of_ranks = [log.take_new() for log in logs]
        with suppress(UserError):
            logs[1].merge(new_of_ranks)
        logs[0].merge(new_of_ranks)

    for _ in range(110):
        ten_steps(bad=False)
    message = r"^[\d,]+ of the [\d,]+ samples that a rank on .* more than 10 times the fraction .* reason: .*Errno 5"
    with pytest.raises(UserError, match=message):
        for _ in range(30):
            ten_steps(bad=True)
    assert logs[0].bad / logs[0].seen < 0.002


def test_the_window_forgets(tmp_path):
    """The limit on recent steps tolerates short bursts of bad samples, as from a damaged shard, but not long ones."""
    log = BadSampleLog(tmp_path, 0.01)
    log.restore(10**6, {})
    for _ in range(3):
        for _ in range(95):
            merged(log, bad_batch([1]))
        merged(log, *[bad_batch([])] * 1000)
    with pytest.raises(UserError, match="the latest reason: no image"):
        for _ in range(200):
            merged(log, bad_batch(list(range(10))))


def test_zero_tolerance_names_the_cause_met_most_often(tmp_path):
    log = BadSampleLog(tmp_path, 0.0)
    reasons = ["read failed: a", "read failed: b", "no image"]
    with pytest.raises(UserError, match=r"3 of 30 .*most frequent cause: read failed, 2 times"):
        merged(log, *(bad_batch([index], reason=reason) for index, reason in enumerate(reasons)))


@pytest.mark.parametrize(
    "end", ["", '{"index": 7, "sh', '{"index": 7, "sh{"index": 8}\n', "[1]\n", '{"index": null}\n', "\xff\n"]
)
def test_a_damaged_list_is_continued(end: str, tmp_path: Path) -> None:
    (tmp_path / "bad_samples.jsonl").write_text('{"index": 3}\n' + end, encoding="latin-1")
    merged(BadSampleLog(tmp_path, 0.5), bad_batch([3, 4]))
    merged(BadSampleLog(tmp_path, 0.5), bad_batch([3, 4, 5]))
    assert [record["index"] for _, record in records(tmp_path / "bad_samples.jsonl", "index")] == [3, 4, 5]
