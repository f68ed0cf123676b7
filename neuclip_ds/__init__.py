"""Large-scale CLIP training on DeepSpeed: OpenCLIP, SigLIP, FastCLIP, AmorLIP, NeuCLIP and TuneCLIP in one system.

The names in `__all__` are the stable interface; everything else, such as `neuclip_ds.losses.LossFunction`, may change.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuclip_ds.api import Model, Run, load, train
    from neuclip_ds.config import Config
    from neuclip_ds.errors import TrainingDiverged, UserError
    from neuclip_ds.losses import ContrastiveLoss, IndexedDataset, add_index, autograd_loss, register_loss
    from neuclip_ds.section import Section
    from neuclip_ds.training.hooks import Hook

__all__ = [
    "Config",
    "ContrastiveLoss",
    "Hook",
    "IndexedDataset",
    "Model",
    "Run",
    "Section",
    "TrainingDiverged",
    "UserError",
    "add_index",
    "autograd_loss",
    "load",
    "register_loss",
    "train",
]
_MODULES = {  # imported when first used, because torch takes seconds to import
    "Config": "config",
    "ContrastiveLoss": "losses",
    "Hook": "training.hooks",
    "IndexedDataset": "losses",
    "Model": "api",
    "Run": "api",
    "Section": "section",
    "TrainingDiverged": "errors",
    "UserError": "errors",
    "add_index": "losses",
    "autograd_loss": "losses",
    "load": "api",
    "register_loss": "losses",
    "train": "api",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("neuclip_ds")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)
