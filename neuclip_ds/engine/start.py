"""Start the engine and build the encoders' optimizer."""

import copy
from collections import defaultdict
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from timm.optim import Lion
from torch import Tensor, nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import EngineConfig
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.lamb import Lamb
from neuclip_ds.engine.lean_zero1 import use_lean_step
from neuclip_ds.engine.zero import (
    import_muon_uncompiled,
    keep_frozen_unpartitioned,
    restore_linear,
    share_process_group,
    skip_unused_kernel,
)
from neuclip_ds.errors import UserError
from neuclip_ds.losses.batch_norm import batch_norms
from neuclip_ds.models.trained_parts import learning_rate_scales


def check_engine_config(engine_config: EngineConfig, name: str) -> None:
    """Raise `UserError` if DeepSpeed cannot parse the config called `name`; a process group is not needed.

    DeepSpeed reports some conflicts between options only when the engine starts.
    """
    one_rank = {**engine_config.json, "train_batch_size": engine_config.json["train_micro_batch_size_per_gpu"]}
    try:
        DeepSpeedConfig(copy.deepcopy(one_rank))
    except Exception as error:  # DeepSpeed raises errors of many types
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"DeepSpeed rejects the config deepspeed={name} ({reason}); correct its JSON, or use another config."
        ) from error


def start_engine(
    model: nn.Module,
    config: OptimizerConfig,
    engine_config: EngineConfig,
    communicator: Communicator,
    seed: int = 0,
) -> Engine:
    """Start an engine whose float32 master weights equal the model's, with no optimizer state and a zero learning rate.

    `engine_config` comes from `load_engine_config`, and `seed` seeds dropout. The engine shares the communicator's
    process group.
    """
    optimizer = build_optimizer(model, config)
    # Without ZeRO, DeepSpeed initializes a bf16 optimizer with a step on zero gradients, which would decay the weights
    # and count as the first step; so the learning rate is zero during this step, and the optimizer state is cleared
    for group in optimizer.param_groups:
        group["lr"] = 0.0

    restore_linear()
    skip_unused_kernel(communicator.device)
    import_muon_uncompiled()
    share_process_group(communicator)
    if engine_config.zero_stage == 3:
        keep_frozen_unpartitioned(model, communicator)

    exact_weights: dict[str, Tensor] = {}  # by name; DeepSpeed creates the masters from rounded weights
    if engine_config.precision != "fp32":
        for layer in batch_norms(model):
            _compute_in_float32(layer)
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                exact_weights[name] = weight.detach()

    deepspeed_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_config.json)
    engine = Engine(deepspeed_engine, communicator, seed)
    for placement in engine.placements():
        if placement.name in exact_weights:
            exact = exact_weights[placement.name].flatten()
            placement.within(placement.master).copy_(exact[placement.start : placement.stop])
    optimizer.state.clear()
    if engine_config.zero_stage:
        shard_slices: defaultdict[Tensor, list[slice]] = defaultdict(list)
        for placement in engine.placements():
            shard_slices[placement.master].append(placement.elements)
        if isinstance(optimizer, Lamb):
            optimizer.shard(shard_slices, communicator)
        if config.lean_zero1:
            use_lean_step(deepspeed_engine.optimizer, shard_slices, communicator)
    return engine


def _compute_in_float32(layer: nn.Module) -> None:
    """Make a batch-norm layer a `_Float32BatchNorm`, in place.

    Batch-norm layers have several classes, of torch and of timm, whose forward methods must still be called. The layer
    therefore gets a new class that inherits from its present one.
    """
    own_class = type(layer)
    layer.__class__ = type(own_class.__name__, (_Float32BatchNorm, own_class), {})


class _Float32BatchNorm:
    """Batch normalization that computes in float32 and keeps float32 statistics, as under autocast.

    The input and output have the towers' dtype. A bf16 statistic would lose updates below 0.4% of its value.
    """

    _keep_in_fp32_modules_strict = ("running_mean", "running_var")  # DeepSpeed does not cast these buffers
    _parameters: dict[str, nn.Parameter | None]

    @property
    def weight(self) -> Tensor | None:
        return self._cast("weight")

    @property
    def bias(self) -> Tensor | None:
        return self._cast("bias")

    def _cast(self, name: str) -> Tensor | None:
        parameter = self._parameters[name]
        return None if parameter is None else parameter.float()


def parameter_groups(module: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group the trained parameters by learning-rate factor `lr_scale` (largest first) and weight decay.

    Weight decay applies to parameters of two or more dimensions, but not to gains, biases and other vectors.
    """
    scales = learning_rate_scales(module, config)
    parameters: defaultdict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)  # (lr_scale, decays) -> ...
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameters[scales.get(name, 1.0), parameter.ndim >= 2].append(parameter)
    groups = []
    for lr_scale, decays in sorted(parameters, reverse=True):
        weight_decay = config.weight_decay if decays else 0.0
        groups.append({"params": parameters[lr_scale, decays], "weight_decay": weight_decay, "lr_scale": lr_scale})
    return groups


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the config's optimizer for the groups of `parameter_groups`; `Engine.step` sets their learning rates."""
    groups = parameter_groups(module, config)
    match config.name:
        case "adamw":  # a fused step reads and writes each number once, even for offloaded masters on the CPU
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        case "lamb":  # vectors keep Adam's step (trust ratio 1), as in EVA-CLIP
            adapted = [{**group, "adapt": group["params"][0].ndim >= 2} for group in groups]
            return Lamb(adapted, lr=config.lr, betas=config.betas, eps=config.eps)
        case "lion":
            return Lion(groups, lr=config.lr, betas=config.betas)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
