"""The DeepSpeed JSON of a run: the user's file, completed by the recipe; free of torch.

The recipe owns batch, learning rate, optimizer and clipping, the JSON owns precision, ZeRO and offload. A JSON that
says something about the recipe's part must say the same (or "auto").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from neuclip_ds.config import Config
from neuclip_ds.errors import UserError

FOLDER = Path(__file__).parents[1] / "ds_configs"


def load_engine_config(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's config for this run.

    Raises:
        UserError: the file is missing or no JSON, or contradicts the recipe.
    """
    path, engine = read_engine_file(config.deepspeed)
    rank_batch = config.rank_batch(world_size)
    ours = {
        # the engine must not average over micro-batches: the feature gradients are already those of the whole batch
        "train_micro_batch_size_per_gpu": rank_batch,
        "train_batch_size": config.data.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_norm,
    }
    for key, value in ours.items():
        if engine.get(key, "auto") not in ("auto", value):
            raise UserError(
                f"{path} sets {key}={engine[key]}, but the recipe makes it {value} (it owns the batch and clipping): "
                f"remove the key from the JSON or set it to auto."
            )
    for key in ("optimizer", "scheduler"):
        if key in engine:
            raise UserError(
                f"{path} has a section {key}, which the recipe owns (optimizer.*): remove it from the JSON."
            )
    if engine.get("fp16", {}).get("enabled"):
        raise UserError(f"{path} enables fp16, whose loss scaling skips steps; use bf16 (zero1_bf16) or float32.")
    zero = engine.get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "nvme" or zero.get(key, {}).get("ratio", 1) != 1:
            raise UserError(
                f"{path} sets zero_optimization.{key} to a disk or to a share of the optimizer, which checkpoints do "
                'not read; set "device": "cpu" and no ratio.'
            )
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UserError(f"{path} sets zero_optimization.stage={stage!r}; it must be 0, 1, 2 or 3.")
    if stage == 3 and config.model.compile:
        raise UserError(
            f"model.compile does not work with ZeRO 3 ({path}), which fetches weights within modules: leave one away."
        )
    return {**engine, **ours, "zero_allow_untested_optimizer": True}


def is_bf16(engine: dict[str, Any]) -> bool:
    """Whether the towers run in bfloat16."""
    return bool(engine.get("bf16", {}).get("enabled", False))


def zero_stage(engine: dict[str, Any]) -> int:
    return int(engine.get("zero_optimization", {}).get("stage", 0))


def read_engine_file(name: str) -> tuple[Path, dict[str, Any]]:
    """The JSON of that name or path, as the user has written it, and where it is.

    Raises:
        UserError: it is missing or no JSON object.
    """
    candidates = [Path(name), FOLDER / f"{name}.json", Path("ds_configs") / f"{name}.json"]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise UserError(f"deepspeed={name} is neither a file nor a name in ds_configs/ ({known}).")
    try:
        engine = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(engine, dict):
        raise UserError(f"{path} must hold a JSON object, as DeepSpeed's documentation describes.")
    return path, engine
