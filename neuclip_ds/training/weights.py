"""The encoders' weights out of a checkpoint, whatever ZeRO stage and world size wrote it."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.training.checkpoint import weights_only


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the `DualEncoder`.

    Parameters are the float32 masters under ZeRO 2 and 3, and what the engine computes with under ZeRO 0 and 1.

    Args:
        checkpoint: a folder `step_...` of a run.

    Raises:
        UserError: it has no weights, or its files hold more than tensors.
    """
    plain = checkpoint / "engine" / "mp_rank_00_model_states.pt"
    try:
        with weights_only():
            if plain.is_file() and not any(plain.parent.glob("zero_pp_rank_*")):
                return dict(torch.load(plain, map_location="cpu")["module"])
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="engine"))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{checkpoint} has no weights; name the folder of a complete checkpoint.") from error
    except pickle.UnpicklingError as error:
        raise UserError(f"The checkpoint {checkpoint} holds more than tensors, so it is not loaded.") from error
