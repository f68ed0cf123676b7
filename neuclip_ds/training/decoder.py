"""The decoder of a run's images: chosen when the run starts, kept by its checkpoints."""

from neuclip_ds.config import Config
from neuclip_ds.data import decoders
from neuclip_ds.training.data_order import SavedOrder

_EARLIER = "pil"  # of runs whose checkpoints do not tell


def with_decoder(config: Config, saved: SavedOrder | None) -> Config:
    """Return the config with a decoder: the one that it names, else that of the checkpoint, else that of new runs."""
    kept = decoders.DEFAULT if saved is None else saved.facts.get("decoder", _EARLIER)
    return config.model_copy(update={"data": config.data.model_copy(update={"decoder": config.data.decoder or kept})})
