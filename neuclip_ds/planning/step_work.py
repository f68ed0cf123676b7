"""The work of a rank in a step of a config, for the cost model: counted without memory, data or other ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from neuclip_ds.config import Config
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.zero import ZeroRules
from neuclip_ds.objectives import build_objective
from neuclip_ds.planning.cost_model import Work
from neuclip_ds.planning.engine_traffic import TrainedShapes, engine_calls
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.planning.objective_cost import Build, ObjectiveQuery, objective_calls, objective_work


class CountedModel(NamedTuple):
    """Sizes and operations of the towers, whatever the batch."""

    shapes: TrainedShapes
    dim: int  # d of the features
    image_flops: float  # of one image's forward pass
    text_flops: float  # of one caption's


def count_model(config: Config) -> CountedModel:
    """Count the config's model on the meta device.

    Raises:
        UserError: its checkpoint cannot be found.
    """
    query = MemoryQuery(config, 1)
    return CountedModel(TrainedShapes.of(query.build()), query.source.embed_dim, *forward_flops(query))


def forward_flops(query: MemoryQuery) -> tuple[float, float]:
    """Return the operations of one image and of one caption; a backward pass takes twice those."""
    model, size = query.build(), query.source.preprocessing.size
    found = []
    with torch.device("meta"):
        image = torch.empty(1, 3, size, size, dtype=torch.uint8)
        tokens = torch.empty(1, query.tokenizer.context_length, dtype=torch.int64)
        for inputs in ((image, None), (None, tokens)):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(*inputs)
            found.append(float(counter.get_total_flops()))
    return found[0], found[1]


def step_work(config: Config, model: CountedModel, world_size: int, build: Build = build_objective) -> Work:
    """Return the work of one rank of `world_size`; `build` as for `ObjectiveQuery`.

    A forward pass counts once, a backward pass twice; with activation checkpointing, and with several micro-batches,
    the forward pass runs once more for each.
    """
    rows, micro = config.rank_batch(world_size), config.micro_batch(world_size)
    engine = load_engine_config(config, world_size)
    rules = ZeroRules.of(engine)
    comm_dtype, pieces = resolve_comm_dtype(config, engine), rows // micro
    passes = 3 + (pieces > 1) + config.model.activation_checkpointing
    query = ObjectiveQuery(config, world_size, rows, model.dim, comm_dtype, pieces, build)
    objective, calls = objective_work(query), objective_calls(query) if world_size > 1 else []
    return Work(
        tower_flops=passes * rows * (model.image_flops + model.text_flops),
        image_share=model.image_flops / (model.image_flops + model.text_flops),
        objective_flops=objective.flops,
        objective_elements=objective.elements,
        updated=model.shapes.total / (world_size if rules.stage else 1),
        hooks=len(model.shapes.sizes) if rules.stage == 3 else 0,
        calls=[*calls, *engine_calls(engine, config.optimizer.name, model.shapes, world_size, pieces)],
        overlaps=rules.bucketed and bool(rules.zero["overlap_comm"]),
    )
