"""`neuclip-ds pack` with worker processes: what it prints, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from tars import jpeg

from neuclip_ds.cli.main import main


def test_a_table_is_packed_by_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.csv").write_text("path,caption\n" + "".join(f"{n}.jpg,caption {n}\n" for n in range(25)))
    for number in range(24):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    out = tmp_path / "out"
    options = ["pack", str(tmp_path / "pairs.csv"), str(out), "--processes=2"]
    main([*options, "--shard_size=8"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}: 24 of 25 rows in 3 shards; ")
    assert f"1 rows could not be used (image cannot be read 1); {out}/broken.jsonl lists them." in printed
    assert sorted(path.name for path in out.glob("*.tar")) == ["00000.tar", "00001.tar", "00002.tar"]
    for wrong, message in (("--shard-size=9", "name another folder."), ("--shard-size=0", "must be at least 1.")):
        with pytest.raises(SystemExit):
            main([*options, wrong])
        assert capsys.readouterr().err.endswith(f"{message}\n")
