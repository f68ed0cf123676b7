"""DeepSpeed's engine around the encoders and their optimizer."""

from collections import defaultdict
from typing import Any

import deepspeed
from torch import Tensor, nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import zero_stage
from neuclip_ds.engine.lamb import Lamb
from neuclip_ds.engine.optimizers import build_optimizer
from neuclip_ds.engine.zero import placements, skip_unused_kernel


def start_engine(
    model: nn.Module, config: OptimizerConfig, engine_config: dict[str, Any], communicator: Communicator
) -> Any:
    """Return the engine, with weights as they are and an optimizer without moments or learning rate yet.

    DeepSpeed's config is from `load_engine_config`. DeepSpeed joins the process group of the communicator's ranks.
    """
    optimizer = build_optimizer(model, config)
    # without ZeRO, DeepSpeed fills a bf16 optimizer's state by a step with zero gradients, which would decay the
    # weights and count as the first: at a learning rate of zero it moves nothing, and what it leaves is forgotten
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    skip_unused_kernel()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_config)
    optimizer.state.clear()
    if isinstance(optimizer, Lamb) and zero_stage(engine_config):
        parts: defaultdict[Tensor, list[slice]] = defaultdict(list)
        for place in placements(engine, communicator.rank):
            parts[place.master].append(place.elements)
        optimizer.shard(parts, communicator)
    return engine
