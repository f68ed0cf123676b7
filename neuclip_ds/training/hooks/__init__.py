"""What happens around training steps, one hook a concern."""

from neuclip_ds.training.hooks.base import Hook

__all__ = ["Hook"]
