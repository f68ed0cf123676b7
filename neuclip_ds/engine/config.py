"""A run's DeepSpeed config: the user's JSON file plus settings from the recipe. The module does not import torch.

The recipe sets the batch size, learning rate, optimizer and clipping; the JSON file sets precision, ZeRO and offload.
If the JSON file also sets batch sizes or clipping, the value must equal the recipe's or be "auto"; the sections
`optimizer` and `scheduler` are rejected.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.section import read_options


class _Section(BaseModel):
    """A section of DeepSpeed's JSON: the keys that this package reads, with their types."""

    model_config = ConfigDict(strict=True)


class _Precision(_Section):
    enabled: bool = False
    check_grad_overflow: bool = True
    immediate_grad_update: bool = False
    bf16_master_weights_and_grads: bool = False


class _Offload(_Section):
    device: Literal["none", "cpu", "nvme"] | None = None
    ratio: float = 1


class _Zero(_Section):
    stage: Literal[0, 1, 2, 3] = 0
    compute_grad_norm: bool = True
    offload_optimizer: _Offload | None = None
    offload_param: _Offload | None = None
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None

    def old_offload_options(self) -> list[str]:
        """Return the names of DeepSpeed's deprecated offload options that are set."""
        names = ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
        return [name for name in names if getattr(self, name)]


class _Engine(_Section):
    steps_per_print: int | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1
    bf16: _Precision = _Precision()
    fp16: _Precision = _Precision()
    zero_optimization: _Zero = _Zero()
    zero_force_ds_cpu_optimizer: bool = True


FOLDER = Path(__file__).parents[1] / "ds_configs"
_FLOAT32 = ("fp32", "float32", "float")  # DeepSpeed's names
_MAX_SUMMED_IN_BF16 = 4  # maximum number of micro-batches whose gradients may be summed in bf16
DEEPSPEED = "0.19.8"  # version whose private fields and gradients are tested; the same as in requirements.txt


def load_engine_config(config: Config, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's config for this run.

    Raises `UserError` if the installed DeepSpeed is not the tested version, if the JSON file is missing, damaged,
    unsupported or inconsistent with the recipe, or if the batch cannot be split into equal micro-batches per rank.
    """
    _require_version()
    path, engine = read_engine_file(config.deepspeed)
    recipe_options = {
        # the engine must not average over micro-batches: the feature gradients already refer to the whole batch
        "train_micro_batch_size_per_gpu": config.rank_batch(world_size),
        "train_batch_size": config.data.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm,
    }
    for key, value in recipe_options.items():
        if engine.get(key, "auto") not in ("auto", value):
            raise UserError(
                f"{path} sets {key}={engine[key]!r:.80}, but the recipe, which determines batch sizes and clipping, "
                f'sets {value}: remove the key from the JSON, or set it to "auto".'
            )
    _refuse_unsupported(path, engine)
    micro_batches = config.rank_batch(world_size) // config.micro_batch(world_size)
    if micro_batches > _MAX_SUMMED_IN_BF16 and not accumulates_in_float32(engine):
        raise UserError(
            f"With {path}, the gradients of {micro_batches} micro-batches are summed in {precision(engine)}, which "
            "loses small gradients: use deepspeed=zero1_bf16, which sums in float32 (data_types.grad_accum_dtype), or "
            f"raise data.micro_batch, so that a rank has at most {_MAX_SUMMED_IN_BF16} micro-batches."
        )
    if zero_stage(engine) == 3 and config.model.compile in ("blocks", "towers"):
        raise UserError(
            f"model.compile={config.model.compile} does not work with ZeRO 3 ({path}), which fetches weights inside "
            "modules: set model.compile to auto or false, or use a DeepSpeed config with a lower ZeRO stage."
        )
    if config.optimizer.lean_zero1:
        _require_lean_zero1(path, engine)
    # DeepSpeed's throughput timer waits for the whole device in each forward pass and step
    defaults = {"timers": {"throughput": {"enabled": False}}}
    return {**defaults, **engine, **recipe_options, "zero_allow_untested_optimizer": True}


def _require_lean_zero1(path: Path, engine: dict[str, Any]) -> None:
    """Raise `UserError` unless `engine/lean_zero1.py` can replace DeepSpeed's step under this config."""
    options = _Engine.model_validate(engine)
    problem = ""
    if precision(engine) != "bf16" or zero_stage(engine) != 1:
        problem = f"selects ZeRO {zero_stage(engine)} in {precision(engine)}"
    elif offloads_optimizer(engine):
        problem = "offloads the optimizer"
    elif not accumulates_in_float32(engine):
        problem = "does not set data_types.grad_accum_dtype=fp32"
    elif engine.get("communication_data_type") not in _FLOAT32:
        problem = "does not set communication_data_type=fp32"
    elif options.prescale_gradients or options.gradient_predivide_factor != 1:
        problem = "divides gradients before they are summed (prescale_gradients or gradient_predivide_factor)"
    elif options.bf16.immediate_grad_update:
        problem = "sets bf16.immediate_grad_update"
    if problem:
        raise UserError(
            f"optimizer.lean_zero1 supports only ZeRO 1 in bf16 with float32 gradients, but {path} {problem}: set "
            "optimizer.lean_zero1=false, or use deepspeed=zero1_bf16."
        )


def offloads_optimizer(engine: dict[str, Any]) -> bool:
    """Return whether the optimizer's state is offloaded from the GPU."""
    offload = engine.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")


def accumulates_in_float32(engine: dict[str, Any]) -> bool:
    """Return whether micro-batch gradients are summed in float32; without ZeRO, the sum has the weights' dtype."""
    if precision(engine) == "fp32":
        return True
    dtype = engine.get("data_types", {}).get("grad_accum_dtype")
    return bool(zero_stage(engine)) and dtype in _FLOAT32


def _require_version() -> None:
    """Raise `UserError` unless the tested version of DeepSpeed is installed."""
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        installed = "none"
    if installed.partition("+")[0] != DEEPSPEED:
        raise UserError(
            f"Installed DeepSpeed: {installed}. neuclip_ds reads private fields of DeepSpeed and is tested only "
            f"with {DEEPSPEED}; versions up to 0.19.3 may also compute wrong gradients under ZeRO 2 in bf16 on several "
            f"ranks (github.com/deepspeedai/DeepSpeed/issues/8224). Run: pip install deepspeed=={DEEPSPEED}"
        )


def _refuse_unsupported(path: Path, engine: dict[str, Any]) -> None:
    try:
        options = _Engine.model_validate(engine)
    except ValidationError as error:
        mistake = error.errors()[0]
        name = ".".join(map(str, mistake["loc"]))
        raise UserError(f"{path} sets {name}={mistake['input']!r:.80}: {mistake['msg']}.") from error
    zero = options.zero_optimization
    problems = []
    for section in ("optimizer", "scheduler"):
        if section in engine:
            problems.append(
                f"contains the section {section}, but the recipe sets these options: remove the section from the JSON"
            )
    if options.fp16.enabled:
        problems.append(
            "enables fp16, which is not supported: use deepspeed=zero1_bf16, or zero1_fp32 on a GPU without bf16"
        )
    if "bfloat16" in engine:
        problems.append("contains the section bfloat16, an old name that this project does not read: rename it to bf16")
    if options.bf16.bf16_master_weights_and_grads:
        problems.append(
            "sets bf16.bf16_master_weights_and_grads, but this project keeps master weights in float32: remove this "
            "setting from the JSON"
        )
    for key in zero.old_offload_options():
        problems.append(
            f"sets zero_optimization.{key}, an old option that this project does not read: use offload_optimizer or "
            'offload_param with "device": "cpu"'
        )
    if not options.bf16.check_grad_overflow:
        problems.append(
            "turns off bf16.check_grad_overflow, without which non-finite gradients are not detected: remove this "
            "setting from the JSON"
        )
    if not zero.compute_grad_norm:
        problems.append(
            "turns off zero_optimization.compute_grad_norm, without which non-finite gradients are not detected: "
            "remove this setting from the JSON"
        )
    for key, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if offload is not None and (offload.device == "nvme" or offload.ratio != 1):
            problems.append(
                f"sets zero_optimization.{key} to NVMe or partial offload, which checkpoints do not support: set "
                '"device": "cpu" without a ratio, or remove the section'
            )
    if offloads_optimizer(engine) and options.zero_force_ds_cpu_optimizer:
        problems.append(
            "offloads the optimizer, for which DeepSpeed by default requires its own optimizer instead of the "
            'recipe\'s: add "zero_force_ds_cpu_optimizer": false to the JSON'
        )
    if problems:
        raise UserError(f"{path} {problems[0]}.")


def precision(engine: dict[str, Any]) -> Literal["fp32", "bf16"]:
    """Return the precision in which the towers run."""
    return "bf16" if engine.get("bf16", {}).get("enabled", False) else "fp32"


def zero_stage(engine: dict[str, Any]) -> int:
    """Return the ZeRO stage, or 0 without ZeRO."""
    return int(engine.get("zero_optimization", {}).get("stage", 0))


def read_engine_file(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the path and the raw content of a DeepSpeed JSON file, given by name or path.

    Raises `UserError` if the file does not exist or is not a JSON object.
    """
    candidates = [Path(name), FOLDER / f"{name}.json", Path("ds_configs") / f"{name}.json"]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise UserError(f"deepspeed={name} is neither a file nor one of the names in ds_configs/: {known}.")
    engine = read_options(path)
    if not isinstance(engine, dict):
        raise UserError(f"{path} must contain a JSON object, as DeepSpeed's documentation describes.")
    return path, engine
