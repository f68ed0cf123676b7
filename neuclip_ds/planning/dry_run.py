"""The dry run (`--dry-run`): check what can be checked without training, and print what the run would cost."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from neuclip_ds.config import Config
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import BatchOrder
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.engine.config import load_engine_config, precision, zero_stage
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.errors import UserError
from neuclip_ds.models.trained_parts import Trainable
from neuclip_ds.planning.data_flow import BANDWIDTH, RATE, Node, simulate
from neuclip_ds.planning.loader_memory import loader_memory
from neuclip_ds.planning.memory import MemoryQuery, account, advice, count_towers, smallest_that_fits
from neuclip_ds.planning.memory_check import local_ranks, shortages
from neuclip_ds.training.checks import check_config, likely_slips, open_held_out
from neuclip_ds.training.data import CACHE, resolve
from neuclip_ds.training.data_order import bytes_in_use, needs_cache, open_order
from neuclip_ds.training.data_position import DataPosition
from neuclip_ds.training.data_sources import TrainingSet
from neuclip_ds.training.phases import model_for_phases, plan_phases
from neuclip_ds.training.recovery import recovery_budget

T = TypeVar("T")


def print_dry_run(
    config: Config, environment: RankEnvironment, hostfile: Path | None, gpu_memory: float | None = None
) -> None:
    """Print the report of a dry run on rank 0.

    It is that of the ranks that run, or of a hostfile's nodes, and with `gpu_memory`, GB of a rank, of what fits.

    Raises:
        UserError: config, DeepSpeed JSON, hostfile or data cannot work.
    """
    nodes = read_hostfile(hostfile) if hostfile else {}
    world_size = sum(nodes.values()) or environment.world_size
    check_config(config, world_size)
    engine = load_engine_config(config, world_size)
    rank_batch, micro = config.rank_batch(world_size), config.micro_batch(world_size)
    problems: list[UserError] = []
    model = _attempt(lambda: _model(config, engine, world_size, gpu_memory), problems)
    training_set = _attempt(lambda: TrainingSet(config.data, lambda source: _open(config, source)), problems)
    manifest = training_set.manifest if training_set else None
    _attempt(lambda: open_held_out(config, Communicator(), CACHE, manifest), problems)
    order = None
    if training_set is not None:
        opened = training_set
        order = _attempt(lambda: open_order(config, opened, max(len(nodes), 1)), problems)
    lines = [f"method     {config.objective.method}"]
    if nodes:
        lines.append(f"nodes      {len(nodes)} ({', '.join(nodes)}), {world_size} ranks")
    lines.append(f"batch      {config.data.batch_size} = {world_size} ranks x {rank_batch}, micro-batch {micro}")
    if model is None:
        lines.append(f"model      {config.model.pretrained or config.model.vision.name}: see the error below")
        lines += _data_lines(config, manifest, order)
    else:
        query, model_lines = model
        lines += [*model_lines, *_data_lines(config, manifest, order)]
        sent = 2 * query.source.embed_dim * resolve_comm_dtype(config, engine).itemsize + 8  # bytes of a pair
        features = (world_size - 1) * rank_batch * sent / 1e6
        lines.append(f"traffic    {features:,.2f} MB of features received per rank and step (computed)")
        lines += _memory_lines(replace(query, samples=manifest.n if manifest else 0), gpu_memory, nodes)
    if training_set is not None and training_set.sources:
        lines += ["sources", *training_set.describe()]
    if manifest is not None and order is not None and needs_cache(config.data, manifest):
        lines += _flow_lines(config, manifest, order, max(len(nodes), 1))
    if environment.rank == 0:
        print("\n".join(lines))
    if problems:
        raise problems[0]


def _attempt(work: Callable[[], T], problems: list[UserError]) -> T | None:
    """Return what `work` does, or None and note its problem."""
    try:
        return work()
    except UserError as error:
        problems.append(error)
        return None


def read_hostfile(path: Path) -> dict[str, int]:
    """Return slots by node name, as DeepSpeed reads the file.

    Raises:
        UserError: the file is missing, or a line is not `NAME slots=N`.
    """
    if not path.is_file():
        raise UserError(f"There is no hostfile {path}; hostfiles/ holds examples.")
    nodes: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The hostfile {path} cannot be read as text: {error}.") from error
    for line in lines:
        entry = line.split("#")[0].split()
        if not entry:
            continue
        name, _, slots = entry[-1].partition("=")
        if len(entry) != 2 or name != "slots" or not re.fullmatch("[1-9][0-9]{0,5}", slots):
            raise UserError(f"{path}: the line {line[:100]!r} is not of the form `NAME slots=N`.")
        if entry[0] in nodes:
            raise UserError(f"{path} names {entry[0][:100]} twice: give each node one line.")
        nodes[entry[0]] = int(slots)
    if not nodes:
        raise UserError(f"The hostfile {path} names no node; write lines of the form `NAME slots=N`.")
    return nodes


def _model(
    config: Config, engine: dict[str, Any], world_size: int, gpu_memory: float | None
) -> tuple[MemoryQuery, list[str]]:
    """Return the run to account for, and what is printed of its model."""
    device = "cuda" if gpu_memory or torch.cuda.is_available() else "cpu"
    model_for_phases(config)  # refuses sizes that its image tower cannot take
    query = MemoryQuery(config, world_size, device=device)
    model = query.build()
    image, text = Trainable.of(model.vision), Trainable.of(model.text)
    checkpointing = ", activation checkpointing" if config.model.activation_checkpointing else ""
    lines = [
        f"model      {query.source.name} {image.total:,} + text {text.total:,} = {image.total + text.total:,} "
        f"parameters{checkpointing}",
        f"precision  {precision(engine).replace('fp32', 'float32')}, ZeRO {zero_stage(engine)} ({config.deepspeed})",
    ]
    if image.frozen or text.frozen:
        lines.insert(1, f"trained    {image.trained:,} + text {text.trained:,} = {image.trained + text.trained:,}")
    return query, lines


def _open(config: Config, source: str) -> Manifest:
    options = ScanOptions(tuple(config.data.captions))
    commands = config.data.allow_commands
    return open_manifest(resolve(source), CACHE / "manifests", options=options, allow_commands=commands)


def _data_lines(config: Config, manifest: Manifest | None, order: BatchOrder | None) -> list[str]:
    if manifest is None or order is None:
        return [f"data       {', '.join(config.data.train_paths) or 'not set'}: see the error below"]
    start = DataPosition.start(order, manifest)
    steps = start.end(config.budget)
    phases = plan_phases(config, start, steps)
    lines = [
        f"data       {manifest.n:,} samples in {manifest.n_shards:,} shards, {manifest.n_bad} incomplete",
        f"checksums  {'of every sample' if manifest.has_checksums else 'none; build-manifest computes them'}",
        f"steps      {steps:,} ({order.steps_per_epoch:,} an epoch, {order.interleave.streams} shard streams)",
        *(f"warning    {slip}" for slip in likely_slips(config, phases)),
    ]
    lines += [f"phase      {phase.describe()}" for phase in phases if len(phases) > 1]
    recovery = config.recovery
    if recovery.reuse is not None:
        lines.append(f"recovery   taken from {recovery.reuse}")
    elif recovery.mode != "none":
        lines.append(f"recovery   {start.end(recovery_budget(recovery)):,} steps with frozen weights ({recovery.mode})")
    return lines


def _flow_lines(config: Config, manifest: Manifest, order: BatchOrder, nodes: int) -> list[str]:
    """Return how a node in the middle of the run's nodes is supplied with shards."""
    node = Node(config.data.cache_gb * 1e9, BANDWIDTH, order.batch_size / nodes / RATE)
    flow = simulate(order, bytes_in_use(manifest), node, nodes, nodes // 2)
    assumed = f"{BANDWIDTH / 1e9:g} GB/s and {RATE:,} samples/s assumed"
    return [f"shards     of each of {nodes} nodes, simulated ({assumed}):", *flow.lines()]


def _memory_lines(query: MemoryQuery, gpu_memory: float | None, nodes: Mapping[str, int]) -> list[str]:
    """Return the accounts of memory, and the smallest ZeRO stage for GPUs of that size; `nodes` are other machines."""
    towers = count_towers(query)
    found = account(query, towers)
    where = "GPU" if query.device == "cuda" else "CPU"
    unknown = "" if query.samples else ", u not counted as n is unknown"
    lines = [f"memory     of each rank's {where} in MB, computed{unknown}:", *found.lines()]
    loaders = loader_memory(query, max(nodes.values(), default=local_ranks()))
    first, *others = loaders.lines()
    lines += [f"loaders    {first}", *(f"           {other}" for other in others)]
    if gpu_memory is None:
        warnings = [] if nodes else shortages(found, loaders, query.device)
        return lines + [f"warning    {warning}" for warning in warnings]
    gpus = f"{query.world_size} x {gpu_memory:g} GB"
    verdict = "fits" if found.fits(gpu_memory) else "does not fit"
    lines.append(f"fit        {query.config.deepspeed} {verdict} {gpus}: {found.peak / 1e9:,.1f} GB of each")
    smallest = smallest_that_fits(query, towers, gpu_memory)
    if smallest is None:
        return [*lines, f"smallest   nothing fits; {advice(query, gpu_memory)}"]
    return [*lines, f"smallest   {smallest[0]}, {smallest[1].peak / 1e9:,.1f} GB of each"]
