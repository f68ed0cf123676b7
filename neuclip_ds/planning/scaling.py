"""The cost of a run on any number of nodes, by the cost model: time, memory, traffic, checkpoints, GPU hours."""

from __future__ import annotations

from typing import NamedTuple

from neuclip_ds.config import Config
from neuclip_ds.distributed.ring import ring_bytes
from neuclip_ds.objectives import build_objective
from neuclip_ds.planning.cost_model import Cluster, step_time
from neuclip_ds.planning.machines import Machine
from neuclip_ds.planning.memory import MemoryQuery, Towers, account, objective_state
from neuclip_ds.planning.objective_cost import Build
from neuclip_ds.planning.step_work import CountedModel, step_work

_PER_SAMPLE = ("normalizer", "state", "temperature")  # purposes of the statistics of samples
_CHECKPOINTED = 12  # bytes a parameter: float32 master and AdamW's moments


class ClusterAssumptions(NamedTuple):
    """Assumptions that a config does not hold."""

    samples: int  # n of the data set
    sample_bytes: float  # of an image and its caption in a shard
    disk: float  # bytes a second that a node writes
    seen: float  # samples of the whole run


class Prediction(NamedTuple):
    """The cost of a configuration, per step where nothing else is noted."""

    nodes: int
    ranks: int
    batch: int
    step: float  # seconds
    computation: float
    objective_share: float  # of the step
    communication: float
    exposed: float
    samples_per_second: float
    received: int  # bytes of a rank
    per_sample_received: int  # of them, for u, individual temperatures and normalisers
    memory: int  # bytes at a rank's peak
    checkpoint: int  # bytes of all ranks
    checkpoint_seconds: float
    loading: float  # bytes a second of a node
    gpu_hours: float  # of the run


def predict(
    config: Config,
    model: CountedModel,  # from `count_model`
    towers: Towers,  # from `count_towers`, of the model and the micro-batch alone
    machine: Machine,
    nodes: int,
    ranks_per_node: int,
    around: ClusterAssumptions,
    build: Build = build_objective,
) -> Prediction:
    """Return the cost of a config, whose batch is that of all ranks; `build` is as for `ObjectiveQuery`.

    Raises:
        UserError: the ranks do not divide the batch, or the DeepSpeed JSON cannot work.
    """
    ranks = nodes * ranks_per_node
    work = step_work(config, model, ranks, build)
    time = step_time(work, machine.compute, Cluster(nodes, ranks_per_node, machine.network))
    speed = config.data.batch_size / time.total
    received = [(call.purpose, call.times * ring_bytes(call.op, call.size, ranks)) for call in work.calls]
    # each row of a table and what is replicated is written once
    checkpoint = _CHECKPOINTED * model.shapes.total + sum(objective_state(MemoryQuery(config, 1, around.samples)))
    return Prediction(
        nodes=nodes,
        ranks=ranks,
        batch=config.data.batch_size,
        step=time.total,
        computation=time.computation,
        objective_share=time.objective / time.total,
        communication=time.communication,
        exposed=time.exposed,
        samples_per_second=speed,
        received=round(sum(size for _, size in received)),
        per_sample_received=round(sum(size for purpose, size in received if purpose in _PER_SAMPLE)),
        memory=account(MemoryQuery(config, ranks, around.samples), towers).peak,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint / (nodes * around.disk),
        loading=speed * around.sample_bytes / nodes,
        gpu_hours=around.seen / speed * ranks / 3600,
    )
