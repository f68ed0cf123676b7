"""The contrastive losses; importing this package does not import torch.

Start with contrastive_loss.py. It gathers the features (gather.py) and calls the method's loss function. A builder in
the file of the method's paper, such as fastclip.py, composes this function from global_contrastive.py (except for
SigLIP), pairs.py and temperature.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuclip_ds.losses.autograd import AutogradLoss, autograd_loss
    from neuclip_ds.losses.base import LossContext, LossFunction, LossOutput, Position, Stateful
    from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
    from neuclip_ds.losses.gather import GatheredFeatures
    from neuclip_ds.losses.indexed_dataset import IndexedDataset, add_index
    from neuclip_ds.losses.plugins import import_plugin, register_loss
    from neuclip_ds.losses.sample_store import SampleStore

_MODULES = {
    "AutogradLoss": "autograd",
    "ContrastiveLoss": "contrastive_loss",
    "GatheredFeatures": "gather",
    "IndexedDataset": "indexed_dataset",
    "LossContext": "base",
    "LossFunction": "base",
    "LossOutput": "base",
    "Position": "base",
    "SampleStore": "sample_store",
    "Stateful": "base",
    "add_index": "indexed_dataset",
    "autograd_loss": "autograd",
    "import_plugin": "plugins",
    "register_loss": "plugins",
}
__all__ = [
    "AutogradLoss",
    "ContrastiveLoss",
    "GatheredFeatures",
    "IndexedDataset",
    "LossContext",
    "LossFunction",
    "LossOutput",
    "Position",
    "SampleStore",
    "Stateful",
    "add_index",
    "autograd_loss",
    "import_plugin",
    "register_loss",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because torch takes seconds to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
