"""Run `neuclip-ds build-manifest` as users do: alone, under mpirun, again after a kill, and with mistakes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from servers import files_server, wait_for
from small_runs import ROOT, call, environment, start
from tars import write_pairs

from neuclip_ds.cli.main import main
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.manifest_file import load_manifest
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("tool") / "shards", [3, 2, 4, 1, 5])


def mpirun(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    launcher = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    command = [launcher, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    command += [sys.executable, str(ROOT / "tools" / "build_manifest.py"), *options]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_ranks_of_mpirun_build_one_manifest(folder, tmp_path, ranks):
    done = mpirun(ranks, str(tmp_path / "m"), str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("15 samples") == 1
    expected = build_manifest(resolve_shards(str(folder)), 1, options=ScanOptions(checksum=True))
    assert load_manifest(tmp_path / "m").shards == expected.shards
    if ranks == 4:
        again = mpirun(ranks, str(tmp_path / "m"), str(folder))
        assert again.returncode != 0
        assert again.stderr.count("error: ") == 1
        assert "contains a manifest" in again.stderr


def test_counts_from_side_files_need_no_shards(folder, tmp_path, capsys, caplog):
    with files_server() as server:
        for path, n in zip(sorted(folder.glob("*.tar")), [3, 2, 4, 1, 5], strict=True):
            server.files[path.name] = path.read_bytes()
            server.files[f"{path.stem}_stats.json"] = b'{"successes": %d}' % n
        del server.files["00002_stats.json"]
        source = server.url("{00000..00004}.tar")
        main(["build-manifest", str(tmp_path / "m"), source, "--from-side-files", "--skip-unreadable", "--processes=1"])
    assert "11 samples" in capsys.readouterr().out
    assert "1 of 5 shards cannot be used and are omitted" in caplog.text
    assert not [name for name in server.gets if name.endswith(".tar")]
    assert load_manifest(tmp_path / "m").sizes.tolist() == [3, 2, 1, 5]


def scanned_shards(folder: Path) -> int:
    """Return the number of shards for which an unfinished build has stored results."""
    return sum(path.read_bytes().count(b".tar") for path in folder.glob(".building/*"))


def test_a_killed_build_is_finished_by_the_same_command(folder, tmp_path):
    """The build is killed while its last download stalls."""
    with files_server() as server:
        server.files["last.tar"] = (write_pairs(tmp_path / "last", [7]) / "00000.tar").read_bytes()
        server.gate.clear()
        sources = [str(folder), server.url("last.tar")]
        command = ["tools/build_manifest.py", str(tmp_path / "m"), *sources, "--processes=1"]
        (program,) = start(*command)
        wait_for(lambda: scanned_shards(tmp_path / "m") == 5)
        program.kill()
        assert not (tmp_path / "m" / "shards.parquet").exists()
        server.gate.set()
        done = call(*command)
    assert "22 samples (0 known to be bad), 6 shards of" in done.stdout
    assert "6/6" in done.stderr
    assert load_manifest(tmp_path / "m").has_checksums


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["absent"], "absent does not exist"),
        (["{folder}", "--captions", "jpg"], "captions (data.captions or --captions): use txt, txt:lines, json:KEY"),
        (["{folder}", "--processes=-1"], "'-1' is not a positive integer"),
        (["{folder}", "--uids", "absent.npy"], "The uid file absent.npy cannot be read"),
    ],
)
def test_mistakes_are_reported_in_one_line(folder, tmp_path, options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["build-manifest", str(tmp_path / "m"), *(option.format(folder=folder) for option in options)])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
