"""Joining the other ranks of a launch, to use a model without training it."""

from __future__ import annotations

from datetime import timedelta

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import read_environment


def connect() -> Communicator:
    """The ranks of the launch, through DeepSpeed's discovery where MPI started them; alone without a launcher."""
    environment = read_environment()
    if environment.world_size == 1:
        return Communicator("cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed  # takes seconds, and on CPUs may build an extension
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    deepspeed.init_distributed(accelerator.communication_backend_name(), timeout=timedelta(minutes=30), verbose=False)
    device = torch.device(accelerator.current_device_name())
    return Communicator("cpu" if device.type == "cpu" else device)
