"""`neuclip-ds reproduce tuneclip`: mistakes in its options, and the tables of a study that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip_ds.cli.reproduce import main
from neuclip_ds.cli.reproduce_tuneclip import chosen
from neuclip_ds.errors import UserError
from neuclip_ds.reproduction.cold_start import VARIANTS
from neuclip_ds.reproduction.cold_start_record import Record, write_records


def test_tables_of_a_study_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Record("tune/TuneCLIP/seed1", 1, {"optimizer.lr": 1e-4}, {}, [0, 9], [50.0, 51.0], [20.0, 19.5])
    write_records(tmp_path / "study.jsonl", [run])
    main(["tuneclip", "--results", str(tmp_path / "study.jsonl"), "--out", str(tmp_path / "page")])
    assert "| TuneCLIP | 0.0001 | 50.00 | - | - | +1.00 | -0.50 |" in capsys.readouterr().out
    assert (tmp_path / "page" / "tuneclip.html").is_file()


def test_variants_are_chosen_by_name() -> None:
    assert chosen(None) == list(VARIANTS)
    assert chosen(["OpenCLIP"]) == ["OpenCLIP"]
    with pytest.raises(UserError, match="Unknown variant OpenClip"):
        chosen(["OpenClip"])
