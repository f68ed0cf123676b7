"""The DeepSpeed JSON of a run: the user's file, completed by the recipe; free of torch.

The recipe owns batch, learning rate, optimizer and clipping, the JSON owns precision, ZeRO and offload. A JSON that
sets something of the recipe's part must set the same value (or "auto").
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from neuclip_ds.config import Config
from neuclip_ds.documents import read_json
from neuclip_ds.errors import UserError


class _Part(BaseModel):
    """A part of DeepSpeed's JSON: the keys that this package reads, with their types."""

    model_config = ConfigDict(strict=True)


class _Precision(_Part):
    enabled: bool = False


class _Fp16(_Precision):
    fp16_master_weights_and_grads: bool = False


class _Offload(_Part):
    device: Literal["none", "cpu", "nvme"] | None = None
    ratio: float = 1


class _Zero(_Part):
    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: _Offload | None = None
    offload_param: _Offload | None = None


class _Engine(_Part):
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    dump_state: bool = False
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1
    bf16: _Precision = _Precision()
    fp16: _Fp16 = _Fp16()
    zero_optimization: _Zero = _Zero()


FOLDER = Path(__file__).parents[1] / "ds_configs"
DEEPSPEED = "0.19.8"  # the version whose private fields and gradients are tested, as in requirements.txt


def load_engine_config(config: Config, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's config for this run.

    Raises `UserError` if DeepSpeed has another version, or its JSON file is missing, damaged or contradicts the recipe.
    """
    require_version()
    path, engine = read_engine_file(config.deepspeed)
    ours = {
        # the engine must not average over micro-batches: the feature gradients are already those of the whole batch
        "train_micro_batch_size_per_gpu": config.rank_batch(world_size),
        "train_batch_size": config.data.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_norm,
    }
    for key, value in ours.items():
        if engine.get(key, "auto") not in ("auto", value):
            raise UserError(
                f"{path} sets {key}={engine[key]!r:.80}, but the recipe sets {value} (it owns the batch and clipping): "
                f"remove the key from the JSON or set it to auto."
            )
    _refuse_unsupported(path, engine)
    if zero_stage(engine) == 3 and config.model.compile:
        raise UserError(
            f"model.compile does not work with ZeRO 3 ({path}), which fetches weights inside modules: omit one of them."
        )
    return {**engine, **ours, "zero_allow_untested_optimizer": True}


def require_version() -> None:
    """Raise `UserError` unless the tested version of DeepSpeed is installed."""
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        installed = "none"
    if installed.partition("+")[0] != DEEPSPEED:
        raise UserError(
            f"Installed DeepSpeed: {installed}. neuclip_ds reads private fields of DeepSpeed and is tested with "
            f"{DEEPSPEED} alone; 0.19.0 to 0.19.3 also compute wrong gradients under ZeRO 2 in bf16 "
            f"(github.com/deepspeedai/DeepSpeed/issues/8224). Run: pip install deepspeed=={DEEPSPEED}"
        )


def _refuse_unsupported(path: Path, engine: dict[str, Any]) -> None:
    try:
        read = _Engine.model_validate(engine)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, wrong["loc"]))
        raise UserError(f"{path} sets {name}={wrong['input']!r:.80}: {wrong['msg']}.") from error
    for key in ("optimizer", "scheduler"):
        if key in engine:
            raise UserError(
                f"{path} has a section {key}, which the recipe owns (optimizer.*): remove it from the JSON."
            )
    if read.fp16.enabled and (read.zero_optimization.stage == 0 or read.fp16.fp16_master_weights_and_grads):
        raise UserError(
            f"{path} enables fp16 without ZeRO or without float32 weights, which is not supported: use zero1_fp16, or "
            "set zero_optimization.stage to 1 or more and remove fp16.fp16_master_weights_and_grads."
        )
    for name, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if not engine.get(name, {}).get(key, True):
            raise UserError(
                f"{path} turns off {name}.{key}, without which a gradient that is not finite is not found: remove it."
            )
    for key in ("offload_optimizer", "offload_param"):
        section = getattr(read.zero_optimization, key) or _Offload()
        if section.device == "nvme" or section.ratio != 1:
            raise UserError(
                f"{path} sets zero_optimization.{key} to a disk or to a share of the optimizer, which checkpoints do "
                'not read; set "device": "cpu" and no ratio.'
            )


def is_bf16(engine: dict[str, Any]) -> bool:
    """Return whether the towers run in bfloat16."""
    return bool(engine.get("bf16", {}).get("enabled", False))


def precision(engine: dict[str, Any]) -> Literal["fp32", "bf16", "fp16"]:
    """Return the precision in which the towers run."""
    if engine.get("fp16", {}).get("enabled", False):
        return "fp16"
    return "bf16" if is_bf16(engine) else "fp32"


def zero_stage(engine: dict[str, Any]) -> int:
    """Return the stage of ZeRO, 0 without."""
    return int(engine.get("zero_optimization", {}).get("stage", 0))


def read_engine_file(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the path and the content, as the user has written it, of a JSON file that is named or given by path."""
    candidates = [Path(name), FOLDER / f"{name}.json", Path("ds_configs") / f"{name}.json"]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise UserError(f"deepspeed={name} is neither a file nor a name in ds_configs/ ({known}).")
    engine = read_json(path)
    if not isinstance(engine, dict):
        raise UserError(f"{path} must hold a JSON object, as DeepSpeed's documentation describes.")
    return path, engine
