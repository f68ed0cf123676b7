"""The memory account of a run: the bytes of one rank, part by part, before anything is allocated.

The peak is the largest of three moments of a step: the towers' forward and backward, the objective on the whole batch,
and the last reduction with the optimizer's step. What lies outside torch's allocator (CUDA's context, NCCL, libraries)
is not in it; loaders have a separate account, of the host's memory (loader_memory.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from neuclip_ds.config import Config, TextConfig
from neuclip_ds.engine.config import load_engine_config, precision
from neuclip_ds.engine.precision import resolve_comm_dtype, towers_dtype
from neuclip_ds.models.dual_encoder import DualEncoder
from neuclip_ds.models.source import ModelSource, locate_model, model_source
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.objectives import build_objective, find_method
from neuclip_ds.objectives.base import Context
from neuclip_ds.objectives.pair_grid import block_bytes
from neuclip_ds.planning.activations import Activations, count_activations
from neuclip_ds.planning.engine_memory import EngineMemory, Parameters, engine_memory
from neuclip_ds.planning.objective_cost import SimulatedRank
from neuclip_ds.state.sample_store import MAX_DEVICE_BYTES
from neuclip_ds.training.phases import largest_model

_USABLE = 0.9  # of a GPU: the rest is CUDA's context, NCCL's buffers and gaps between blocks
_BLOCK_COPIES = 5  # of a block of similarities: itself, a product of the next, three buffers


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes on one rank's device, and on its host where parts are offloaded."""

    engine: EngineMemory
    activations: Activations
    batch: int  # pixels and tokens that are on the device at a time
    features: int  # local and gathered, and their gradients
    similarities: int  # of this rank's rows against the batch, kept and worked on
    objective: int  # u, individual temperatures, NPN or amortisation nets, and the copies of a step that may be skipped
    objective_host: int
    two_passes: bool

    @property
    def standing(self) -> int:
        """Bytes that are there all the time."""
        return self.engine.weights + self.engine.gradients + self.engine.optimizer + self.objective + self.batch

    @property
    def moments(self) -> dict[str, int]:
        """Bytes on the device at the three moments that can be the peak."""
        engine, activations = self.engine, self.activations
        always = self.standing + self.features
        towers = activations.with_gradients if engine.growing else activations.alone
        at_objective = self.similarities + activations.alone
        if self.two_passes:  # the gradients of the first micro-batches are there
            towers, at_objective = activations.alone + engine.growing, self.similarities
        return {
            "in the towers": always + engine.working + towers,
            "in the objective": always + at_objective,
            "in the update": always + engine.growing + engine.update,
        }

    @property
    def peak(self) -> int:
        """Bytes on the device."""
        return max(self.moments.values())

    @property
    def host(self) -> int:
        """Bytes of offloaded parts at their peak."""
        return self.engine.host + self.engine.host_update + self.objective_host

    def fits(self, gigabytes: float) -> bool:
        """Return whether the peak leaves a tenth of a GPU of that size free."""
        return self.peak <= _USABLE * gigabytes * 1e9

    def lines(self) -> list[str]:
        """Return a table of the parts, in MB."""
        engine = self.engine
        parts = {
            "weights": (engine.weights, 0),
            "gradients": (engine.gradients + engine.growing, 0),
            "optimizer": (engine.optimizer, engine.host),
            "buckets, gathered weights": (engine.working, 0),
            "activations": (self.activations.alone, 0),
            "pixels and tokens": (self.batch, 0),
            "features": (self.features, 0),
            "similarities": (self.similarities, 0),
            "u, NPN, nets": (self.objective, self.objective_host),
            "reduction, optimizer's step": (engine.update, engine.host_update),
        }
        rows = [f"  {name:<28}{device / 1e6:>12,.1f}" + _on_host(host) for name, (device, host) in parts.items()]
        moment = max(self.moments, key=self.moments.__getitem__)
        return [*rows, f"  {'peak, ' + moment:<28}{self.peak / 1e6:>12,.1f}" + _on_host(self.host)]


def _on_host(size: int) -> str:
    return f"  and {size / 1e6:,.1f} on the host" if size else ""


class StandInTokenizer:
    """A tokenizer that is yet to be trained."""

    def __init__(self, text: TextConfig) -> None:
        self.vocab_size, self.context_length = text.vocab_size, text.context_length
        self.bos_id, self.eos_id, self.pad_id = 0, 1, 1


@dataclass(frozen=True)
class MemoryQuery:
    """The run to account for; its model is found when it is first needed."""

    config: Config
    world_size: int
    samples: int = 0  # n of the data set, 0 where it is not known
    device: str = "cuda"  # or `cpu`

    @cached_property
    def source(self) -> ModelSource:
        return model_source(largest_model(self.config), locate_model(self.config.model, weights=False))

    @property
    def rank_batch(self) -> int:
        """Pairs of the global batch on each rank."""
        return self.config.rank_batch(self.world_size)

    @property
    def micro_batch(self) -> int:
        """Pairs that go through the towers at once on a rank."""
        return self.config.micro_batch(self.world_size)

    @property
    def image_size(self) -> int:
        """Side of the square input, in pixels."""
        return self.source.preprocessing.size

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        stand_in: Any = StandInTokenizer(self.config.model.text)
        return self.source.tokenizer(lambda: stand_in)

    def build(self) -> DualEncoder:
        """Build the towers without memory."""
        with torch.device("meta"):
            return self.source.build(self.tokenizer)


class Towers(NamedTuple):
    """The part that depends on the model and the micro-batch, and takes seconds to count."""

    parameters: Parameters
    activations: Activations


def count_towers(query: MemoryQuery) -> Towers:
    """Count parameters and activations on tensors without memory."""
    model = query.build()
    parameters = Parameters.of(model)
    dtype = towers_dtype(load_engine_config(query.config, query.world_size))
    rows, length = query.micro_batch, query.tokenizer.context_length
    return Towers(parameters, count_activations(model, rows, query.image_size, length, dtype))


def account(query: MemoryQuery, towers: Towers) -> MemoryAccount:
    """Return the memory account of a run.

    Raises:
        UserError: config or DeepSpeed JSON cannot work.
    """
    config, world_size = query.config, query.world_size
    rows, micro, batch = query.rank_batch, query.micro_batch, config.data.batch_size
    engine = load_engine_config(config, world_size)
    state = objective_state(query)
    optimizer, averages = config.optimizer.name, config.ema.decay > 0
    return MemoryAccount(
        engine=engine_memory(engine, optimizer, towers.parameters, world_size, query.device, rows > micro, averages),
        activations=towers.activations,
        batch=_inputs(query),
        # local ones and gradients in float32, and gathered ones in float32 and as sent
        features=2 * query.source.embed_dim * (8 * rows + (4 + resolve_comm_dtype(config, engine).itemsize) * batch),
        similarities=_similarities(query),
        objective=state.device + state.copies,
        objective_host=state.host,
        two_passes=rows > micro,
    )


def smallest_that_fits(query: MemoryQuery, towers: Towers, gigabytes: float) -> tuple[str, MemoryAccount] | None:
    """Return the first of ds_configs/ in the run's precision, by stage, then with offload, that fits such GPUs."""
    kind = precision(load_engine_config(query.config, query.world_size))
    names = [f"zero{stage}_{kind}" for stage in range(1 if kind == "fp16" else 0, 4)]
    if kind == "bf16":
        names += ["zero2_bf16_offload", "zero3_bf16_offload"]
    for name in names:
        found = account(_changed(query, {"deepspeed": name}), towers)
        if found.fits(gigabytes):
            return name, found
    return None


def advice(query: MemoryQuery, gigabytes: float) -> str:
    """Return command-line options that make a run fit which fits with no stage."""
    for remedy in _remedies(query):
        changed = _changed(query, remedy)
        found = smallest_that_fits(changed, count_towers(changed), gigabytes)
        if found is not None:
            options = " ".join(f"--{name}={value}" for name, value in {**remedy, "deepspeed": found[0]}.items())
            return f"{options} would fit ({found[1].peak / 1e9:,.1f} GB)"
    return "not even a micro-batch of 1 with activation checkpointing and offload would: take more or larger GPUs"


def _remedies(query: MemoryQuery) -> Iterator[dict[str, Any]]:
    """Yield options to change: checkpointing first, then ever smaller micro-batches without and with it.

    Checkpointing and a second pass take a third more time each.
    """
    recompute = {} if query.config.model.activation_checkpointing else {"model.activation_checkpointing": True}
    if recompute:
        yield recompute
    rows = query.micro_batch
    while rows > 1:
        rows = max(size for size in range(1, rows // 2 + 1) if rows % size == 0)
        yield {"data.micro_batch": rows}
        if recompute:
            yield {**recompute, "data.micro_batch": rows}


def _changed(query: MemoryQuery, options: Mapping[str, Any]) -> MemoryQuery:
    config = query.config.model_copy(deep=True)
    for name, value in options.items():
        *sections, key = name.split(".")
        setattr(reduce(getattr, sections, config), key, value)
    return replace(query, config=config)


def _inputs(query: MemoryQuery) -> int:
    """Return bytes of pixels and tokens: on a GPU those of a micro-batch and of the next one, else of the batch."""
    rows = 2 * query.micro_batch if query.device == "cuda" else query.rank_batch
    return rows * (3 * query.image_size**2 + 8 * query.tokenizer.context_length)


def _similarities(query: MemoryQuery) -> int:
    """Return bytes kept between the two passes over the pairs, where they fit the budget, and of the blocks in work."""
    objective, batch = query.config.objective, query.config.data.batch_size
    rows = batch // query.world_size
    kept = 4 * rows * (2 * batch - rows)
    visits_twice = find_method(objective.method).normalizer is not None
    if kept > objective.similarity_budget_mb * 1e6 or not visits_twice:
        kept = 0  # computed again, or needed once
    return kept + _BLOCK_COPIES * min(block_bytes(query.device), 4 * rows * min(batch, objective.chunk or batch))


class ObjectiveState(NamedTuple):
    """Bytes of an objective's state on one rank."""

    device: int
    host: int
    copies: int  # on the device, of what a skipped step is undone from


def objective_state(query: MemoryQuery) -> ObjectiveState:
    """Return the size of the objective's state, by building it without memory."""
    with FakeTensorMode():
        context = Context(query.source.embed_dim, max(1, query.samples), SimulatedRank(query.world_size))
        objective = build_objective(query.config, context, torch.float32)
        tables = objective.row_tables().values()
        sizes = [sum(tensor.nbytes for tensor in table.tensors.values()) for table in tables]
        replicated = sum(tensor.nbytes for tensor in objective.replicated_state().values())
    copies = replicated + sum(size for size, table in zip(sizes, tables, strict=True) if not table.grows)
    on_host = 0 if query.device == "cpu" else sum(size for size in sizes if size > MAX_DEVICE_BYTES)
    return ObjectiveState(sum(sizes) - on_host + replicated, on_host, copies)
