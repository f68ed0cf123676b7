"""Estimate the memory of a run on one rank, by component, before anything is allocated.

The peak is the maximum over three phases of a step: the towers' forward and backward passes, the objective on the whole
batch, and the optimizer step. In general, all gradients are counted in each phase. If a backward pass creates them one
by one, and frees them before the next pass, they are counted only while they exist. The estimate excludes memory
outside torch's allocator (CUDA's context, NCCL, libraries); host_memory.py estimates the loaders' host memory.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # described in torch's docs, but without a public name

from neuclip_ds.checkpoint.saved_model import planned_source
from neuclip_ds.config import CLIP_BPE, Config, TextConfig
from neuclip_ds.data.stored_towers import IMAGE, TEXT, TOWER_OF_TABLE, tower_folders
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import EngineConfig, load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype, towers_dtype
from neuclip_ds.engine.zero import Wrapper
from neuclip_ds.engine.zero_rules import ZeroRules
from neuclip_ds.errors import UserError
from neuclip_ds.losses.base import LossContext
from neuclip_ds.losses.methods import find_method
from neuclip_ds.losses.pairs import CACHED_BYTES, block_bytes, compiles
from neuclip_ds.losses.prefixes import build_function
from neuclip_ds.losses.sample_store import MAX_DEVICE_BYTES
from neuclip_ds.losses.stored_features import REFERENCE
from neuclip_ds.models.source import ModelSource
from neuclip_ds.models.tokenizer import ModelTokenizer, named_tokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import Parameters, projection_width
from neuclip_ds.planning.activations import Activations, count_activations

_MOMENTS = {"adamw": 2, "lamb": 2, "lion": 1, "sgd": 1}
_USABLE = 0.9  # fraction of a GPU's memory; the rest is for CUDA's context, NCCL's buffers and fragmentation
_BLOCK_COPIES = 3  # temporary tensors of a block's size, in addition to stored or recomputed similarities
_COMPILED_COPIES = 2  # the same if torch.compile fuses a block's operations
_NPN_BLOCK = 2**25  # elements that NeuCLIP's network processes at once in each direction


class MemoryAccount(NamedTuple):
    """Memory estimate of one rank, in bytes by component."""

    device: Mapping[str, int]
    host: Mapping[str, int]  # bytes of offloaded components
    moments: Mapping[str, int]  # bytes on the device in the three phases of a step; the largest is the peak

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
        """Return the lines of a table of the components and the peak, in MB."""
        peak_moment = max(self.moments, key=self.moments.__getitem__)
        rows = [(name, size, self.host.get(name, 0)) for name, size in self.device.items()]
        rows.append((f"peak, {peak_moment}", self.peak, self.on_host))
        lines = []
        for name, size, host in rows:
            line = f"  {name:<28}{size / 1e6:>12,.1f}"
            if host:
                line += f"  and {host / 1e6:,.1f} on the host"
            lines.append(line)
        return lines


class StandInTokenizer:
    """Placeholder for a tokenizer that has not been trained yet, and for CLIP's tokenizer."""

    def __init__(self, text: TextConfig) -> None:
        self.vocab_size = text.vocab_size
        self.context_length = text.resolved_context_length()
        self.bos_id = 0
        self.eos_id = 1
        self.pad_id = 1


@dataclass(frozen=True)
class MemoryQuery:
    """The run whose memory is estimated; the model is looked up on first use."""

    config: Config
    world_size: int
    samples: int = 0  # number of samples in the dataset, or 0 if unknown
    device: str = "cuda"  # or `cpu`
    stored_widths: Mapping[str, int] = field(default_factory=dict)  # width of each model's stored features, by name

    @cached_property
    def source(self) -> ModelSource:
        return planned_source(self.config.model)

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
        """Side length of the square input image, in pixels."""
        return self.source.preprocessing.size

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        own_tokenizer = self.source.own_tokenizer()
        if own_tokenizer is not None:
            return own_tokenizer
        text = self.config.model.text
        if text.tokenizer not in (None, CLIP_BPE):
            return named_tokenizer(text)
        return cast(ModelTokenizer, StandInTokenizer(text))

    @cached_property
    def trunk_widths(self) -> dict[str, int]:
        """Widths of the frozen trunks whose outputs are stored, keyed by option (`image_features`, `text_features`)."""
        folders = tower_folders(self.config.data)
        if not folders:
            return {}
        model = self.build()
        return {name: projection_width(model.get_submodule(TOWER_OF_TABLE[name])) for name in folders}

    @property
    def pair_bytes(self) -> int:
        """Bytes that a pair takes in a batch: its pixels and tokens, or stored outputs of trunks in float32."""
        widths = self.trunk_widths
        pixels = 4 * widths[IMAGE] if IMAGE in widths else 3 * self.image_size**2
        tokens = 4 * widths[TEXT] if TEXT in widths else 8 * self.tokenizer.context_length
        return pixels + tokens

    def build(self) -> DualEncoder:
        """Build the towers on the meta device, without allocating memory."""
        with torch.device("meta"):
            return self.source.build(self.tokenizer)


class Towers(NamedTuple):
    """Parameters and activations of the towers for a micro-batch; counting them takes seconds."""

    parameters: Parameters
    activations: Activations


def count_towers(query: MemoryQuery) -> Towers:
    """Count the towers' parameters and activations without allocating them; raise `UserError` as `account` does."""
    config = query.config.model
    if config.vision.class_token_only == "auto" and query.device != "cpu":
        # `auto` is off on GPUs, but would be on here, because activations are counted on a simulated CPU
        vision = config.vision.model_copy(update={"class_token_only": False})
        model_config = config.model_copy(update={"vision": vision})
        query = replace(query, config=query.config.model_copy(update={"model": model_config}))
    model = query.build()
    parameters = Parameters.of(model)
    dtype = towers_dtype(load_engine_config(query.config, query.world_size))
    context_length = query.tokenizer.context_length
    activations = count_activations(
        model, query.micro_batch, query.image_size, context_length, dtype, query.trunk_widths
    )
    return Towers(parameters, activations)


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes that DeepSpeed allocates on one rank."""

    weights: int
    gradients: int
    freed_gradients: int  # the part of `gradients` that a backward pass creates and the step frees
    frees_after_pass: bool  # whether `freed_gradients` are freed after each backward pass, not in the step
    optimizer: int  # float32 masters and moments, and the moving average; a transfer buffer if they are offloaded
    working: int  # during the forward and backward passes: a gradient bucket and gathered weights
    step: int  # from the last gradient to the end of the update: copies of gradients, or the updates of `lean_zero1`
    host: int  # if the optimizer is offloaded: its state, and copies of gradients and weights


def engine_memory(
    engine_config: EngineConfig,
    optimizer: str,
    parameters: Parameters,
    ranks: int,
    averages: bool = False,
    lean_zero1: bool = False,
) -> EngineMemory:
    """Return the bytes that DeepSpeed allocates under its config, with ZeRO's partitioning (arXiv:1910.02054, Fig. 1).

    If `averages` is true, the moving average of the weights is included. `lean_zero1` is the option
    `optimizer.lean_zero1`.

    The main terms, in bytes per trained parameter on n > 1 ranks; a weight takes w bytes, an accumulated gradient g,
    and the optimizer's state s. "Update" is what is allocated from the last gradient to the end of the update:

        config            weights  gradients  state  update
        float32, no ZeRO  w        g          s      4, for at most 500 million parameters
        bf16, no ZeRO     w        g          s      4
        ZeRO 1, BF16      w        g + w      s/n    4, for at most 500 million parameters
        ... lean_zero1    w        g          s/n    0 with AdamW, else 4/n
        other ZeRO 1      w        g          s/n    4/n or, if it is larger and does not overlap, a bucket
        ZeRO 2            w        g/n        s/n    4/n
        ZeRO 3            w/n      g/n        s/n    4/n

    "ZeRO 1, BF16" is ZeRO 1 with bf16 weights, float32 gradients and no offload (`Wrapper.BF16`). Offload moves the
    state and the update to host memory, and in ZeRO 3 also the gradients.
    """
    rules = ZeroRules.of(engine_config)
    trained = parameters.trained
    share = trained // ranks if rules.stage else trained  # elements that the optimizer updates on this rank
    frees_with_buckets = lean_zero1 and ranks > 1
    optimizer_memory = _optimizer_memory(rules, parameters, share, _state_copies(rules, optimizer, averages))

    working = _gathered_weights(rules, parameters, ranks)
    if not rules.reduces_at_end:
        working += _bucket(rules, trained)
    freed_gradients = 0
    if rules.creates_one_by_one and not frees_with_buckets:
        freed_gradients = rules.weight * trained
    return EngineMemory(
        weights=_stored_weights(rules, parameters, ranks),
        gradients=_gradients(rules, trained, ranks, frees_with_buckets),
        freed_gradients=freed_gradients,
        frees_after_pass=lean_zero1,
        optimizer=optimizer_memory.device,
        working=working,
        step=_update(rules, optimizer, trained, share, lean_zero1),
        host=optimizer_memory.host,
    )


def _stored_weights(rules: ZeroRules, parameters: Parameters, ranks: int) -> int:
    """Return the bytes of the weights that a rank always stores: ZeRO 3 partitions large weights that are trained."""
    stored = parameters.trained
    if rules.stage == 3 and ranks > 1:
        threshold = rules.zero.stage3_param_persistence_threshold
        stored = parameters.trained // ranks + sum(size for size in parameters.sizes if size < threshold)
    return rules.weight * (stored + parameters.frozen)


def _gathered_weights(rules: ZeroRules, parameters: Parameters, ranks: int) -> int:
    """Return the bytes of the weights that ZeRO 3 gathers when modules run; 0 without ZeRO 3 or on one rank."""
    if rules.stage < 3 or ranks == 1:
        return 0
    return rules.weight * min(parameters.trained, rules.zero.stage3_max_live_parameters)


def _gradients(rules: ZeroRules, trained: int, ranks: int, frees_with_buckets: bool) -> int:
    """Return the bytes of all gradients that a rank stores on the device.

    If `frees_with_buckets`, the backward pass frees the gradients of each bucket; those of one bucket take less memory
    than the activations that were freed before.
    """
    if rules.offloads and rules.stage == 3:
        return 0
    if rules.wrapper is Wrapper.BF16 and not frees_with_buckets:
        # all float32 gradients are in one buffer, in addition to the backward pass's gradients
        return (rules.accumulated + rules.weight) * trained
    stored = trained // ranks if rules.stage > 1 else trained
    return rules.accumulated * stored


def _bucket(rules: ZeroRules, trained: int) -> int:
    """Return the bytes of a bucket of gradients, or 0 if DeepSpeed uses no buckets of a configured size."""
    return rules.accumulated * min(trained, rules.bucket) if rules.bucketed else 0


def _state_copies(rules: ZeroRules, optimizer: str, averages: bool) -> int:
    """Return the number of float32 values that the optimizer stores per weight: its master, moments and average."""
    copies = _MOMENTS[optimizer]
    if rules.has_masters:
        copies += 1
    if averages:
        copies += 1
    return copies


class _OptimizerMemory(NamedTuple):
    """Bytes of the optimizer's state, and of the copies that its offload needs."""

    device: int
    host: int


def _optimizer_memory(rules: ZeroRules, parameters: Parameters, share: int, copies: int) -> _OptimizerMemory:
    states = 4 * copies * share
    if not rules.offloads:
        return _OptimizerMemory(device=states, host=0)
    # on the device and in host memory: one gradient on its way to the host
    transfer = rules.weight * max(parameters.sizes, default=0) if rules.stage < 3 else 0
    # in host memory: the masters' gradients, and gradients (ZeRO 3) or weights
    copied = 4 + (rules.accumulated if rules.stage == 3 else rules.weight)
    return _OptimizerMemory(device=transfer, host=states + copied * share + transfer)


def _update(rules: ZeroRules, optimizer: str, trained: int, share: int, lean_zero1: bool) -> int:
    """Return the bytes of temporary tensors on the device from the last gradient to the end of the update."""
    if rules.offloads:
        return 0
    if lean_zero1:  # no copy of gradients, but LAMB, Lion and SGD store the update of each weight
        return 0 if optimizer == "adamw" else 4 * share
    if rules.wrapper in (Wrapper.NONE, Wrapper.BF16):  # gradients in float32 are copied only to be reduced
        return 4 * min(trained, rules.bucket)
    copied = 4 * share  # the masters' gradients
    return max(copied, _bucket(rules, trained)) if rules.reduces_at_end else copied


def account(query: MemoryQuery, towers: Towers) -> MemoryAccount:
    """Return the memory estimate of a run.

    Raises:
        UserError: the config or the DeepSpeed JSON is invalid, or the model cannot be found.
    """
    config = query.config
    engine_config = load_engine_config(config, query.world_size)
    engine = engine_memory(
        engine_config,
        config.optimizer.name,
        towers.parameters,
        query.world_size,
        averages=config.ema.decay > 0,
        lean_zero1=config.optimizer.lean_zero1,
    )
    state = objective_state(query)
    itemsize = resolve_comm_dtype(config, engine_config).itemsize
    similarities = _similarities(query, itemsize)
    # local features and their gradients in float32; gathered features in float32 and in the dtype that was sent
    features = 2 * query.source.embed_dim * (8 * query.rank_batch + (4 + itemsize) * config.data.batch_size)
    always_allocated = {
        "weights": engine.weights,
        "gradients": engine.gradients,
        "optimizer": engine.optimizer,
        "pixels and tokens": _inputs(query),
        "features": features,
        "u, NPN, nets": state.device,
    }
    if query.stored_widths:
        always_allocated["stored features"] = _stored_features(query, itemsize)
    temporary = {
        "buckets, gathered weights": engine.working,
        "activations": towers.activations.alone,
        "similarities": similarities,
        "optimizer's step": engine.step,
    }
    has_one_pass = query.rank_batch == query.micro_batch
    return MemoryAccount(
        device={**always_allocated, **temporary},
        host={"optimizer": engine.host, "u, NPN, nets": state.host},
        moments=_moments(sum(always_allocated.values()), engine, towers.activations, similarities, has_one_pass),
    )


def _moments(
    always: int, engine: EngineMemory, activations: Activations, similarities: int, has_one_pass: bool
) -> dict[str, int]:
    """Return the bytes on the device in each of the three phases of a step, by name.

    `always` counts what is allocated in every phase, with all gradients; `has_one_pass` says whether a rank's batch is
    a single micro-batch.
    """
    in_towers = engine.working + activations.alone
    in_objective = similarities
    if has_one_pass:  # the activations of a single micro-batch stay while the objective runs
        in_objective += activations.alone
    in_update = engine.step
    # the backward pass of a single micro-batch may create gradients one by one; with several micro-batches, gradients
    # of one micro-batch still exist while the next micro-batch's gradients are computed, unless they are freed before
    if engine.freed_gradients and (has_one_pass or engine.frees_after_pass):
        always -= engine.freed_gradients
        in_towers = engine.working + activations.with_gradients
        if not engine.frees_after_pass:
            in_update += engine.freed_gradients
    return {
        "in the towers": always + in_towers,
        "in the objective": always + in_objective,
        "in the update": always + in_update,
    }


def smallest_that_fits(query: MemoryQuery, towers: Towers, gigabytes: float) -> tuple[str, MemoryAccount] | None:
    """Return the name and the estimate of the first config in ds_configs/ that fits; None if none fits.

    Only configs with the run's precision are tried: first those without offload, in the order of their ZeRO stages, and
    then those with offload. `gigabytes` is the memory of a GPU, in GB.
    """
    kind = load_engine_config(query.config, query.world_size).precision
    names = [f"zero{stage}_{kind}" for stage in range(4)]
    names += ["zero2_bf16_offload", "zero3_bf16_offload"] if kind == "bf16" else []
    for name in names:
        lean_zero1 = query.config.optimizer.lean_zero1 and name == "zero1_bf16"
        optimizer = query.config.optimizer.model_copy(update={"lean_zero1": lean_zero1})
        candidate = replace(query, config=query.config.model_copy(update={"deepspeed": name, "optimizer": optimizer}))
        with suppress(UserError):  # this config does not support the number of micro-batches, or model.compile
            estimate = account(candidate, towers)
            if estimate.fits(gigabytes):
                return name, estimate
    return None


def _inputs(query: MemoryQuery) -> int:
    """Return the bytes of the input pairs: on a GPU, two micro-batches (one prefetched); on a CPU, the rank's batch."""
    rows = 2 * query.micro_batch if query.device == "cuda" else query.rank_batch
    return rows * query.pair_bytes


def _stored_features(query: MemoryQuery, itemsize: int) -> int:
    """Return the bytes of stored features of the whole batch, in float32 and in the dtype that was sent.

    With a reference model, the loss also concatenates the trained model's and the reference's features in float32, and
    a queue also stores the reference's features, with a copy to undo a skipped step.
    """
    batch = query.config.data.batch_size
    size = 2 * (4 + itemsize) * batch * sum(query.stored_widths.values())
    width = query.stored_widths.get(REFERENCE)
    if width is None:
        return size
    objective = query.config.objective
    queued = objective.queue.size if "queue" in find_method(objective.method).sections else 0
    return size + 2 * 4 * batch * (query.source.embed_dim + width) + 2 * 2 * 4 * queued * width


def _similarities(query: MemoryQuery, itemsize: int) -> int:
    """Return the peak bytes of the similarities, minus the bytes of features that are not allocated at the peak.

    Similarities are stored between the two passes over the pairs if they fit in the budget; the second pass adds
    temporary blocks. Between the passes, NeuCLIP's network needs the similarities between all anchors and a rank's
    prototypes in both directions, a copy of the anchors' features and copies of the prototypes, plus the largest of the
    following: a temporary block; another copy of the features; or, if `objective.npn.alpha_grad` is `full`, the
    similarities in one direction and nine copies of the features, for the anchors of a group of ranks. The subtracted
    bytes are the sent copies and, while the network runs, local features and their gradients.
    """
    objective = query.config.objective
    method = find_method(objective.method)
    batch = query.config.data.batch_size
    rows = batch // query.world_size
    dim = query.source.embed_dim
    sent = 2 * dim * itemsize * batch

    # the two passes over the pairs
    block = min(block_bytes(query.device), 4 * rows * min(batch, objective.chunk_size or batch))
    stored = 0
    block_copies = _BLOCK_COPIES
    if method.estimates_normalizers:  # pairs are visited twice
        stored = 4 * rows * (2 * batch - rows)
        if compiles(query.device, rows * batch):
            block_copies = _COMPILED_COPIES
        if stored > CACHED_BYTES:
            stored = 0
            block_copies += 1  # the similarities of a block
    pairs = stored + block_copies * block
    if itemsize < 4:  # features sent in float32 are the gathered features themselves, which are still needed
        pairs -= sent
    pairs = max(0, pairs)
    if "npn" not in method.sections or objective.npn.network == "mlp":
        return pairs

    # NeuCLIP's network
    replicas = objective.npn.replicas_on(query.world_size)
    local_prototypes = -(-objective.npn.prototypes * replicas // query.world_size)
    similarity_elements = batch * local_prototypes
    prediction = 8 * min(similarity_elements, _NPN_BLOCK if query.device == "cuda" else 0)
    anchors = 8 * batch * dim  # the features of both directions in one tensor; their products with weights take as much
    at_once = max(prediction, anchors)
    if objective.npn.alpha_grad == "full":
        at_once = max(at_once, 4 * (similarity_elements + 9 * batch * dim) // replicas)
    unit_prototypes = 16 * local_prototypes * dim  # normalized, and divided by the temperature
    network = stored + 8 * similarity_elements + anchors + unit_prototypes + at_once - 2 * dim * 8 * rows - sent
    return max(pairs, network)


class ObjectiveState(NamedTuple):
    """Bytes of an objective's state on one rank, including the device copies that are kept to undo a skipped step."""

    device: int
    host: int


def objective_state(query: MemoryQuery) -> ObjectiveState:
    """Return the size of the objective's state, measured on fake tensors."""
    communicator = Communicator(world_size=query.world_size)  # building the objective sends nothing
    with FakeTensorMode():
        context = LossContext(dim=query.source.embed_dim, samples=max(1, query.samples), communicator=communicator)
        options = query.config.objective
        objective = build_function(find_method(options.method).build, options, context)
        replicated = sum(tensor.nbytes for tensor in objective.replicated_state().values())
        on_device = replicated
        on_host = 0
        undo_copies = replicated
        for table in objective.row_tables().values():
            size = sum(tensor.nbytes for tensor in table.tensors.values())
            if not table.per_sample:
                undo_copies += size
            if query.device == "cuda" and size > MAX_DEVICE_BYTES:
                on_host += size
            else:
                on_device += size
    return ObjectiveState(on_device + undo_copies, on_host)
