"""The cost of a run on any number of nodes, by the cost model: time, memory, traffic, checkpoints, GPU hours.

A rank's work in a step is counted without memory, data or other ranks.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from neuclip_ds.config import Config
from neuclip_ds.distributed.ring import ring_bytes
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.zero import ZeroRules
from neuclip_ds.models.towers import Encoder
from neuclip_ds.objectives import build_objective
from neuclip_ds.planning.cost_model import Cluster, Range, Work, step_time
from neuclip_ds.planning.engine_memory import Parameters
from neuclip_ds.planning.engine_traffic import TrainedShapes, engine_calls
from neuclip_ds.planning.machines import Machine
from neuclip_ds.planning.memory import MemoryQuery, Towers, account, objective_state
from neuclip_ds.planning.objective_cost import Build, ObjectiveQuery, objective_calls, objective_work

_PER_SAMPLE = ("normalizer", "state", "temperature")  # purposes of the statistics of samples
_CHECKPOINTED = 12  # bytes a trained parameter: float32 master and AdamW's moments
_WEIGHT = 4  # bytes of a frozen one, in float32


class CountedModel(NamedTuple):
    """Sizes and operations of the towers, whatever the batch."""

    shapes: TrainedShapes
    dim: int  # d of the features
    frozen: int  # elements that do not train
    image: "TowerFlops"
    text: "TowerFlops"


class TowerFlops(NamedTuple):
    """The operations of a tower on one image or one caption."""

    forward: float
    backward: float  # twice the forward's where all layers train, none where none does


def count_model(config: Config) -> CountedModel:
    """Count the config's model on the meta device.

    Raises:
        UserError: its checkpoint cannot be found.
    """
    query = MemoryQuery(config, 1)
    model = query.build()
    shapes = TrainedShapes.of(model, config.optimizer)
    return CountedModel(shapes, query.source.embed_dim, Parameters.of(model).frozen, *count_flops(query))


def count_flops(query: MemoryQuery) -> tuple[TowerFlops, TowerFlops]:
    """Return the operations on one image and on one caption, without those of activation checkpointing."""
    kept = query.config.model.model_copy(update={"activation_checkpointing": False})
    query = replace(query, config=query.config.model_copy(update={"model": kept}))
    model, size = query.build(), query.source.preprocessing.size
    with torch.device("meta"):
        image = torch.empty(1, 3, size, size, dtype=torch.uint8)
        tokens = torch.empty(1, query.tokenizer.context_length, dtype=torch.int64)
        return _tower_flops(model.vision, image), _tower_flops(model.text, tokens)


def _tower_flops(tower: Encoder, inputs: Tensor) -> TowerFlops:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(inputs)
    forward = float(counter.get_total_flops())
    if tower.frozen:
        return TowerFlops(forward, 0.0)
    if all(weight.requires_grad for weight in tower.parameters()):
        return TowerFlops(forward, 2 * forward)
    with FlopCounterMode(display=False) as counter:
        tower(inputs).sum().backward()
    return TowerFlops(forward, counter.get_total_flops() - forward)


def step_work(config: Config, model: CountedModel, world_size: int, build: Build = build_objective) -> Work:
    """Return the work of one rank of `world_size`; `build` as for `ObjectiveQuery`.

    With activation checkpointing, and with several micro-batches, the forward pass of what trains runs once more for
    each.

    Raises:
        UserError: the ranks do not divide the batch, or the DeepSpeed JSON cannot work.
    """
    rows, micro = config.rank_batch(world_size), config.micro_batch(world_size)
    engine = load_engine_config(config, world_size)
    rules = ZeroRules.of(engine)
    comm_dtype, pieces = resolve_comm_dtype(config, engine), rows // micro
    checkpointing = config.model.activation_checkpointing
    image, text = (_step_flops(tower, pieces, checkpointing, rules.stage) for tower in (model.image, model.text))
    query = ObjectiveQuery(config, world_size, rows, model.dim, comm_dtype, pieces, build)
    objective, calls = objective_work(query), objective_calls(query) if world_size > 1 else []
    return Work(
        tower_flops=rows * (image + text),
        image_share=image / (image + text),
        objective_flops=objective.flops,
        objective_elements=objective.elements,
        updated=model.shapes.total / (world_size if rules.stage else 1),
        hooks=len(model.shapes.sizes) if rules.stage == 3 else 0,
        calls=[*calls, *engine_calls(engine, config.optimizer.name, model.shapes, world_size, pieces)],
        overlaps=rules.bucketed and bool(rules.zero["overlap_comm"]),
        rows=rows,
    )


def _step_flops(tower: TowerFlops, pieces: int, checkpointing: bool, stage: int) -> float:
    """Return the operations of a tower on one input of a step in so many micro-batches."""
    again = tower.forward if pieces > 1 and (tower.backward or stage == 3) else 0.0
    return tower.forward + tower.backward + again + checkpointing * tower.backward / 2


class ClusterAssumptions(NamedTuple):
    """Assumptions that a config does not hold."""

    samples: int  # n of the data set
    sample_bytes: float  # of an image and its caption in a shard
    disk: float  # bytes a second that a node writes
    seen: float  # samples of the whole run


class Prediction(NamedTuple):
    """The cost of a configuration, per step where nothing else is noted; ranges go over what the machine may reach."""

    nodes: int
    ranks: int
    batch: int
    step: Range  # seconds
    computation: Range
    objective_share: Range  # of the step
    communication: Range
    exposed: Range
    samples_per_second: Range
    received: int  # bytes of a rank
    per_sample_received: int  # of them, for u, individual temperatures and normalisers
    memory: int  # bytes at a rank's peak
    checkpoint: int  # bytes of all ranks
    checkpoint_seconds: float
    loading: Range  # bytes a second of a node
    gpu_hours: Range  # of the run
    utilisation: Range  # of the towers' peak in the whole step; 0 where the peak is not known


def predict(
    config: Config,
    model: CountedModel,  # from `count_model`
    work: Work,  # from `step_work`
    towers: Towers,  # from `count_towers`, of the model and the micro-batch alone
    machine: Machine,
    nodes: int,
    ranks_per_node: int,
    around: ClusterAssumptions,
) -> Prediction:
    """Return the cost of a config, whose batch is that of all ranks."""
    ranks = nodes * ranks_per_node
    times = machine.cases(lambda rates: step_time(work, rates.compute, Cluster(nodes, ranks_per_node, rates.network)))
    speed = Range.of(config.data.batch_size / time.total for time in times)
    received = [(call.purpose, call.times * ring_bytes(call.op, call.size, ranks)) for call in work.calls]
    # each row of a table and what is replicated is written once
    state = objective_state(MemoryQuery(config, 1, around.samples))
    checkpoint = _CHECKPOINTED * model.shapes.total + _WEIGHT * model.frozen + state.device + state.host
    return Prediction(
        nodes=nodes,
        ranks=ranks,
        batch=config.data.batch_size,
        step=Range.of(time.total for time in times),
        computation=Range.of(time.computation for time in times),
        objective_share=Range.of(time.objective / time.total for time in times),
        communication=Range.of(time.communication for time in times),
        exposed=Range.of(time.exposed for time in times),
        samples_per_second=speed,
        received=round(sum(size for _, size in received)),
        per_sample_received=round(sum(size for purpose, size in received if purpose in _PER_SAMPLE)),
        memory=account(MemoryQuery(config, ranks, around.samples), towers).peak,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint / (nodes * around.disk),
        loading=Range.of(one * around.sample_bytes / nodes for one in speed),
        gpu_hours=Range.of(around.seen / one * ranks / 3600 for one in speed),
        utilisation=Range.of(work.tower_flops / time.total / machine.tower_peak for time in times),
    )
