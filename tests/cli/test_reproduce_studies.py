"""`neuclip-ds reproduce methods`: mistakes in its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip_ds.cli.reproduce import main
from neuclip_ds.cli.reproduce_studies import chosen
from neuclip_ds.errors import UserError


def test_runs_start_from_one_model(tmp_path: Path) -> None:
    options = ["methods", str(tmp_path), "--packaged-towers", f"--pretrained={tmp_path}", f"--out={tmp_path}/out"]
    with pytest.raises(UserError, match=r"both name what runs start from; give one of them\.$"):
        main(options)
    assert not (tmp_path / "out").exists()


def test_arms_are_chosen_by_name() -> None:
    assert chosen(["siglip"]) == ["siglip"]
    with pytest.raises(UserError, match="Unknown arm siglipp; did you mean siglip"):
        chosen(["siglipp"])
