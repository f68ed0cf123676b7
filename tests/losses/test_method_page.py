"""The page about losses lists every method in its table, and the example method that it adds works."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from build import build_loss, call, pairs, relative_error
from small_runs import ROOT, SMALL, demo_shards, environment

from neuclip_ds.losses import LossContext, LossFunction
from neuclip_ds.losses.methods import METHODS
from neuclip_ds.losses.options import ObjectiveConfig

PAGE = (ROOT / "docs/reference/losses.md").read_text(encoding="utf-8")
LESSON = PAGE.partition("## Adding a method")[2]
CODE = re.findall(r"```python\n# neuclip_ds/losses/(\w+\.py)\n(.*?)```", LESSON, re.DOTALL)
# the lines of the package's files before which the page's lines are inserted, in the order of the page
ANCHORS = [
    "from neuclip_ds.losses.siglip_options import SiglipConfig\n",
    "    siglip: SiglipConfig =",
    "    siglip_options,\n",
    "    **siglip_options.METHODS,\n",
]


def test_the_pages_table_lists_the_methods() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(?: [^|]+ \|){4}$", PAGE, re.MULTILINE)
    assert rows == list(METHODS), "one row for each method, in the order of neuclip_ds/losses/methods.py"


def test_the_added_method_has_the_gradient_of_its_equation() -> None:
    code = dict(CODE)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code["offset_options.py"], "offset_options.py", "exec"), names)
    exec(compile(code["offset.py"], "offset.py", "exec"), names)
    assert names["METHODS"]["offset"].builder == "offset.offset"

    def build(config: ObjectiveConfig, context: LossContext) -> LossFunction:
        with_options = config.model_copy(update={"offset": names["OffsetConfig"](log_c=2.0)})
        function: LossFunction = names["offset"](with_options, context)
        return function

    loss_fn = build_loss(build, temperature={"initial": 0.1, "rho": 6.5})
    image, text = (x.requires_grad_() for x in pairs(9, 6))
    result = call(loss_fn, image, text)
    tau = torch.tensor(0.1, dtype=torch.float64)
    c = tau.new_full((), 2.0).exp()
    loss = tau * (torch.log(c + oracle.mean_exponentials(image, text, tau)).mean(1).sum() + 2 * 6.5)
    image_gradient, text_gradient = torch.autograd.grad(loss, (image, text))
    assert relative_error(result.loss, loss.detach()) < 1e-10
    assert relative_error(result.image, image_gradient) < 1e-10
    assert relative_error(result.text, text_gradient) < 1e-10


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package, add the page's two files, and insert its lines into the tables."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("neuclip_ds", "ds_configs"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    losses = folder / "neuclip_ds/losses"
    anchors = iter(ANCHORS)
    for name, code in CODE:
        path = losses / name
        if not path.exists():
            path.write_text(code)
            continue
        anchor = next(anchors)
        before = path.read_text()
        assert before.count(anchor) == 1
        path.write_text(before.replace(anchor, code + anchor))
    assert not list(anchors)
    return folder


def run_python(extended: Path, *arguments: str) -> None:
    variables = {**environment(), "PYTHONPATH": str(extended)}
    done = subprocess.run([sys.executable, *arguments], cwd=extended, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_added_method_trains_alike_on_one_rank_and_two(extended: Path, tmp_path: Path) -> None:
    shards = demo_shards(tmp_path / "demo", 64)
    options = ["demo", *SMALL, "--objective.method=offset", "--objective.offset.log_c=2", "--run.log_every=1"]
    options += [f"--data.train={shards}", "--data.val=", "--data.zero_shot=", "--data.batch_size=16"]
    options += ["--data.workers=0", "--data.crop_scale=1", "--max_steps=4", "--deepspeed=zero1_fp32"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    results: list[list[tuple[float, float]]] = []
    for name, launcher in (("one", []), ("two", launch)):
        run_python(extended, *launcher, "train.py", *options, f"--run.output_dir={tmp_path}", f"--run.name={name}")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps = []
        for record in map(json.loads, lines):
            if "loss" in record:
                steps.append((record["loss"], record["tau"]))
        results.append(steps)
    one_rank, two_ranks = results
    assert len(one_rank) == 4
    for one, two in zip(one_rank, two_ranks, strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert one_rank[0][0] != one_rank[-1][0]
