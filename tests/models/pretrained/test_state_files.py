"""Read the weights in files as other training programs write them."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.files import read_tensors

NAMES = ("logit_scale", "visual.conv1.weight", "token_embedding.weight")
STATE = {name: torch.full((2,), float(number)) for number, name in enumerate(NAMES)}


def saved(folder: Path, content: Any) -> Path:
    path = folder / "epoch_5.pt"
    torch.save(content, path)
    return path


def replace_in_pickle(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes in the pickle of a torch file."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if name.endswith("data.pkl"):
                assert old in data
                data = data.replace(old, new)
            archive.writestr(name, data)


def training_checkpoint(number: Any) -> dict[str, Any]:
    """Return a checkpoint of open_clip or FastCLIP, whose schedulers set the learning rate to a numpy scalar."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer.param_groups[0]["lr"] = number
    state = {f"module.{name}": tensor for name, tensor in STATE.items()}
    return {"epoch": 5, "name": "run", "state_dict": state, "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), np.int64(5), np.bool_(True)], ids=repr)
def test_a_training_checkpoint_with_numpy_scalars_is_read(number: Any, tmp_path: Path) -> None:
    """Checkpoints from the installed version of numpy, and from versions 1 and 2, are read."""
    path = saved(tmp_path, training_checkpoint(number))
    assert_equal(read_tensors(path))
    current = type(number).__reduce__(number)[0].__module__.encode()
    for module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        path = saved(tmp_path, training_checkpoint(number))
        replace_in_pickle(path, b"c" + current + b"\nscalar", b"c" + module + b"\nscalar")
        assert_equal(read_tensors(path))


def assert_equal(state: dict[str, Tensor]) -> None:
    assert state.keys() == STATE.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in STATE.items())


def renamed(change: Callable[[str], str]) -> dict[str, Tensor]:
    return {change(name): tensor for name, tensor in STATE.items()}


@pytest.mark.parametrize(
    "content",
    [
        renamed(lambda name: f"module.{name}"),
        renamed(lambda name: f"_orig_mod.{name}"),
        renamed(lambda name: f"module._orig_mod.{name}"),
        renamed(lambda name: f"_orig_mod.module.{name}"),
        renamed(lambda name: name.replace("visual.", "visual._orig_mod.")),  # one compiled tower
        {"state_dict": renamed(lambda name: f"model.{name}"), "pytorch-lightning_version": "2.6"},
        {"state_dict": renamed(lambda name: f"model._orig_mod.{name}")},
        {"model": STATE, "epoch": 3},
        {"model_state_dict": STATE},
        {"module": STATE, "global_steps": 7},
    ],
    ids=lambda content: str(next(iter(content))),
)
def test_the_wrappings_of_training_programs_are_removed(content: dict[str, Any], tmp_path: Path) -> None:
    assert_equal(read_tensors(saved(tmp_path, content)))


def test_the_wrappings_are_removed_in_safetensors_too(tmp_path: Path) -> None:
    save_file(renamed(lambda name: f"module._orig_mod.{name}"), tmp_path / "model.safetensors")
    assert_equal(read_tensors(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("content", "contents"),
    [
        ({"epoch": 3, "optimizer": {"lr": 0.1}}, "the keys epoch, optimizer"),
        ({"model": {"config": {"width": 3}}}, "the keys config"),
        ({}, "nothing"),
        ([torch.zeros(2)], "a list"),
    ],
)
def test_a_file_without_weights_is_refused_by_name(content: Any, contents: str, tmp_path: Path) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(UserError) as caught:
        read_tensors(path)
    assert f"{path} contains {contents} instead of a state dict;" in str(caught.value)
