"""The objectives as a loss for other training loops."""

from neuclip_ds.loss.contrastive_loss import ContrastiveLoss
from neuclip_ds.loss.index import IndexedDataset, add_index

__all__ = ["ContrastiveLoss", "IndexedDataset", "add_index"]
