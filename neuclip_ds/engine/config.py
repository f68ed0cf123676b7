"""A run's DeepSpeed config: the user's JSON file plus settings from the recipe. The module does not import torch.

The recipe sets the batch size, learning rate, optimizer and clipping; the JSON file sets precision, ZeRO and offload.
If the JSON file also sets batch sizes or clipping, the value must equal the recipe's or be "auto"; the sections
`optimizer` and `scheduler` are rejected.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.section import read_options

FOLDER = Path(__file__).parents[1] / "ds_configs"
_Float32 = Literal["fp32", "float32", "float", "torch.float32"]  # DeepSpeed's names of the dtype
_Dtype = Literal[_Float32, "bf16", "bfloat16", "torch.bfloat16", "fp16", "half"]
_MAX_SUMMED_IN_BF16 = 4  # maximum number of micro-batches whose gradients may be summed in bf16
DEEPSPEED = "0.19.8"  # version whose private fields and gradients are tested; the same as in requirements.txt
_Size = Annotated[int, Field(strict=False)]  # number of elements; like DeepSpeed, accepts 5e8


class _Section(BaseModel):
    """A section of DeepSpeed's JSON: the keys that this package reads, with their types and DeepSpeed's defaults."""

    model_config = ConfigDict(strict=True, frozen=True)


class _Precision(_Section):
    enabled: bool = False
    check_grad_overflow: bool = True
    immediate_grad_update: bool = False
    bf16_master_weights_and_grads: bool = False


class _DataTypes(_Section):
    grad_accum_dtype: _Dtype | None = None  # None stands for the weights' dtype


class _Offload(_Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    ratio: float = 1


class ZeroOptions(_Section):
    """The section `zero_optimization`."""

    stage: Literal[0, 1, 2, 3] = 0
    compute_grad_norm: bool = True
    overlap_comm: bool | None = Field(None, strict=False)  # None stands for true in stage 3 and false in other stages
    reduce_bucket_size: _Size = 500_000_000
    sub_group_size: _Size = 1_000_000_000
    stage3_max_live_parameters: _Size = 1_000_000_000
    stage3_param_persistence_threshold: _Size = 100_000
    offload_optimizer: _Offload | None = None
    offload_param: _Offload | None = None
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _auto_is_default(cls, section: Any) -> Any:
        """Omit options that are "auto", for which DeepSpeed uses its defaults; a stage of "auto" is refused."""
        if not isinstance(section, dict):
            return section
        return {key: value for key, value in section.items() if value != "auto" or key == "stage"}

    def old_offload_options(self) -> list[str]:
        """Return the names of DeepSpeed's deprecated offload options that are set."""
        names = ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
        return [name for name in names if getattr(self, name)]


class EngineOptions(_Section):
    """The options of a DeepSpeed config that this package reads."""

    steps_per_print: int | None = None
    gradient_clipping: float = 0
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1
    communication_data_type: str | None = None  # None stands for the weights' dtype
    data_types: _DataTypes = _DataTypes()
    bf16: _Precision = _Precision()
    fp16: _Precision = _Precision()
    zero_optimization: ZeroOptions = ZeroOptions()
    zero_force_ds_cpu_optimizer: bool = True


@dataclass(frozen=True)
class EngineConfig:
    """A run's DeepSpeed config.

    Attributes:
        options: the options that this package reads.
        json: the whole config, for `deepspeed.initialize`.
    """

    options: EngineOptions
    json: dict[str, Any]

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        """Precision in which the towers run."""
        return "bf16" if self.options.bf16.enabled else "fp32"

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, or 0 without ZeRO."""
        return self.options.zero_optimization.stage

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is offloaded from the GPU."""
        offload = self.options.zero_optimization.offload_optimizer
        return offload is not None and offload.device != "none"

    @property
    def accumulates_in_float32(self) -> bool:
        """Whether micro-batch gradients are summed in float32; without ZeRO, the sum has the weights' dtype."""
        if self.precision == "fp32":
            return True
        return self.zero_stage > 0 and is_float32(self.options.data_types.grad_accum_dtype)


def is_float32(dtype: str | None) -> bool:
    """Return whether an option names float32, by any of DeepSpeed's names; false for None."""
    return dtype is not None and dtype.lower() in get_args(_Float32)


def load_engine_config(config: Config, world_size: int) -> EngineConfig:
    """Return DeepSpeed's config for this run.

    Raises `UserError` if the installed DeepSpeed is not the tested version, if the JSON file is missing, damaged,
    unsupported or inconsistent with the recipe, or if the batch cannot be split into equal micro-batches per rank.
    """
    _require_version()
    path, file_options = read_engine_file(config.deepspeed)
    recipe_options = {
        # the engine must not average over micro-batches: the feature gradients already refer to the whole batch
        "train_micro_batch_size_per_gpu": config.rank_batch(world_size),
        "train_batch_size": config.data.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm,
    }
    for key, value in recipe_options.items():
        if file_options.get(key, "auto") not in ("auto", value):
            raise UserError(
                f"{path} sets {key}={file_options[key]!r:.80}, but the recipe, which determines batch sizes and "
                f'clipping, sets {value}: remove the key from the JSON, or set it to "auto".'
            )
    # DeepSpeed's throughput timer waits for the whole device in each forward pass and step
    defaults = {"timers": {"throughput": {"enabled": False}}}
    json = {**defaults, **file_options, **recipe_options, "zero_allow_untested_optimizer": True}
    engine_config = EngineConfig(_validated(path, json), json)
    _refuse_unsupported(path, engine_config)

    micro_batches = config.rank_batch(world_size) // config.micro_batch(world_size)
    if micro_batches > _MAX_SUMMED_IN_BF16 and not engine_config.accumulates_in_float32:
        raise UserError(
            f"With {path}, the gradients of {micro_batches} micro-batches are summed in {engine_config.precision}, "
            "which loses small gradients: use deepspeed=zero1_bf16, which sums in float32 "
            "(data_types.grad_accum_dtype), or raise data.micro_batch, so that a rank has at most "
            f"{_MAX_SUMMED_IN_BF16} micro-batches."
        )
    if engine_config.zero_stage == 3 and config.model.compile in ("blocks", "towers"):
        raise UserError(
            f"model.compile={config.model.compile} does not work with ZeRO 3 ({path}), which fetches weights inside "
            "modules: set model.compile to auto or false, or use a DeepSpeed config with a lower ZeRO stage."
        )
    if config.optimizer.lean_zero1:
        _require_lean_zero1(path, engine_config)
    return engine_config


def _validated(path: Path, json: dict[str, Any]) -> EngineOptions:
    """Return the options of the file at `path`, completed by the recipe; raise `UserError` if one is invalid."""
    try:
        return EngineOptions.model_validate(json)
    except ValidationError as error:
        mistake = error.errors()[0]
        name = ".".join(map(str, mistake["loc"]))
        raise UserError(f"{path} sets {name}={mistake['input']!r:.80}: {mistake['msg']}.") from error


def _require_lean_zero1(path: Path, engine_config: EngineConfig) -> None:
    """Raise `UserError` unless `engine/lean_zero1.py` can replace DeepSpeed's step under this config."""
    options = engine_config.options
    problem = ""
    if engine_config.precision != "bf16" or engine_config.zero_stage != 1:
        problem = f"selects ZeRO {engine_config.zero_stage} in {engine_config.precision}"
    elif engine_config.offloads_optimizer:
        problem = "offloads the optimizer"
    elif not engine_config.accumulates_in_float32:
        problem = "does not set data_types.grad_accum_dtype=fp32"
    elif not is_float32(options.communication_data_type):
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


def _refuse_unsupported(path: Path, engine_config: EngineConfig) -> None:
    """Raise `UserError` for the first option that a run cannot use."""

    def refuse(problem: str) -> NoReturn:
        raise UserError(f"{path} {problem}.")

    options = engine_config.options
    zero = options.zero_optimization
    for section in ("optimizer", "scheduler"):
        if section in engine_config.json:
            refuse(
                f"contains the section {section}, but the recipe sets these options: remove the section from the JSON"
            )
    if options.fp16.enabled:
        refuse("enables fp16, which is not supported: use deepspeed=zero1_bf16, or zero1_fp32 on a GPU without bf16")
    if "bfloat16" in engine_config.json:
        refuse("contains the section bfloat16, an old name that this project does not read: rename it to bf16")
    if options.bf16.bf16_master_weights_and_grads:
        refuse(
            "sets bf16.bf16_master_weights_and_grads, but this project keeps master weights in float32: remove this "
            "setting from the JSON"
        )
    for key in zero.old_offload_options():
        refuse(
            f"sets zero_optimization.{key}, an old option that this project does not read: use offload_optimizer or "
            'offload_param with "device": "cpu"'
        )
    if not options.bf16.check_grad_overflow:
        refuse(
            "turns off bf16.check_grad_overflow, without which non-finite gradients are not detected: remove this "
            "setting from the JSON"
        )
    if not zero.compute_grad_norm:
        refuse(
            "turns off zero_optimization.compute_grad_norm, without which non-finite gradients are not detected: "
            "remove this setting from the JSON"
        )
    for key, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if offload is not None and (offload.device == "nvme" or offload.ratio != 1):
            refuse(
                f"sets zero_optimization.{key} to NVMe or partial offload, which checkpoints do not support: set "
                '"device": "cpu" without a ratio, or remove the section'
            )
    if engine_config.offloads_optimizer and options.zero_force_ds_cpu_optimizer:
        refuse(
            "offloads the optimizer, for which DeepSpeed by default requires its own optimizer instead of the "
            'recipe\'s: add "zero_force_ds_cpu_optimizer": false to the JSON'
        )


def read_engine_file(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the path and the raw content of a DeepSpeed JSON file, given by name or path.

    Raises `UserError` if the file does not exist or is not a JSON object.
    """
    candidates = [Path(name), FOLDER / f"{name}.json", Path("ds_configs") / f"{name}.json"]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise UserError(f"deepspeed={name} is neither a file nor one of the names in ds_configs/: {known}.")
    json = read_options(path)
    if not isinstance(json, dict):
        raise UserError(f"{path} must contain a JSON object, as DeepSpeed's documentation describes.")
    return path, json
