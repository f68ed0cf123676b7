"""Check that the wheel contains all files that the programs need, so that they run without the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from small_runs import ROOT, SMALL, demo_shards, environment

SOURCES = ("pyproject.toml", "requirements.txt", "README.md", "neuclip_ds", "ds_configs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel's files; it is built from a copy, because builds add files to the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, checkout)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"  # as pip does
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    call = [sys.executable, "-m", "neuclip_ds", *arguments]
    variables = {**environment(), "PYTHONPATH": str(installed)}
    done = subprocess.run(call, env=variables, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_contains_every_file_of_the_package(installed: Path) -> None:
    kinds = (".py", ".yaml", ".typed")
    files = {}
    for root in (installed, ROOT):
        package = root / "neuclip_ds"
        files[root] = {path.relative_to(package) for path in package.rglob("*") if path.suffix in kinds}
    assert files[installed] == files[ROOT] and Path("recipes/demo.yaml") in files[installed]
    engines = {path.name: path.read_text() for path in (installed / "neuclip_ds" / "ds_configs").iterdir()}
    assert engines == {path.name: path.read_text() for path in (ROOT / "ds_configs").iterdir()}
    (entry,) = installed.glob("*.dist-info/entry_points.txt")
    assert "neuclip-ds = neuclip_ds.cli.main:main" in entry.read_text()


def test_the_wheel_requires_the_packages_of_the_checkout_except_those_of_tests() -> None:
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    assert sorted(filter(None, lines)) == sorted([*project["dependencies"], "hypothesis", "pytest", "scipy"])


@pytest.mark.slow
def test_commands_and_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "build-manifest" in run(installed, tmp_path, "--help")
    assert "name: demo" in run(installed, tmp_path, "train", "demo", "--print-config")
    data = demo_shards(tmp_path / "data", pairs=16)
    options = [f"--data.train={data}", "--data.batch-size=8", "--data.workers=1", "--max_steps=2", *SMALL]
    planned = run(installed, tmp_path, "train", "demo", "--dry-run", "--deepspeed=zero2_bf16", *options)
    assert "ZeRO 2 (zero2_bf16)" in planned
    run(installed, tmp_path, "train", "demo", *options)
    assert (tmp_path / "runs" / "demo" / "checkpoints" / "step_000000002").is_dir()
