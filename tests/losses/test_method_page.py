"""The page about losses lists every method in its table, and the example method that it adds works."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import ROOT, SMALL, demo_shards, environment

from neuclip_ds.losses.methods import METHODS

OBJECTIVES = Path("neuclip_ds/objectives")
PAGE = (ROOT / "docs/reference/losses.md").read_text(encoding="utf-8")


def test_the_pages_table_lists_the_methods() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(?: [^|]+ \|){4}$", PAGE, re.MULTILINE)
    assert rows == list(METHODS), "one row for each method, in the order of neuclip_ds/losses/methods.py"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package and insert the page's estimator, options and entry in the table of methods."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("neuclip_ds", "ds_configs"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    lesson = PAGE.partition("## Adding a method")[2]
    estimator, options, section, row = re.findall(r"```python\n(?:# neuclip_ds\S+\n)?(.*?)```", lesson, re.DOTALL)
    (folder / OBJECTIVES / "normalizers/offset.py").write_text(estimator)
    for name, text, before in (
        ("options.py", f"{options}\n\n", "class ObjectiveConfig(Section):\n"),
        ("options.py", section, "    siglip: SiglipConfig ="),
        ("methods.py", row, '    "siglip": Method('),
    ):
        path = folder / OBJECTIVES / name
        code = path.read_text()
        assert code.count(before) == 1
        path.write_text(code.replace(before, text + before))
    return folder


def call(extended: Path, *arguments: str) -> None:
    kept = {**environment(), "PYTHONPATH": str(extended)}
    done = subprocess.run([sys.executable, *arguments], cwd=extended, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_added_method_trains_alike_on_one_rank_and_two(extended: Path, tmp_path: Path) -> None:
    shards = demo_shards(tmp_path / "demo", 64)
    options = ["demo", *SMALL, "--objective.method=offset", "--objective.offset.log_c=2", "--run.log_every=1"]
    options += [f"--data.train={shards}", "--data.val=", "--data.zero_shot=", "--data.batch_size=16"]
    options += ["--data.workers=0", "--data.crop_scale=1", "--max_steps=4", "--deepspeed=zero1_fp32"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found = []
    for name, launcher in (("one", []), ("two", launch)):
        call(extended, *launcher, "train.py", *options, f"--run.output_dir={tmp_path}", f"--run.name={name}")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append([(record["loss"], record["tau"]) for record in map(json.loads, lines) if "loss" in record])
    assert len(found[0]) == 4
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert found[0][0][0] != found[0][-1][0]
