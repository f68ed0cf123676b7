"""The tower and the evaluation of docs/explanation/architecture.md, as a user writes them."""

import re
from pathlib import Path

import pytest
import torch
from small_runs import call

from neuclip_ds.config import VisionConfig
from neuclip_ds.losses import import_plugin
from neuclip_ds.models.image_models import new_vision_tower
from neuclip_ds.reporting.metrics import read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "architecture.md"
SCRIPT = """
import neuclip_ds

run = neuclip_ds.train(
    "demo",
    hooks=[LogUniformity(every=1)],
    run={{"name": "page", "plugins": ["conv_tower.py"]}},
    data={{"train": "{shards}", "val": "", "zero_shot": "", "batch_size": 8, "workers": 0}},
    model={{
        "vision": {{"name": "conv_tower", "image_size": 16, "options": None}},
        "text": {{"width": 16, "layers": 1, "heads": 2, "vocab_size": 300}},
        "embed_dim": 16,
    }},
    max_steps=2,
)
assert neuclip_ds.load(run.folder).encode_texts(["a red circle"]).shape == (1, 16)
"""


def write_block(heading: str, file: Path, more: str = "") -> None:
    """Write the Python code below a heading of the page to a file."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    file.write_text(code + more, encoding="utf-8")


def test_the_tower_of_a_plugin_is_built_like_those_of_timm(tmp_path: Path) -> None:
    write_block("Add a tower", tmp_path / "conv_tower.py")
    import_plugin(str(tmp_path / "conv_tower.py"))
    config = VisionConfig(name="conv_tower", image_size=16, options={"width": 8})
    tower = new_vision_tower(config, embed_dim=4)
    assert tower(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, 4)


@pytest.mark.slow  # 20 s of CPU; the fast test above builds the tower, and test_docs.py runs the hook's code
def test_a_run_trains_the_tower_and_logs_the_evaluation(tmp_path: Path, shards: Path) -> None:
    write_block("Add a tower", tmp_path / "conv_tower.py")
    write_block("Add an evaluation", tmp_path / "train.py", SCRIPT.format(shards=shards))
    call(str(tmp_path / "train.py"), folder=tmp_path)
    records = read_metrics(tmp_path / "runs" / "page" / "metrics.jsonl")
    assert [record["step"] for record in records if "uniformity" in record] == [0, 1]
