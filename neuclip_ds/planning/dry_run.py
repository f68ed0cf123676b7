"""Dry run (`--dry-run`): check a run without training, and print its length, traffic and memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.config import Config
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.feature_table import FeatureTable, cached_bytes
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.mixture import BatchOrder
from neuclip_ds.data.open_data import CACHE, open_cache, open_tables, resolve
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.stored_towers import (
    check_views,
    loss_tables,
    reads_shards,
    tower_folders,
    tower_tables,
)
from neuclip_ds.data.training_set import TrainingSet, open_order
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment, local_ranks
from neuclip_ds.distributed.launch import read_hostfile
from neuclip_ds.engine.config import EngineConfig, load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype, towers_dtype
from neuclip_ds.errors import UserError, counted
from neuclip_ds.evaluation.evaluator import HeldOut, check_evaluates, check_measured, metric_names, open_held_out
from neuclip_ds.losses.stored_features import stored_folders
from neuclip_ds.models.recompute import checkpointed_blocks
from neuclip_ds.models.trained_parts import TOWERS, Parameters
from neuclip_ds.planning.duration import MeasuredSpeed, duration_lines, read_speed
from neuclip_ds.planning.host_memory import FIX_AT_ANY_STAGE, loader_memory, shortages, stored_bytes
from neuclip_ds.planning.memory import MemoryQuery, account, count_towers, smallest_that_fits
from neuclip_ds.training.checks import check_config, check_tables, config_warnings
from neuclip_ds.training.recovery import newest_of_recovery
from neuclip_ds.training.schedule import run_length
from neuclip_ds.training.stored_trunks import check_trunk_outputs

T = TypeVar("T")


def print_dry_run(
    config: Config,
    environment: RankEnvironment,
    hostfile: Path | None,
    gpu_memory: float | None = None,
    measured: Path | None = None,
) -> None:
    """Let rank 0 print the report of a dry run.

    The report covers the nodes of `hostfile` or, without one, the current ranks. If `gpu_memory` is given, the report
    states whether each rank fits into a GPU with this many GB of memory. If `measured`, the folder of a short run of
    the same model, is given, the report estimates how many hours the run takes.

    Raises:
        UserError: the config, DeepSpeed JSON, hostfile, model, data, best metric or reused recovery is invalid, or the
            measured run is unusable. Unless the config, the JSON or the hostfile is the problem, the other parts of the
            report are printed first.
    """
    nodes = read_hostfile(hostfile) if hostfile else {}
    world_size = sum(nodes.values()) or environment.world_size
    check_config(config, world_size)
    engine_config = load_engine_config(config, world_size)
    device = "cuda" if gpu_memory or torch.cuda.is_available() else "cpu"
    query = MemoryQuery(config, world_size, device=device)
    problems = _Problems()
    parts = _open_parts(query, engine_config, len(nodes), measured, problems)
    lines = list(_report_lines(query, engine_config, nodes, parts, gpu_memory))
    if environment.rank == 0:
        print("\n".join(lines))
    problems.raise_any()


class _Problems:
    """The errors in parts of the report; they are raised after the other parts have been printed."""

    def __init__(self) -> None:
        self._errors: list[UserError] = []

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return `work()`, or None if it raises `UserError`, which is kept."""
        try:
            return work()
        except UserError as error:
            self._errors.append(error)
            return None

    def raise_any(self) -> None:
        """Raise one `UserError` with the messages of all errors, if there are any."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise UserError("\n".join(dict.fromkeys(map(str, self._errors))))


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The parts of a run that the report describes; None or empty if a part has a problem or the run lacks it."""

    model_lines: list[str] | None
    data: TrainingSet | None
    held_out: HeldOut | None
    tables: dict[str, FeatureTable]
    order: BatchOrder | None
    speed: MeasuredSpeed | None  # of the measured run


def _open_parts(
    query: MemoryQuery, engine_config: EngineConfig, nodes: int, measured: Path | None, problems: _Problems
) -> _Parts:
    """Open the parts of a run on `nodes` nodes (0 without a hostfile), and keep their errors in `problems`."""
    config = query.config
    attempt = problems.attempt
    model_lines = attempt(lambda: list(_model_lines(query, engine_config)))
    data = attempt(lambda: TrainingSet(config.data, lambda path: _open(config, path)))
    manifest = data.manifest if data else None
    held_out = attempt(lambda: open_held_out(config, Communicator(), CACHE, manifest))
    if manifest and held_out:
        attempt(lambda: _check_best_metric(config, held_out))
    reused = config.recovery.reuse
    run = config.run.output_dir / str(config.run.name)
    if reused is not None and not complete_checkpoints(run / "checkpoints"):  # a run that resumes does not need it
        attempt(lambda: newest_of_recovery(reused))
    tables: dict[str, FeatureTable] = {}
    order = None
    if data:
        tables = attempt(lambda: _open_tables(config, data.manifest)) or {}
        if tower_tables(tables):
            attempt(lambda: check_trunk_outputs(tables, query.build(), query.source.preprocessing, query.tokenizer))
        feature_bytes = cached_bytes(tables.values(), data.manifest)
        needs_shards = reads_shards(tables, config.data.captions)
        order = attempt(
            lambda: open_order(config, data, max(nodes, 1), feature_bytes=feature_bytes, reads_shards=needs_shards)
        )
    speed = None
    if measured is not None and model_lines and order:
        speed = attempt(lambda: read_speed(measured, config))
    return _Parts(model_lines=model_lines, data=data, held_out=held_out, tables=tables, order=order, speed=speed)


def _report_lines(
    query: MemoryQuery, engine_config: EngineConfig, nodes: dict[str, int], parts: _Parts, gpu_memory: float | None
) -> Iterator[str]:
    """Yield the lines of the report; `nodes` maps hosts to numbers of ranks, and `gpu_memory` is in GB."""
    config = query.config
    ranks = counted(query.world_size, "rank")
    yield f"method     {config.objective.method}"
    if nodes:
        yield f"nodes      {len(nodes)} ({', '.join(nodes)}), {ranks}"
    batch = f"{config.data.batch_size} = {ranks} x {query.rank_batch}"
    yield f"batch      {batch}, micro-batch {query.micro_batch}"
    if parts.model_lines:
        yield from parts.model_lines
    else:
        yield f"model      {config.model.pretrained or config.model.vision.name}: see the error below"
    if parts.data and parts.order:
        yield from _data_lines(config, parts.data.manifest, parts.order)
    else:
        yield f"data       {', '.join(config.data.train_paths) or 'not set'}: see the error below"
    for name, table in parts.tables.items():
        yield f"{name:<10} {table.folder}, {table.dtype} of width {table.image_width or table.text_width}"
    if parts.held_out:
        yield f"evaluation {parts.held_out.describe()}"
    if parts.model_lines:
        yield from _cost_lines(query, engine_config, nodes, parts, gpu_memory)
    if parts.data and parts.data.sources:
        yield "sources"
        yield from parts.data.describe()


def _cost_lines(
    query: MemoryQuery, engine_config: EngineConfig, nodes: dict[str, int], parts: _Parts, gpu_memory: float | None
) -> Iterator[str]:
    """Yield the lines on the traffic of a step, on the run's duration if its speed was measured, and on the memory."""
    config = query.config
    world_size = query.world_size
    tables_of_loss = loss_tables(parts.tables)
    stored_widths = {name: table.image_width or 0 for name, table in tables_of_loss.items()}
    query = replace(query, stored_widths=stored_widths, samples=parts.data.manifest.n if parts.data else 0)
    widths = query.source.embed_dim + sum(stored_widths.values())
    bytes_per_pair = 2 * widths * resolve_comm_dtype(config, engine_config).itemsize + 8
    received = (world_size - 1) * query.rank_batch * bytes_per_pair / 1e6
    yield f"traffic    {received:,.2f} MB of features received per rank and step (computed)"
    if parts.speed is not None and parts.order is not None:
        # each rank receives float32 gradients twice, as in an all-reduce, and the updated weights once
        element_bytes = 2 * torch.float32.itemsize + towers_dtype(engine_config).itemsize
        trained = Parameters.of(query.build()).trained
        step_bytes = 1e6 * received + element_bytes * trained * (world_size - 1) / world_size
        steps = run_length(parts.order, config.epochs, config.max_steps)
        yield from duration_lines(parts.speed, steps, config.data.batch_size, world_size, step_bytes)
    yield from _memory_lines(query, gpu_memory, nodes, stored_bytes(tables_of_loss.values()))


def _check_best_metric(config: Config, held_out: HeldOut) -> None:
    """Raise `UserError` if `run.best_metric` is set and is not a result of the run's evaluations."""
    check_evaluates(config, held_out)
    best_metric = config.run.best_metric
    if best_metric is not None:
        check_measured(best_metric, metric_names(config, held_out))


def _model_lines(query: MemoryQuery, engine_config: EngineConfig) -> Iterator[str]:
    config = query.config
    model = query.build()
    image = Parameters.of(model.vision)
    text = Parameters.of(model.text)
    line = f"{query.source.name} {image.total:,} + text {text.total:,} = {image.total + text.total:,} parameters"
    checkpointed = [
        len(checkpointed_blocks(model.get_submodule(name), name, config.model.activation_checkpointing))
        for name in TOWERS
    ]
    if any(checkpointed):
        line += f", activation checkpointing in {checkpointed[0]} image and {checkpointed[1]} text blocks"
    yield f"model      {line}"
    if image.frozen or text.frozen:
        yield f"trained    {image.trained:,} + text {text.trained:,} = {image.trained + text.trained:,}"
    kind = engine_config.precision.replace("fp32", "float32")
    yield f"precision  {kind}, ZeRO {engine_config.zero_stage} ({config.deepspeed})"


def _open(config: Config, source: str) -> Manifest:
    options = ScanOptions(captions=tuple(config.data.captions))
    return open_manifest(resolve(source), CACHE / "manifests", options=options)


def _open_tables(config: Config, manifest: Manifest) -> dict[str, FeatureTable]:
    """Open the stored features of a reference model, of teachers and of frozen trunks as a run does."""
    folders = {**stored_folders(config.objective), **tower_folders(config.data)}
    cache = None if all(map(is_local, folders.values())) else open_cache(config.data)
    tables = open_tables(folders, manifest, config.data.captions, Communicator(), cache)
    check_tables(tables)
    check_views(tables, config.data.crop_scale, config.data.captions)
    return tables


def _data_lines(config: Config, manifest: Manifest, order: BatchOrder) -> list[str]:
    steps = run_length(order, config.epochs, config.max_steps)
    streams = counted(order.interleave.streams, "shard stream")
    lines = [
        f"data       {manifest.n:,} samples in {counted(manifest.n_shards, 'shard')}, {manifest.n_bad:,} incomplete",
        f"checksums  {'of every sample' if manifest.has_checksums else 'none; build-manifest computes them'}",
        f"steps      {steps:,} ({order.steps_per_epoch:,} per epoch, {streams})",
        *(f"warning    {warning}" for warning in config_warnings(config, steps)),
    ]
    recovery = config.recovery
    if recovery.reuse is not None:
        lines.append(f"recovery   taken from {recovery.reuse}")
    elif recovery.epochs:
        lines.append(f"recovery   {run_length(order, recovery.epochs):,} steps with frozen weights")
    return lines


def _memory_lines(
    query: MemoryQuery, gpu_memory: float | None, nodes: dict[str, int], bytes_of_features: int
) -> Iterator[str]:
    """Yield memory estimates and, given `gpu_memory`, whether the run fits, and the lowest ZeRO stage that fits.

    With neither `gpu_memory` nor `nodes`, also yield warnings if this machine has too little memory.

    `nodes` maps hosts to numbers of ranks; `bytes_of_features` is the size of the stored features that the loss uses
    for a pair.
    """
    towers = count_towers(query)
    estimate = account(query, towers)
    unknown = "" if query.samples else ", without u because the number of samples is unknown"
    where = "each rank's GPU" if query.device == "cuda" else "each rank"
    yield f"memory     of {where} in MB, computed{unknown}:"
    yield from estimate.lines()
    loaders = loader_memory(query, max(nodes.values(), default=local_ranks()), bytes_of_features)
    yield f"loaders    {loaders.describe()}"
    if gpu_memory is None:
        if not nodes:
            for warning in shortages(estimate, loaders, query.device):
                yield f"warning    {warning}"
        return
    verdict = "fits" if estimate.fits(gpu_memory) else "does not fit"
    gpus = f"{query.world_size} x {gpu_memory:g} GB"
    reserve = "" if estimate.fits(gpu_memory) else ", and a tenth of the memory must stay free"
    yield (
        f"fit        {query.config.deepspeed} {verdict} {gpus}: it needs {estimate.peak / 1e9:,.1f} GB per GPU{reserve}"
    )
    smallest = smallest_that_fits(query, towers, gpu_memory)
    if smallest is None:
        yield f"lowest     no ZeRO stage fits: {FIX_AT_ANY_STAGE}"
    else:
        name, estimate_of_smallest = smallest
        yield (
            f"lowest     {name} is the lowest ZeRO stage that fits, without offload if possible: it needs "
            f"{estimate_of_smallest.peak / 1e9:,.1f} GB per GPU"
        )
