"""DeepSpeed's engine around the encoders and their optimizer."""

import copy
from collections import defaultdict
from typing import Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import zero_stage
from neuclip_ds.engine.lamb import Lamb
from neuclip_ds.engine.loss_scale import install_loss_scale
from neuclip_ds.engine.optimizers import build_optimizer
from neuclip_ds.engine.zero import keep_frozen_whole, placements, share_process_group, skip_unused_kernel
from neuclip_ds.errors import UserError


def check_engine_config(engine_config: dict[str, Any], name: str) -> None:
    """Raise `UserError` if DeepSpeed refuses its own part of the config that the run calls `name`; needs no rank."""
    one_rank = {**engine_config, "train_batch_size": engine_config["train_micro_batch_size_per_gpu"]}
    try:
        DeepSpeedConfig(copy.deepcopy(one_rank))
    except Exception as error:  # its parts raise errors of every kind
        raise UserError(f"DeepSpeed refuses deepspeed={name}: {' '.join(str(error).split())[:300]}") from error


def start_engine(
    model: nn.Module, config: OptimizerConfig, engine_config: dict[str, Any], communicator: Communicator
) -> Any:
    """Return the engine, with weights as they are and an optimizer without moments or learning rate yet.

    DeepSpeed's config is from `load_engine_config`. The engine shares the communicator's process group.
    """
    optimizer = build_optimizer(model, config)
    # without ZeRO, DeepSpeed fills a bf16 optimizer's state by a step with zero gradients, which would decay the
    # weights and count as the first: at a learning rate of zero it moves nothing, and what it leaves is forgotten
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    skip_unused_kernel()
    share_process_group(communicator)
    if zero_stage(engine_config) == 3:
        keep_frozen_whole(model, communicator)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_config)
    install_loss_scale(engine)
    optimizer.state.clear()
    if isinstance(optimizer, Lamb) and zero_stage(engine_config):
        parts: defaultdict[Tensor, list[slice]] = defaultdict(list)
        for place in placements(engine, communicator.rank):
            parts[place.master].append(place.elements)
        optimizer.shard(parts, communicator)
    return engine
