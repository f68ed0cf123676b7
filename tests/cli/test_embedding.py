"""embed, filter and nearest as a user calls them: with a pretrained model, on two ranks, killed and started again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from embedded_shards import members
from miniatures import save_open_clip
from small_runs import call, start
from tars import write_tar

from neuclip_ds.cli.main import main
from neuclip_ds.data.manifest import load_manifest
from neuclip_ds.embedding.parts import Parts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and 40 shards of 15 samples."""
    folder = tmp_path_factory.mktemp("place")
    save_open_clip(folder / "model")
    (folder / "shards").mkdir()
    for shard in range(40):
        samples = {n: members(n) for n in range(15 * shard, 15 * shard + 15)}
        named = [(f"{n:05d}.{name}", data) for n, sample in samples.items() for name, data in sample.items()]
        write_tar(folder / "shards" / f"{shard:05d}.tar", named)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


@pytest.mark.slow
def test_killed_and_started_again_on_two_ranks_the_files_are_the_same(place: Path, tmp_path: Path) -> None:
    options = ["--batch-size=8", "--workers=1"]
    whole = call("tools/embed.py", "model", "shards", f"--out={tmp_path}/whole", *options, folder=place)
    assert whole.returncode == 0, whole.stderr
    assert "600 samples of 40 shards" in whole.stdout and "samples/s" in whole.stdout
    killed = start("tools/embed.py", "model", "shards", f"--out={tmp_path}/out", *options, folder=place, ranks=2)
    deadline = time.monotonic() + 120
    while len(contents(tmp_path / "out")) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    for program in killed:
        program.kill()
        program.wait()
    assert 4 <= len(contents(tmp_path / "out")) < 40
    again = call("tools/embed.py", "model", "shards", f"--out={tmp_path}/out", *options, folder=place, ranks=2)
    assert again.returncode == 0, again.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    other = call("tools/embed.py", "model", "shards", f"--out={tmp_path}/out", "--dtype=float32", folder=place)
    assert other.returncode == 2 and "choose another --out" in other.stderr


@pytest.mark.slow
def test_from_features_to_a_data_set_and_a_search(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(place)
    done = call("tools/embed.py", "model", "shards", f"--out={tmp_path}/out", "--format=npy", folder=place)
    assert done.returncode == 0, done.stderr
    main(["filter", f"{tmp_path}/out", "--top=0.1", f"--out={tmp_path}/kept.npy"])
    assert "60 uids of 600 samples" in capsys.readouterr().out
    assert len(np.load(tmp_path / "kept.npy")) == 60
    main(["build-manifest", f"{tmp_path}/manifest", "shards", "--uids", f"{tmp_path}/kept.npy", "--processes=1"])
    assert load_manifest(tmp_path / "manifest").n == 60
    capsys.readouterr()
    (tmp_path / "picture.jpg").write_bytes(members(123)["jpg"])
    for index in ([], ["--faiss=Flat"]):
        main(["nearest", f"{tmp_path}/out", f"--image={tmp_path}/picture.jpg", "--count=3", *index])
        _, head, first, *rest = capsys.readouterr().out.splitlines()
        assert head.split("\t") == ["similarity", "index", "key", "uid"]
        assert first.split("\t")[:3] == ["1.0000", "123", "00123"] and len(rest) == 2
    assert json.loads((tmp_path / "out" / "embedding.json").read_text())["model"] == "model"
    assert Parts(tmp_path / "out").numbers == list(range(40))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["filter", "x", "--out=y"], "Nothing says what to keep: set --min, --max or --top."),
        (["filter", "x", "--out=y", "--top=20"], "--top=20 is no share of the samples"),
        (["filter", "x", "--out=y", "--min=1"], "x is no parquet file"),
        (["nearest", "x"], "Nothing to search for: give --text or --image."),
        (["nearest", "x", "--text=a"], "x holds no features"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
