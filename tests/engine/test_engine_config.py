"""Test how our DeepSpeed JSON files and a user's files are loaded and checked."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from neuclip_ds.config import Config
from neuclip_ds.engine import config as engine_config
from neuclip_ds.engine.config import DEEPSPEED, FOLDER, load_engine_config
from neuclip_ds.errors import UserError

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def config(deepspeed: str, **optimizer: Any) -> Config:
    return Config.model_validate({"deepspeed": deepspeed, "data": {"batch_size": 64}, "optimizer": optimizer})


def write(folder: Path, content: object) -> str:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_files_name_states_its_stage_precision_and_offload(name: str) -> None:
    engine = load_engine_config(config(name, max_grad_norm=0.5), world_size=4)
    assert [f"zero{engine.zero_stage}", engine.precision] == name.split("_")[:2]
    assert engine.offloads_optimizer == name.endswith("offload")
    assert engine.json["train_batch_size"] == 64
    assert engine.json["train_micro_batch_size_per_gpu"] == 16
    assert engine.json["gradient_clipping"] == engine.options.gradient_clipping == 0.5


def test_every_stage_has_a_file_for_each_precision() -> None:
    plain = {f"zero{stage}_{precision}" for stage in range(4) for precision in ("fp32", "bf16")}
    assert set(NAMES) == plain | {"zero2_bf16_offload", "zero3_bf16_offload"}


def test_sizes_may_be_auto_or_written_with_an_exponent(tmp_path: Path) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 5e7, "stage3_max_live_parameters": "auto", "overlap_comm": "auto"}
    options = load_engine_config(config(write(tmp_path, {"zero_optimization": zero})), world_size=2).options
    assert options.zero_optimization.reduce_bucket_size == 50_000_000
    assert options.zero_optimization.stage3_max_live_parameters == 1_000_000_000
    assert options.zero_optimization.overlap_comm is None


def test_a_file_may_repeat_the_recipes_values_or_omit_them(tmp_path: Path) -> None:
    path = write(tmp_path, {"train_batch_size": 64, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}})
    assert load_engine_config(config(path), world_size=2).zero_stage == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"train_batch_size": 32}, "train_batch_size=32"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
        ({"gradient_clipping": 3.0}, "gradient_clipping=3.0"),
        ({"optimizer": {"type": "Adam"}}, "section optimizer"),
        ({"scheduler": {}}, "section scheduler"),
        ({"fp16": {"enabled": True}}, "enables fp16, which is not supported"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "turns off bf16.check_grad_overflow"),
        ({"bfloat16": {"enabled": True}}, "rename it to bf16"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "master weights in float32"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "cpu_offload, an old option"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "zero_force_ds_cpu_optimizer"),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "turns off zero_optimization.compute_grad"),
        ({"zero_optimization": {"stage": 4}}, "stage=4"),
        ({"zero_optimization": {"stage": "auto"}}, "stage='auto'"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 0.5}}, "reduce_bucket_size=0.5"),
        ({"data_types": []}, "data_types=[]"),
        ({"data_types": {"grad_accum_dtype": "FP32"}}, "grad_accum_dtype='FP32'"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer to NVMe or partial offload",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, '"device": "cpu"'),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "without a ratio"),
        ("{", "not valid YAML or JSON"),
        ([], "must contain a JSON object"),
    ],
)
def test_unsupported_options_and_contradictions_of_the_recipe_are_refused(
    content: object, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        load_engine_config(config(write(tmp_path, content)), world_size=2)
    assert words in str(caught.value)


def test_compiled_towers_under_zero_3_are_refused() -> None:
    compiled = Config.model_validate({"model": {"compile": "blocks"}, "deepspeed": "zero3_fp32"})
    with pytest.raises(UserError, match="does not work with ZeRO 3"):
        load_engine_config(compiled, world_size=1)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zero1_bf16"])
def test_the_lean_step_is_refused_where_it_has_no_effect(name: str) -> None:
    with pytest.raises(UserError, match=r"optimizer\.lean_zero1.*use deepspeed=zero1_bf16"):
        load_engine_config(config(name, lean_zero1=True), world_size=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offloads"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype"),
        ({"communication_data_type": "bf16"}, "communication_data_type"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "immediate_grad_update"),
        ({}, ""),
    ],
)
def test_the_lean_step_is_refused_where_its_result_would_differ(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    engine = {**json.loads((FOLDER / "zero1_bf16.json").read_text()), **options}
    lean = config(write(tmp_path, engine), lean_zero1=True)
    with pytest.raises(UserError, match=words) if words else nullcontext():
        load_engine_config(lean, world_size=1)


def test_the_error_for_a_missing_file_lists_the_known_names() -> None:
    with pytest.raises(UserError, match=r"neither a file nor one of the names in ds_configs/: .*zero1_bf16"):
        load_engine_config(config("zero5"), world_size=1)


def test_another_version_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in ("0.19.3", "0.20.0"):
        monkeypatch.setattr(engine_config, "version", lambda _, found=installed: found)
        with pytest.raises(UserError) as caught:
            load_engine_config(config("zero1_bf16"), world_size=1)
        for words in (f"DeepSpeed: {installed}", "private fields", f"pip install deepspeed=={DEEPSPEED}"):
            assert words in str(caught.value)
    monkeypatch.setattr(engine_config, "version", lambda _: f"{DEEPSPEED}+cu130")
    load_engine_config(config("zero1_bf16"), world_size=1)


def test_the_requirements_install_the_version_that_is_accepted() -> None:
    lines = (Path(__file__).parents[2] / "requirements.txt").read_text().splitlines()
    assert f"deepspeed=={DEEPSPEED}" in lines


@pytest.mark.parametrize(
    ("deepspeed", "batch", "refused"), [("zero0_bf16", 10, True), ("zero0_bf16", 8, False), ("zero1_bf16", 64, False)]
)
def test_many_gradients_are_not_added_in_16_bits(deepspeed: str, batch: int, refused: bool) -> None:
    many = Config.model_validate({"deepspeed": deepspeed, "data": {"batch_size": batch, "micro_batch": 1}})
    with pytest.raises(UserError, match="grad_accum_dtype") if refused else nullcontext():
        load_engine_config(many, world_size=2)


def test_the_timer_that_waits_for_the_device_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert load_engine_config(config("zero1_bf16"), 1).json["timers"] == {"throughput": {"enabled": False}}
    mine = {"timers": {"throughput": {"enabled": True}}}
    assert load_engine_config(config(write(tmp_path, mine)), 1).json["timers"] == mine["timers"]
