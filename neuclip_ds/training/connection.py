"""Joining the other ranks of a launch."""

from __future__ import annotations

from datetime import timedelta

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import complete_environment


def connect() -> Communicator:
    """Joins the process group, through DeepSpeed's discovery where MPI started the ranks."""
    complete_environment()
    accelerator = get_accelerator()
    deepspeed.init_distributed(accelerator.communication_backend_name(), timeout=timedelta(minutes=30), verbose=False)
    device = torch.device(accelerator.current_device_name())
    return Communicator("cpu" if device.type == "cpu" else device)
