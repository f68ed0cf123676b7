"""Which parameters of a dual encoder train, and at which share of the learning rate."""

from typing import NamedTuple

from torch import nn

from neuclip_ds.config import ModelConfig, OptimizerConfig, Trained
from neuclip_ds.errors import UserError
from neuclip_ds.models.layers import parameter_layers

TOWERS = ("vision", "text")


class Trainable(NamedTuple):
    """Numbers of parameters of a module."""

    trained: int
    frozen: int

    @staticmethod
    def of(module: nn.Module) -> "Trainable":
        """Count a module's parameters."""
        sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
        return Trainable(*(sum(size for size, trains in sizes if trains is wanted) for wanted in (True, False)))

    @property
    def total(self) -> int:
        return self.trained + self.frozen


def freeze(model: nn.Module, config: ModelConfig) -> None:
    """Turn off the gradients of what `model.vision.train` and `model.text.train` leave out.

    Args:
        model: has the towers `vision` and `text`.

    Raises:
        UserError: a tower has fewer blocks than are to train.
    """
    for name in TOWERS:
        _freeze(model.get_submodule(name), getattr(config, name).trained, name)


def lock_projection(tower: nn.Module, name: str) -> None:
    """Make the new projection of a frozen, pretrained tower the identity, which gives the tower's own feature (LiT).

    Raises:
        UserError: the projection is not square, so that random weights would be frozen.
    """
    projection = tower.get_submodule("projection")
    if not isinstance(projection, nn.Linear) or projection.in_features != projection.out_features:
        width = f"={projection.in_features}" if isinstance(projection, nn.Linear) else " to the tower's width"
        raise UserError(
            f"model.{name}.train=frozen would freeze the random projection of the {name} tower: set "
            f"model.{name}.train=0 to train it, or model.embed_dim{width}."
        )
    nn.init.eye_(projection.weight)


def _freeze(tower: nn.Module, trained: Trained, name: str) -> None:
    if trained == "all":
        return
    if trained == "frozen":
        tower.requires_grad_(False)
        return
    layers = parameter_layers(tower, name)
    blocks = len(layers) - 2
    if trained > blocks:
        raise UserError(
            f"model.{name}.train={trained}, but the tower has {blocks} blocks; use at most {blocks}, or all."
        )
    for parameter in (parameter for layer in layers[: blocks + 1 - trained] for parameter in layer):
        tower.get_parameter(parameter).requires_grad_(False)


def learning_rate_scales(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    """Return factors on the schedule's learning rate by parameter; those that are absent have 1.

    Args:
        model: has the towers `vision` and `text` where the config has rates of theirs.
    """
    scales: dict[str, float] = {}
    for name in TOWERS:
        rates = getattr(config, name)
        rate = rates.lr / config.lr if rates.lr else 1.0
        if rates.layer_decay < 1:
            layers = parameter_layers(model.get_submodule(name), name)
            for distance, layer in enumerate(reversed(layers)):  # from the end of the tower
                scales |= dict.fromkeys((f"{name}.{one}" for one in layer), rate * rates.layer_decay**distance)
        elif rate != 1:
            scales |= {f"{name}.{one}": rate for one, _ in model.get_submodule(name).named_parameters()}
    return scales
