"""Runs that read stored outputs of frozen trunks train like runs with the trunks in place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from miniatures import CAPTIONS, save_clip
from ranks import run_ranks
from safetensors.torch import save_file
from small_runs import QUICK, newest_checkpoint, records, tensors, train_connected, weights
from tars import jpeg, write_pairs
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPTokenizer

import neuclip_ds
from neuclip_ds.cli.main import main
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import UserError
from neuclip_ds.models.towers import Encoder
from neuclip_ds.planning.dry_run import print_dry_run
from neuclip_ds.recipe import parse
from neuclip_ds.training.trainer import train

SIZES = [13, 13]  # an epoch has three batches of 8 and one of 2
BAD = {3: {"jpg": b"no image", "txt": b"broken"}, 20: {"jpg": jpeg(20), "txt": b" "}}
TIMM = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "proj_drop_rate": 0.5}
HEADS = ("model.pretrained=clip", "model.vision.trainable=projection", "model.text.trainable=projection")
STORED = ("data.image_features=trunks", "data.text_features=trunks")
STORED_IMAGES = "data.image_features=images"
PATHS = ("model.pretrained", "model.vision.pretrained", "data.train", "data.image_features", "data.text_features")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with shards, a CLIP model, an image model of timm, and the outputs of their trunks.

    Samples have one to three captions; one has a broken image, and another a blank caption.
    """
    folder = tmp_path_factory.mktemp("frozen")
    samples: dict[int, dict[str, bytes]] = {}
    for index in range(sum(SIZES)):
        lines = [f"a dog {index} {line}" for line in range(1 + index % 3)]
        samples[index] = {"jpg": jpeg(index), "txt": "\n".join(lines).encode()}
    write_pairs(folder / "shards", SIZES, {**samples, **BAD})
    save_clip(folder / "clip")
    torch.manual_seed(1)  # a tower whose weights equal the random ones of seed 0 counts as not loaded
    image_model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, **TIMM)
    (folder / "timm").mkdir()
    save_file(image_model.state_dict(), folder / "timm" / "model.safetensors")
    statistics = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 32, 32]}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": TIMM, "pretrained_cfg": statistics}
    (folder / "timm" / "config.json").write_text(json.dumps(config))

    captions = ("--captions", "txt:lines", "--all-captions")
    embed(folder, "clip", "trunks", "--output=trunk", *captions)
    embed(folder, "clip", "crops", "--output=trunk", "--crops=2", "--crop-scale=0.5", *captions)
    embed(folder, f"timm:{folder}/timm", "images")
    embed(folder, "clip", "one_caption", "--output=trunk", "--captions", "txt:lines")
    embed(folder, "clip", "joint", *captions)
    write_pairs(folder / "other_shards", [26])
    other = save_clip(folder / "other_clip")
    with torch.no_grad():
        other.vision_model.post_layernorm.weight.mul_(1.001)
    other.save_pretrained(folder / "other_clip")
    return folder


def embed(workspace: Path, model: str, out: str, *options: str) -> None:
    name = model if ":" in model else str(workspace / model)
    fixed = ["--dtype=float32", "--workers=0", "--batch-size=8"]
    main(["embed", name, str(workspace / "shards"), f"--out={workspace}/{out}", *fixed, *options])


def options_of(workspace: Path, runs: Path, *options: str) -> list[str]:
    """Return the options of a run; a value of `options` that names a folder of the workspace becomes its path."""
    fixed = [
        "demo",
        *QUICK,
        "--data.captions=txt:lines",
        "--data.crop_scale=1",
        "--data.decoder=pil",  # as in `embed`
        "--data.max_bad_fraction=0.5",
        f"--data.train={workspace}/shards",
        "--deepspeed=zero1_fp32",
        "--run.log_every=1",
        f"--run.output_dir={runs}",
        "--run.name=run",
        "--optimizer.schedule=constant",
        "--optimizer.warmup_steps=0",
        "--optimizer.lr=1e-2",
    ]
    chosen: list[str] = []
    for option in options:
        name, _, value = option.partition("=")
        chosen.append(f"--{name}={workspace}/{value}" if name in PATHS else f"--{option}")
    return [*fixed, *chosen]


def run(workspace: Path, runs: Path, *options: str) -> None:
    train(parse(options_of(workspace, runs, *options)).config, RankEnvironment(0, 0, 1))


def assert_equal_to_rounding(found: Path, expected: Path, rtol: float = 1e-5) -> None:
    """Compare the losses of all steps and the weights of two runs."""
    losses = []
    for runs in (found, expected):
        lines = records(runs / "run" / "metrics.jsonl")
        losses.append([line["loss"] for line in lines if "loss" in line])  # absent from the small batches
    assert losses[0] == pytest.approx(losses[1], rel=rtol) and losses[0]
    expected_weights = weights(newest_checkpoint(expected))
    for name, weight in weights(newest_checkpoint(found)).items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=10 * rtol, atol=rtol)


@pytest.fixture(scope="module")
def in_place(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the runs of six steps that train both heads with the trunks in place."""
    runs = tmp_path_factory.mktemp("in_place")
    run(workspace, runs, *HEADS, "max_steps=6")
    return runs


@pytest.mark.parametrize("stored", [STORED, STORED[:1], STORED[1:]], ids=["both", "image", "text"])
def test_heads_train_on_stored_features_as_in_place(
    workspace: Path, tmp_path: Path, in_place: Path, stored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both sides stored, no shard is read and no trunk runs."""
    if stored == STORED:
        monkeypatch.setattr(Encoder, "feature", None)
        monkeypatch.setattr("neuclip_ds.data.dataset.SampleReader.read", None)
    run(workspace, tmp_path, *HEADS, *stored, "max_steps=6")
    assert_equal_to_rounding(tmp_path, in_place)
    bad = [{line["index"] for line in records(runs / "run" / "bad_samples.jsonl")} for runs in (tmp_path, in_place)]
    assert bad[0] == bad[1] == set(BAD)


def _train_on_rank(communicator: Communicator, arguments: list[str]) -> None:
    train_connected(communicator, parse(arguments).config)


@pytest.mark.parametrize("engine", ["zero1_fp32", "zero3_fp32"])
def test_two_ranks_with_micro_batches_train_like_one_rank_in_place(
    workspace: Path, tmp_path: Path, in_place: Path, engine: str
) -> None:
    options = [*HEADS, *STORED, "max_steps=6", "data.micro_batch=2", f"deepspeed={engine}", "data.workers=1"]
    run_ranks(2, _train_on_rank, options_of(workspace, tmp_path, *options))
    assert_equal_to_rounding(tmp_path, in_place, rtol=1e-4)


def test_crops_are_those_of_training(workspace: Path, tmp_path: Path) -> None:
    """Only two epochs are equal: in the third, training in place draws new crops, and the stored ones are repeated."""
    options = [*HEADS, "data.crop_scale=0.5", "data.decoder=simplejpeg", "model.projection_dropout=0.2"]
    run(workspace, tmp_path / "in_place", *options, "max_steps=8")
    run(workspace, tmp_path / "stored", *options, "data.image_features=crops", "max_steps=8")
    assert_equal_to_rounding(tmp_path / "stored", tmp_path / "in_place")


LIT = (
    "model.vision.name=vit_tiny_patch16_224",
    f"model.vision.options={json.dumps(TIMM)}",
    "model.vision.pretrained=timm/model.safetensors",
    "model.vision.image_size=32",
    "model.vision.mean=[0.5,0.5,0.5]",
    "model.vision.std=[0.5,0.5,0.5]",
    "model.embed_dim=16",
    "model.text.width=16",
    "model.text.layers=1",
    "model.text.heads=2",
    "model.text.vocab_size=300",
)


@pytest.mark.parametrize("part", ["frozen", "projection"])
def test_a_text_tower_trains_on_stored_images_as_with_a_locked_tower(
    workspace: Path, tmp_path: Path, part: str
) -> None:
    """Dropout in the locked image tower is off from the first step."""
    options = [*LIT, f"model.vision.trainable={part}", "max_steps=3"]
    run(workspace, tmp_path / "in_place", *options)
    run(workspace, tmp_path / "stored", *options, "data.image_features=images")
    assert_equal_to_rounding(tmp_path / "stored", tmp_path / "in_place", rtol=1e-4)


def test_a_run_resumes_bit_identically_and_is_a_complete_model(workspace: Path, tmp_path: Path) -> None:
    """Evaluations during and after training, `load` and export use the trunks and the trained heads."""
    options = [*HEADS, *STORED, "data.val=4", "run.evaluate_every=2", "ema.decay=0.9", "data.micro_batch=4"]
    run(workspace, tmp_path / "whole", *options, "max_steps=6")
    run(workspace, tmp_path / "resumed", *options, "max_steps=3")
    with pytest.raises(UserError, match=r"data\.text_features=a folder, but this run uses data\.text_features=None"):
        run(workspace, tmp_path / "resumed", *HEADS, STORED[0], *options[5:], "max_steps=6")
    run(workspace, tmp_path / "resumed", *options, "max_steps=6")
    whole, resumed = (tensors(newest_checkpoint(tmp_path / name)) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if whole[name] != resumed[name]] == []

    folder = tmp_path / "whole" / "run"
    assert "ema/image_to_text_recall@1" in records(folder / "metrics.jsonl")[-1]
    main(["export", str(folder), f"--out={tmp_path}/exported"])
    exported = CLIPModel.from_pretrained(tmp_path / "exported")
    tokens = CLIPTokenizer.from_pretrained(tmp_path / "exported")(CAPTIONS[:1], return_tensors="pt")
    with torch.no_grad():
        features = exported.text_projection(exported.text_model(**tokens).pooler_output)
    torch.testing.assert_close(neuclip_ds.load(folder).encode_texts(CAPTIONS[:1]), normalize(features, dim=1))
    start = CLIPModel.from_pretrained(workspace / "clip")
    assert not torch.equal(exported.text_projection.weight, start.text_projection.weight)
    main(["evaluate", str(folder), "--data", str(workspace / "shards"), f"--out={tmp_path}/scores", "--workers=0"])
    assert any((tmp_path / "scores").rglob("*.json*"))


def test_recovery_in_bf16_reads_stored_features(workspace: Path, tmp_path: Path) -> None:
    options = [*HEADS, *STORED, "recovery.epochs=1", "deepspeed=zero2_bf16", "max_steps=2"]
    run(workspace, tmp_path, *options)
    lines = records(tmp_path / "run" / "recovery" / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line][-1] == 3
    assert all(line["skipped_steps"] == 0 for line in lines if "skipped_steps" in line)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "trained trunk": (["model.pretrained=clip", *STORED], "trainable=all trains the trunk: set .*=projection"),
    "adapters": (
        ["model.pretrained=clip", "model.lora.rank=2", STORED[1]],
        r"model\.lora\.rank=2 adds adapters to it",
    ),
    "checkpointing": ([*HEADS, *STORED, "model.activation_checkpointing=true"], "has no effect with"),
    "patch drop": ([*LIT, "model.vision.trainable=projection", "model.vision.patch_drop=0.5", STORED[0]], "no effect"),
    "augmentation": ([*HEADS, *STORED, "data.augment.gray_scale_prob=0.5"], r"data\.augment has no effect"),
    "random crops": ([*HEADS, *STORED, "data.crop_scale=0.9"], r"set data\.crop_scale=1, or run .*--crops"),
    "other crops": ([*HEADS, "data.image_features=crops", "data.crop_scale=0.9"], r"crop scale 0\.5"),
    "one caption": (
        [*HEADS, "data.text_features=one_caption"],
        "contains features of only one caption per sample.*--all-captions",
    ),
    "joint features": ([*HEADS, "data.image_features=joint"], "contains joint features, but .* before the projection"),
    "no texts": ([*HEADS, "data.text_features=images"], "contains no text features"),
    "width": ([*HEADS, "data.image_features=images"], "features of width 16, but the image tower's trunk has width 32"),
    "weights": (
        ["model.pretrained=other_clip", *HEADS[1:], *STORED],
        "contains outputs of .*clip, whose weights differ from those of the image tower",
    ),
    "preprocessing": (
        [
            *LIT[:4],
            "model.vision.mean=[0.4,0.5,0.5]",
            *LIT[5:],
            "model.vision.trainable=frozen",
            "data.image_features=images",
        ],
        "was computed with values of model.vision.image_size",
    ),
    "pooling": (
        [
            *(option for option in LIT if not option.startswith("model.vision.options")),
            f"model.vision.options={json.dumps({**TIMM, 'global_pool': 'avg', 'fc_norm': False})}",
            "model.vision.trainable=projection",
            STORED_IMAGES,
        ],
        "uses the weights of the image tower, but computes different features .* model.vision.options",
    ),
    "other data": ([*HEADS, *STORED, "data.train=other_shards"], "were computed for other data"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_the_run_before_its_first_step(workspace: Path, tmp_path: Path, name: str) -> None:
    options, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        run(workspace, tmp_path, *options, "max_steps=1")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_dry_run_counts_no_activations_of_stored_trunks(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a dry run stores manifests in .cache

    def activations(*options: str) -> float:
        print_dry_run(parse(options_of(workspace, tmp_path, *HEADS, *options)).config, RankEnvironment(0, 0, 1), None)
        printed = capsys.readouterr().out
        (line,) = (line for line in printed.splitlines() if line.strip().startswith("activations"))
        return float(line.split()[1])

    assert activations(*STORED) < activations(STORED[0]) < activations()
    with pytest.raises(UserError, match="features of width 16"):
        activations("data.image_features=images")
