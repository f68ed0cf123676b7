"""The cold-start study's records, and the page that is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.reproduction.cold_start import VARIANTS, Job
from neuclip_ds.reproduction.cold_start_record import Record, read_records, record_of, write_records
from neuclip_ds.reproduction.cold_start_report import COMPARED, START, write
from neuclip_ds.reproduction.report import RECALLS


def test_record_of_a_run(tmp_path: Path) -> None:
    job = Job(
        "tune/TuneCLIP/seed2", "tuneclip", 2, "test", {"recovery.reuse": tmp_path / "runs/a", "optimizer.lr": 1e-4}
    )
    point = {**dict.fromkeys(RECALLS, 0.25), "zero_shot_top1": 0.125}
    record = record_of(job, {"step_ms": 3.0, "loss": 1.0}, [(4, point)], tmp_path)
    kept = {"recovery.reuse": "runs/a", "optimizer.lr": 1e-4, "data.train": "train"}
    assert record == Record(job.name, 2, kept, {"step_ms": 3.0}, [4], [25.0], [12.5])
    assert record_of(job, {}, [(4, point)], tmp_path).recall == [], "a run that diverged has no scores"


def test_records_return_from_their_file(tmp_path: Path) -> None:
    records = [
        Record("tune/A/seed0", 0, {"a": [1]}, {"b": 0.5}, [0], [1.0], [2.0]),
        Record("nearest/A/seed1", 1, {}, {}),
    ]
    write_records(tmp_path / "records.jsonl", records)
    assert read_records(tmp_path / "records.jsonl") == records
    (tmp_path / "records.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match="no records of the study"):
        read_records(tmp_path / "records.jsonl")


def tuned(name: str, seed: int, recall: list[float]) -> Record:
    half = [value / 2 for value in recall]
    return Record(f"tune/{name}/seed{seed}", seed, {"optimizer.lr": 1e-4}, {}, [0, 5, 10], recall, half)


def test_page(tmp_path: Path) -> None:
    records = [
        Record("pretrain/seed1", 1, {}, {"step_ms": 1.0}),
        Record("tune-search/TuneCLIP/lr0.0001", 0, {"optimizer.lr": 1e-4}, {}, [10], [61.234], [0.0]),
        Record("tune-search/TuneCLIP/lr0.001", 0, {"optimizer.lr": 1e-3}, {}),
    ]
    for seed in (1, 2, 3):
        records += [
            tuned("TuneCLIP", seed, [50.0, 45.0 + seed, 52.0 + seed]),
            tuned("FastCLIP, constant tau", seed, [50.0, 45.0, 50.0]),
            tuned("TuneCLIP, margin 0.2", seed, [50.0, 50.0])._replace(step=[0, 10]),
            Record(f"recover/full/seed{seed}", seed, {}, {"normalizer_mse": 0.25}),
            Record(f"difference/cached/seed{seed}", seed, {}, {"log_u_rms": 0.1 * seed}),
            Record(f"nearest/{START}/seed{seed}", seed, {}, {"a": 0.5, "b": 0.25, "c": 0.125, "d": 0.1}),
        ]
    text = write(records, tmp_path, "A study")
    assert text == (tmp_path / "tuneclip.md").read_text()
    # three differences 2, 3, 4 from the start: 3 and 4.303 / sqrt(3)
    assert "| TuneCLIP | 0.0001 | 50.00 ± 0.00 | -3.00 ± 2.48 | +4.00 ± 2.48 | +4.00 ± 2.48 | +2.00 ± 1.24 |" in text
    assert f"| TuneCLIP better than its checkpoint | TuneCLIP | {START} | +4.00 ± 2.48 | holds |" in text
    assert "| better than FastCLIP's fine-tuning | TuneCLIP | FastCLIP, constant tau | +4.00 ± 2.48 | holds |" in text
    assert "| TuneCLIP | 61.23 | 0.00 |" in text, "a run that diverged counts as zero"
    assert "| full | 0.25 ± 0.00 |" in text
    assert "| TuneCLIP, margin 0.2 | 0.0001 | 50.00 ± 0.00 | - | - | +0.00 ± 0.00 | +0.00 ± 0.00 |" in text
    assert "| log_u_rms | 0.200 ± 0.100 |" in text
    assert f"| {START} | 0.5000 ± 0.0000 |" in text
    assert "OpenCLIP" not in text, "claims about variants that have not run are omitted"
    assert (tmp_path / "tuneclip.png").stat().st_size > 5000
    assert 'src="tuneclip.png"' in (tmp_path / "tuneclip.html").read_text()


def test_page_of_the_docs_has_the_tables_of_its_records(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "explanation/cold_start.md").read_text(encoding="utf-8").splitlines()
    records = read_records(docs / "reference/tuneclip_study.jsonl")
    rows = [line for line in write(records, tmp_path, "The study").splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    assert [row for row in rows if row not in page] == []


def test_compared_variants_exist() -> None:
    assert {name for _, *pair in COMPARED for name in pair} <= {START, *VARIANTS}
