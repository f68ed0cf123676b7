"""`--dry-run`: checks everything that can be checked without training, and says what the run would cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from neuclip_ds.config import Config, TextConfig
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import parameter_count
from neuclip_ds.models.source import ModelSource, locate_model, open_source
from neuclip_ds.objectives import find_method
from neuclip_ds.training.data_position import DataPosition
from neuclip_ds.training.engine_config import is_bf16, load_engine_config, zero_stage
from neuclip_ds.training.recovery import recovery_budget
from neuclip_ds.training.sources import CACHE, open_order, resolve


def print_plan(config: Config, environment: RankEnvironment, hostfile: Path | None) -> None:
    """Prints the plan on rank 0.

    Raises:
        UserError: config, DeepSpeed JSON, hostfile or data cannot work.
    """
    nodes = read_hostfile(hostfile) if hostfile else None
    world_size = sum(nodes.values()) if nodes else environment.world_size
    engine = load_engine_config(config, world_size)
    rank_batch, micro = config.rank_batch(world_size), config.micro_batch(world_size)
    find_method(config.objective.method)
    lines = [f"method     {config.objective.method}"]
    if nodes:
        lines.append(f"nodes      {len(nodes)} ({', '.join(nodes)}), {world_size} ranks")
    lines.append(f"batch      {config.data.batch_size} = {world_size} ranks x {rank_batch}, micro-batch {micro}")
    problems: list[UserError] = []
    source, manifest = None, None
    try:
        source = open_source(config.model, locate_model(config.model, weights=False))
        lines += _model_lines(config, source, engine, world_size)
    except UserError as error:
        problems.append(error)
        lines.append(f"model      {config.model.pretrained or config.model.vision.name}: see the error below")
    try:
        manifest = _manifest(config)
    except UserError as error:
        problems.append(error)
    lines += _data_lines(config, manifest)
    if source is not None:
        lines += _objective_lines(config, source.embed_dim, engine, world_size, manifest)
    if environment.rank == 0:
        print("\n".join(lines))
    if problems:
        raise problems[0]


def read_hostfile(path: Path) -> dict[str, int]:
    """Node name -> slots, as DeepSpeed reads it.

    Raises:
        UserError: missing, or a line that is not `NAME slots=N`.
    """
    if not path.is_file():
        raise UserError(f"There is no hostfile {path}; hostfiles/ holds examples.")
    nodes: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = line.split("#")[0].split()
        if not entry:
            continue
        name, _, slots = entry[-1].partition("=")
        if len(entry) != 2 or name != "slots" or not slots.isdigit():
            raise UserError(f"{path}: the line {line!r} is not of the form `NAME slots=N`.")
        nodes[entry[0]] = int(slots)
    if not nodes:
        raise UserError(f"The hostfile {path} names no node; write lines of the form `NAME slots=N`.")
    return nodes


def _model_lines(config: Config, source: ModelSource, engine: dict[str, Any], world_size: int) -> list[str]:
    stand_in: Any = _Sizes(config.model.text)
    tokenizer = source.tokenizer(lambda: stand_in)
    with torch.device("meta"):
        model = source.build(tokenizer)
    image, text = parameter_count(model.vision), parameter_count(model.text)
    stage, width = zero_stage(engine), 2 if is_bf16(engine) else 4
    share = [world_size if stage >= level else 1 for level in (3, 2, 1)]  # weights, gradients, optimizer
    total = image + text
    master = 12 if width == 2 else 8  # two float32 moments, and a float32 master beside bf16 weights
    weights, gradients, optimizer = (total * b / k / 1e6 for b, k in zip((width, 4, master), share, strict=True))
    return [
        f"model      {source.name} {image:,} + text {text:,} = {total:,} parameters",
        f"precision  {'bf16' if width == 2 else 'float32'}, ZeRO {stage} ({config.deepspeed})",
        f"per rank   weights {weights:,.0f} MB, gradients {gradients:,.0f} MB, optimizer {optimizer:,.0f} MB "
        "(computed; activations not counted)",
    ]


class _Sizes:
    """Stands for a tokenizer that is yet to be trained."""

    def __init__(self, text: TextConfig) -> None:
        self.vocab_size, self.context_length = text.vocab_size, text.context_length
        self.bos_id, self.eos_id, self.pad_id = 0, 1, 1


def _manifest(config: Config) -> Manifest:
    if not config.data.train:
        raise UserError("Name the training data: --data.train=FOLDER_OF_TARS (or demo:train).")
    options = ScanOptions(tuple(config.data.captions))
    return open_manifest(resolve(config.data.train), CACHE / "manifests", options=options)


def _data_lines(config: Config, manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return [f"data       {config.data.train or 'not named'}: see the error below"]
    order = open_order(config, manifest)
    start = DataPosition(0, 0, order.steps_per_epoch)
    lines = [
        f"data       {manifest.n:,} samples in {manifest.n_shards:,} shards, {manifest.n_bad} incomplete",
        f"steps      {start.end(config.budget):,} ({order.steps_per_epoch:,} an epoch, {order.slots} slots)",
    ]
    recovery = config.recovery
    if recovery.reuse is not None:
        lines.append(f"recovery   taken from {recovery.reuse}")
    elif recovery.mode != "none":
        lines.append(f"recovery   {start.end(recovery_budget(recovery)):,} steps with frozen weights ({recovery.mode})")
    return lines


def _objective_lines(
    config: Config, dim: int, engine: dict[str, Any], world_size: int, manifest: Manifest | None
) -> list[str]:
    objective = config.objective
    batch, rank_batch = config.data.batch_size, config.data.batch_size // world_size
    wire = {"auto": 2 if is_bf16(engine) else 4, "bfloat16": 2, "float32": 4}[objective.wire]
    features = (world_size - 1) * rank_batch * (2 * dim * wire + 8)
    kept = rank_batch * (2 * batch - rank_batch) * 4
    kept = min(kept, int(objective.similarity_budget_mb * 1e6))
    lines = [
        f"traffic    {features / 1e6:,.2f} MB of features received per rank and step (computed)",
        f"objective  similarities {kept / 1e6:,.1f} MB per rank (computed)",
    ]
    sections = find_method(objective.method).sections
    if "moving_average" in sections:
        rows = "n unknown" if manifest is None else f"{8 * manifest.n / world_size / 1e6:,.2f} MB per rank (computed)"
        lines.append(f"u          {rows}")
    if "npn" in sections:
        size = objective.npn.prototypes * dim * 4 * 6 / world_size / 1e6
        lines.append(f"NPN        prototypes, AdaGrad state and queue {size:,.1f} MB per rank (computed)")
    return lines
