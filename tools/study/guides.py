"""Saved runs that guide later runs, which use their features as those of a reference model or of a teacher.

A run that is saved writes its heads to a file; a later run loads them and encodes its own pairs, once.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from neuclip_ds.errors import UserError
from study.features import Pairs

if TYPE_CHECKING:
    from study.loop import Run, Trained


@dataclass(frozen=True, kw_only=True)
class Guide:
    """The features that a saved run computes for pairs, without dropout."""

    image: Tensor
    """(crops, images, D) features of images"""
    text: Tensor
    """(n, D) features of captions"""
    image_of: Tensor
    """(n,): the image of each caption"""
    tau: float
    """Temperature at the end of the run."""

    def rows(self, crop: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (b, D) features of a batch's crops of images, and of its captions."""
        return self.image[crop, self.image_of[index]], self.text[index]


def guide_path(folder: Path, name: str) -> Path:
    """Return the file with the heads of a saved run."""
    return folder / f"{name}.safetensors"


def save_guide(path: Path, trained: "Trained", run: "Run") -> None:
    """Write the heads of a run that has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"run": json.dumps(asdict(run)), "tau": str(trained.results["tau"])}
    save_file(trained.heads.state_dict(), path, metadata)


@torch.no_grad()
def load_guide(path: Path, pairs: Pairs) -> Guide:
    """Return the features that a saved run computes for pairs.

    Raises:
        UserError: the run has not been saved.
    """
    from study.loop import Heads, Run  # which imports this module

    if not path.is_file():
        raise UserError(f"{path} does not exist: first run the stage that saves it, with the same --out.")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, safe_open is no mapping
    heads = Heads(pairs, Run(**json.loads(metadata["run"])))
    heads.load_state_dict(weights)
    heads.eval()
    images: list[Tensor] = []
    for crop in pairs.image:
        image, _ = heads(crop, pairs.text[:1])
        images.append(image)
    _, text = heads(pairs.image[0, :1], pairs.text)
    return Guide(image=torch.stack(images), text=text, image_of=pairs.image_of, tau=float(metadata["tau"]))
