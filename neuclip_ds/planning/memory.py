"""Estimate the memory of a run on one rank, by component, before anything is allocated.

The peak is the maximum over three phases of a step: the towers' forward and backward passes, the objective on the whole
batch, and the optimizer step. All gradients are counted in each phase, unless the backward pass creates them one by
one and the optimizer step frees them. The estimate excludes memory outside torch's allocator (CUDA's context, NCCL,
libraries); host_memory.py estimates the loaders' host memory.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # described in torch's docs, but without a public name

from neuclip_ds.config import Config, TextConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import accumulates_in_float32, load_engine_config, precision, zero_stage
from neuclip_ds.engine.precision import resolve_comm_dtype, towers_dtype
from neuclip_ds.errors import UserError
from neuclip_ds.losses.base import LossContext
from neuclip_ds.losses.methods import find_method
from neuclip_ds.losses.pairs import CACHED_BYTES, block_bytes, compiles
from neuclip_ds.losses.sample_store import MAX_DEVICE_BYTES
from neuclip_ds.models.source import ModelSource, locate_model, model_source
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.activations import Activations, count_activations

_MOMENTS = {"adamw": 2, "lamb": 2, "lion": 1, "sgd": 1}
_USABLE = 0.9  # fraction of a GPU's memory; the rest is for CUDA's context, NCCL's buffers and fragmentation
_ALL_REDUCED = 500_000_000  # elements that DeepSpeed copies and reduces at once if it uses no buckets
_BLOCK_COPIES = 3  # temporary tensors of a block's size, in addition to stored or recomputed similarities
_COMPILED_COPIES = 2  # the same if torch.compile fuses a block's operations
_NPN_BLOCK = 2**26  # elements that NeuCLIP's network processes at once


class MemoryAccount(NamedTuple):
    """Memory estimate of one rank, in bytes by component."""

    device: Mapping[str, int]
    host: Mapping[str, int]  # bytes of offloaded components
    moments: Mapping[str, int]  # bytes on the device at the three moments that can be the peak

    @property
    def peak(self) -> int:
        """Peak bytes on the device."""
        return max(self.moments.values())

    @property
    def on_host(self) -> int:
        """Peak bytes of offloaded components."""
        return sum(self.host.values())

    def fits(self, gigabytes: float) -> bool:
        """Return whether a GPU with `gigabytes` GB of memory has at least a tenth of its memory free at the peak."""
        return self.peak <= _USABLE * gigabytes * 1e9

    def lines(self) -> list[str]:
        """Return the lines of a table of the components, in MB."""
        moment = max(self.moments, key=self.moments.__getitem__)
        rows = [(name, size, self.host.get(name, 0)) for name, size in self.device.items()]
        rows.append((f"peak, {moment}", self.peak, self.on_host))
        return [
            f"  {name:<28}{size / 1e6:>12,.1f}" + (f"  and {host / 1e6:,.1f} on the host" if host else "")
            for name, size, host in rows
        ]


class StandInTokenizer:
    """Placeholder for a tokenizer that has not been trained yet."""

    def __init__(self, text: TextConfig) -> None:
        self.vocab_size, self.context_length = text.vocab_size, text.context_length
        self.bos_id, self.eos_id, self.pad_id = 0, 1, 1


@dataclass(frozen=True)
class MemoryQuery:
    """The run whose memory is estimated; the model is looked up on first use."""

    config: Config
    world_size: int
    samples: int = 0  # n of the dataset, 0 if unknown
    device: str = "cuda"  # or `cpu`

    @cached_property
    def source(self) -> ModelSource:
        return model_source(self.config.model, locate_model(self.config.model, weights=False))

    @property
    def rank_batch(self) -> int:
        """Number of pairs per rank in a global batch."""
        return self.config.rank_batch(self.world_size)

    @property
    def micro_batch(self) -> int:
        """Number of pairs that go through the towers at once on a rank."""
        return self.config.micro_batch(self.world_size)

    @property
    def image_size(self) -> int:
        """Side of the square input image, in pixels."""
        return self.source.preprocessing.size

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        stand_in: Any = StandInTokenizer(self.config.model.text)
        return self.source.tokenizer(lambda: stand_in)

    def build(self) -> DualEncoder:
        """Build the towers on the meta device, without allocating memory."""
        with torch.device("meta"):
            return self.source.build(self.tokenizer)


class Towers(NamedTuple):
    """Parameters and activations of the towers for a micro-batch; counting them takes seconds."""

    parameters: Parameters
    activations: Activations


def count_towers(query: MemoryQuery) -> Towers:
    """Count the towers' parameters and activations on the meta device, without allocating them."""
    model = query.build()
    parameters = Parameters.of(model)
    dtype = towers_dtype(load_engine_config(query.config, query.world_size))
    rows, length = query.micro_batch, query.tokenizer.context_length
    return Towers(parameters, count_activations(model, rows, query.image_size, length, dtype))


class EngineMemory(NamedTuple):
    """Bytes that DeepSpeed allocates on one rank."""

    weights: int
    gradients: int
    passing: int  # the part of `gradients` that a backward pass creates and the step frees
    optimizer: int  # float32 masters and moments, and the moving average
    working: int  # during the forward and backward passes: a gradient bucket and gathered weights
    step: int  # from the last gradient to the end of the update: a copy of gradients for the reduction or the step
    host: int  # optimizer state and gradients if they are offloaded


def engine_memory(
    engine: dict[str, Any], optimizer: str, parameters: Parameters, ranks: int, averages: bool = False
) -> EngineMemory:
    """Return the bytes that DeepSpeed allocates under its config, with ZeRO's partitioning (arXiv:1910.02054, Fig. 1).

    Stage 1 partitions the optimizer state over the ranks, stage 2 also the gradients, and stage 3 also the weights.
    If `averages` is true, the moving average of the weights is included.
    """
    stage, width = zero_stage(engine), 4 if precision(engine) == "fp32" else 2
    zero = engine.get("zero_optimization", {})
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    accumulated = 4 if accumulates_in_float32(engine) else width
    trained = parameters.trained
    share = trained // ranks if stage else trained
    whole, gathered = trained, 0  # weights that stay whole, and weights that are gathered when modules run
    if stage == 3 and ranks > 1:
        threshold = zero.get("stage3_param_persistence_threshold", 100_000)
        whole = share + sum(size for size in parameters.sizes if size < threshold)
        gathered = min(trained, zero.get("stage3_max_live_parameters", 10**9))
    # BF16_Optimizer keeps float32 gradients of all weights in one buffer, in addition to a backward pass's gradients
    buffered = stage == 1 and accumulated > width and not offloads
    bucket = accumulated * min(trained, zero.get("reduce_bucket_size", 500_000_000)) if stage and not buffered else 0
    # stage 1 reduces after the last gradient; without a float32 copy, the backward pass creates gradients one by one
    late = stage == 1 and not zero.get("overlap_comm", False)
    arriving = stage == 0 or buffered or (late and accumulated == width and not offloads)
    masters = stage > 0 or width == 2  # without ZeRO, float32 weights are their own masters
    states = 4 * (masters + _MOMENTS[optimizer] + averages) * share
    gradient = accumulated + width * buffered
    copies = 4 + (accumulated if stage == 3 else width)  # the masters' gradients, and gradients or weights
    copied = 4 * (min(trained, _ALL_REDUCED) if buffered or not masters else share)
    return EngineMemory(
        weights=width * (whole + parameters.frozen),
        gradients=0 if offloads and stage == 3 else gradient * (share if stage > 1 else trained),
        passing=width * trained if arriving else 0,
        optimizer=0 if offloads else states,
        working=width * gathered + bucket * (not late),
        step=0 if offloads else max(copied, bucket * late),
        host=states + copies * share if offloads else 0,
    )


def account(query: MemoryQuery, towers: Towers) -> MemoryAccount:
    """Return the memory estimate of a run.

    Raises:
        UserError: the config or the DeepSpeed JSON is invalid.
    """
    config, rows, batch = query.config, query.rank_batch, query.config.data.batch_size
    loaded, state = load_engine_config(config, query.world_size), objective_state(query)
    parameters, averages = towers.parameters, config.ema.decay > 0
    itemsize = resolve_comm_dtype(config, loaded).itemsize
    engine = engine_memory(loaded, config.optimizer.name, parameters, query.world_size, averages)
    standing = {
        "weights": engine.weights,
        "gradients": engine.gradients,
        "optimizer": engine.optimizer,
        "pixels and tokens": _inputs(query),
        # local features and their gradients in float32; gathered features in float32 and in the dtype that was sent
        "features": 2 * query.source.embed_dim * (8 * rows + (4 + itemsize) * batch),
        "u, NPN, nets": state.device,
    }
    passing = {
        "buckets, gathered weights": engine.working,
        "activations": towers.activations.alone,
        "similarities": _similarities(query, itemsize),
        "optimizer's step": engine.step,
    }
    one_pass = rows == query.micro_batch
    kept = towers.activations.alone if one_pass else 0  # activations that stay while the objective runs
    # gradients of one micro-batch still exist while the next micro-batch's gradients are computed
    passes, in_pass = engine.passing, towers.activations.with_gradients
    if not engine.passing or not one_pass:
        passes, in_pass = 0, towers.activations.alone
    moments = {
        "in the towers": engine.working + in_pass,
        "in the objective": passing["similarities"] + kept,
        "in the update": passes + passing["optimizer's step"],
    }
    always = sum(standing.values()) - passes
    peaks = {name: always + size for name, size in moments.items()}
    return MemoryAccount({**standing, **passing}, {"optimizer": engine.host, "u, NPN, nets": state.host}, peaks)


def smallest_that_fits(query: MemoryQuery, towers: Towers, gigabytes: float) -> tuple[str, MemoryAccount] | None:
    """Return the first config in ds_configs/ that fits and has the run's precision; offload configs are tried last."""
    kind = precision(load_engine_config(query.config, query.world_size))
    names = [f"zero{stage}_{kind}" for stage in range(4)]
    names += ["zero2_bf16_offload", "zero3_bf16_offload"] if kind == "bf16" else []
    for name in names:
        with suppress(UserError):  # this stage does not support this many micro-batches
            found = account(replace(query, config=query.config.model_copy(update={"deepspeed": name})), towers)
            if found.fits(gigabytes):
                return name, found
    return None


def _inputs(query: MemoryQuery) -> int:
    """Return the bytes of pixels and tokens: two micro-batches on a GPU (one is prefetched), or one batch on a CPU."""
    rows = 2 * query.micro_batch if query.device == "cuda" else query.rank_batch
    return rows * (3 * query.image_size**2 + 8 * query.tokenizer.context_length)


def _similarities(query: MemoryQuery, itemsize: int) -> int:
    """Return the peak bytes of the similarities, minus the bytes of features that are not allocated at the peak.

    Similarities are stored between the two passes over the pairs if they fit in the budget; the second pass adds
    temporary blocks. Between the passes, NeuCLIP's network needs the similarities between all anchors and a rank's
    prototypes in both directions, plus the larger of a temporary block and nine copies of the features of a group's
    anchors. The subtracted bytes are the sent copies and, while the network runs, local features and their gradients.
    """
    objective, batch = query.config.objective, query.config.data.batch_size
    rows, method = batch // query.world_size, find_method(objective.method)
    dim = query.source.embed_dim
    sent = 2 * dim * itemsize * batch
    block = min(block_bytes(query.device), 4 * rows * min(batch, objective.chunk_size or batch))
    kept, copies = 0, _BLOCK_COPIES
    if method.estimates_normalizers:  # pairs are visited twice
        kept = 4 * rows * (2 * batch - rows)
        if compiles(query.device, rows * batch):
            copies = _COMPILED_COPIES
        if kept > CACHED_BYTES:
            kept, copies = 0, copies + 1  # plus the similarities of a block
    # features sent in float32 are the gathered features themselves, which are still needed
    pairs = max(0, kept + copies * block - (sent if itemsize < 4 else 0))
    if "npn" not in method.sections or objective.npn.network == "mlp":
        return pairs
    replicas = objective.npn.replicas_on(query.world_size)
    share = batch * -(-objective.npn.prototypes * replicas // query.world_size)
    at_once = 8 * min(share, _NPN_BLOCK if query.device == "cuda" else 0)
    if objective.npn.alpha_grad == "full" and query.world_size > 1:
        at_once = max(at_once, 9 * 4 * batch // replicas * dim)
    return max(pairs, kept + 8 * share + at_once - 2 * dim * 8 * rows - sent)


class ObjectiveState(NamedTuple):
    """Bytes of an objective's state on one rank, including the device copies that are kept to undo a skipped step."""

    device: int
    host: int


def objective_state(query: MemoryQuery) -> ObjectiveState:
    """Return the size of the objective's state, measured on fake tensors."""
    one_of_all = Communicator()
    one_of_all.world_size = query.world_size
    with FakeTensorMode():
        context = LossContext(dim=query.source.embed_dim, samples=max(1, query.samples), communicator=one_of_all)
        objective = find_method(query.config.objective.method).build(query.config.objective, context)
        replicated = sum(tensor.nbytes for tensor in objective.replicated_state().values())
        tables = [
            (sum(tensor.nbytes for tensor in table.tensors.values()), table.per_sample)
            for table in objective.row_tables().values()
        ]
    on_host = 0 if query.device == "cpu" else sum(size for size, _ in tables if size > MAX_DEVICE_BYTES)
    copies = replicated + sum(size for size, per_sample in tables if not per_sample)
    return ObjectiveState(sum(size for size, _ in tables) - on_host + replicated + copies, on_host)
