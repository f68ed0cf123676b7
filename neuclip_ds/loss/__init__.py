"""The training objectives as a loss module for other training loops."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuclip_ds.loss.contrastive_loss import ContrastiveLoss
    from neuclip_ds.loss.index import IndexedDataset, add_index

__all__ = ["ContrastiveLoss", "IndexedDataset", "add_index"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because the trainer needs only two_pass.py."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'contrastive_loss' if name == 'ContrastiveLoss' else 'index'}"), name)
