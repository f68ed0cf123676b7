"""tools/pack.py as a user calls it."""

from __future__ import annotations

from pathlib import Path

from small_runs import call
from tars import jpeg


def test_a_table_is_packed_by_processes_and_trained_on(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("path,caption\n" + "".join(f"{n}.jpg,caption {n}\n" for n in range(25)))
    for number in range(24):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    options = ["pairs.csv", "out", "--shard-size=8", "--processes=2"]
    done = call("tools/pack.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out: 24 of 25 rows in 3 shards; ")
    assert "1 rows could not be used (image cannot be read 1); out/broken.jsonl lists them." in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["00000.tar", "00001.tar", "00002.tar"]
    again = call("tools/pack.py", *options, "--shard-size=9", folder=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1), again.stderr
