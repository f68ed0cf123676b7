"""Fine-tune pretrained checkpoints and export the results with tools/export.py, as users do."""

import json
from pathlib import Path

import open_clip
import pytest
import torch
from miniatures import TINY_VIT, save_clip, save_open_clip
from safetensors.torch import load_file
from small_runs import TRAIN, call, records
from test_checkpoints import saved_timm
from transformers import AutoModel, AutoProcessor

from neuclip_ds.checkpoint.export_run import export_run
from neuclip_ds.errors import UserError

OPTIONS = [
    "--data.batch_size=16",
    "--data.workers=0",
    "--data.micro_batch=8",
    "--model.activation_checkpointing=true",
    "--objective.method=tuneclip",
    "--objective.temperature.initial=null",
    "--optimizer.warmup_steps=0",
    "--run.name=fine",
    "--max_steps=2",
]


@pytest.mark.slow
def test_a_fine_tuned_model_is_exported_to_both_libraries(shards: Path, tmp_path: Path) -> None:
    before = save_clip(tmp_path / "clip").state_dict()
    options = [*OPTIONS, f"--data.train={shards}", "--deepspeed=zero1_bf16"]
    call(TRAIN, "demo", f"--model.pretrained={tmp_path}/clip", *options, folder=tmp_path)
    metrics = records(tmp_path / "runs/fine/metrics.jsonl")
    steps = [line for line in metrics if "tau" in line]
    assert steps[0]["tau"] == pytest.approx(0.018315638)
    assert "zero_shot_top1" in metrics[-1]
    (tmp_path / "clip").rename(tmp_path / "moved")  # the run no longer needs it
    call("tools/export.py", "runs/fine", "--out=exported", folder=tmp_path)
    after = load_file(tmp_path / "exported/model.safetensors")
    assert after.keys() == before.keys()
    assert torch.allclose(after["logit_scale"], torch.tensor(4.0))
    assert all(value.dtype == torch.float32 for value in after.values())
    changes = [(after[name] - before[name]).abs().max() for name in before if name != "logit_scale"]
    assert max(changes) > 1e-4
    assert max(changes) < 1e-2  # two steps of 1e-3: fine-tuned from these weights, not from random ones
    AutoModel.from_pretrained(tmp_path / "exported")
    AutoProcessor.from_pretrained(tmp_path / "exported")
    card = (tmp_path / "exported/README.md").read_text()
    assert "trained from `clip` (model)" in card
    assert "tuneclip" in card
    checkpoint = max((tmp_path / "runs/fine/checkpoints").glob("step_*"))
    assert export_run(checkpoint, "open_clip", tmp_path / "other") == checkpoint
    open_clip.create_model_from_pretrained(f"local-dir:{tmp_path}/other")


@pytest.mark.slow
def test_pretrained_towers_train_resume_and_are_exported(shards: Path, tmp_path: Path) -> None:
    """A timm tower at a different resolution trains on two ranks under ZeRO 3, resumes and is exported."""
    saved_timm(tmp_path / "image.safetensors", TINY_VIT["name"], img_size=32, **TINY_VIT["options"])
    options = [*OPTIONS[:2], "--data.micro_batch=4", "--model.activation_checkpointing=true", f"--data.train={shards}"]
    vision = {**TINY_VIT, "image_size": 64, "pretrained": f"{tmp_path}/image.safetensors"}
    text = {"vocab_size": 300, "context_length": 40, "width": 24, "layers": 2, "heads": 2}
    recipe = {"model": {"vision": vision, "text": text, "embed_dim": 16}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    options += ["--run.name=towers", "--data.zero_shot=", "--deepspeed=zero3_fp32"]
    options += ["--objective.method=openclip"]
    for steps in (2, 4):
        call(TRAIN, "recipe.yaml", *options, f"--max_steps={steps}", folder=tmp_path, ranks=2)
    (tmp_path / "image.safetensors").unlink()  # the run no longer needs it
    call("tools/export.py", "runs/towers", "--out=out", "--license=mit", folder=tmp_path)
    card = (tmp_path / "out/README.md").read_text()
    assert "license: mit" in card and "`image.safetensors` (image tower)" in card
    assert "image_to_text_recall@1" in card
    assert not any(str(tmp_path) in path.read_text() for path in (tmp_path / "out").rglob("*.[jm][sd]*"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero0_fp32", "zero3_fp32"])
@pytest.mark.parametrize("method", ["openclip", "siglip"])
def test_learned_temperature_and_bias_are_exported(engine: str, method: str, shards: Path, tmp_path: Path) -> None:
    save_open_clip(tmp_path / "ours")
    options = [*OPTIONS, f"--data.train={shards}", f"--deepspeed={engine}", f"--objective.method={method}"]
    options += [f"--model.pretrained={tmp_path}/ours", *["--objective.siglip.bias=-10"] * (method == "siglip")]
    call(TRAIN, "demo", *options, folder=tmp_path)
    call("tools/export.py", "runs/fine", "--out=exported", "--format=open_clip", folder=tmp_path)
    after = load_file(tmp_path / "exported/open_clip_model.safetensors")
    metrics = records(tmp_path / "runs/fine/metrics.jsonl")
    steps = [line for line in metrics if "tau" in line]
    assert steps[0]["tau"] == pytest.approx(0.018315638, rel=2e-3)  # after one Adam step of 1e-3 in log(1/tau)
    assert after["logit_scale"] != 4.0
    assert ("logit_bias" in after) == (method == "siglip")
    open_clip.create_model_from_pretrained(f"local-dir:{tmp_path}/exported")


@pytest.mark.parametrize("path", ["runs/nothing", "."])
def test_a_path_without_a_checkpoint_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is neither a run with a checkpoint nor a checkpoint"):
        export_run(tmp_path / path, "transformers", tmp_path / "out")


def test_an_incomplete_newest_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs/a/checkpoints/step_00000007").mkdir(parents=True)
    with pytest.raises(UserError, match=r"step_00000007, the newest checkpoint of .*/runs/a, is incomplete"):
        export_run(tmp_path / "runs/a", "transformers", tmp_path / "out")


def test_a_folder_in_use_is_refused_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").touch()
    with pytest.raises(UserError, match="exists already and is not an empty folder"):
        export_run(tmp_path / "runs/nothing", "transformers", tmp_path / "out")
