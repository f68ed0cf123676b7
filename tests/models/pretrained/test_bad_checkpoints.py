"""Checkpoints that cannot be loaded: the message names what is missing and where to put it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from miniatures import clip_tokenizer, save_clip, save_open_clip, save_siglip
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained import locate, open_checkpoint

OPEN_CLIP_FILE = "open_clip_model.safetensors"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    """Return the error message of the first step that refuses the checkpoint."""
    with pytest.raises(UserError) as caught:
        checkpoint = open_checkpoint(locate(str(folder)))
        checkpoint.tokenizer()
        checkpoint.load()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    save_clip(tmp_path)
    return tmp_path


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save_open_clip(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("openai/clip-vit-base-patch32", "no local folder and cannot be downloaded from the hub"),
        ("/nowhere/at/all", "no local folder and cannot be downloaded from the hub"),
        (
            "open_clip:ViT-B-32/laion2b_s34b_b79k",
            "download laion/CLIP-ViT-B-32-laion2B-s34B-b79K on a machine with network",
        ),
        ("open_clip:ViT-H-14-quickgelu/dfn5b", "open_clip:ViT-H-14-quickgelu/FILE"),
        ("open_clip:ViT-B-32/openai", "name open_clip:ViT-B-32-quickgelu/openai"),
        ("open_clip:ViT-B-32/imagenet", "names neither a file nor one of open_clip's weights for ViT-B-32: openai"),
        ("open_clip:ViT-B-33/openai", "no local folder and cannot be downloaded from the hub"),
    ],
)
def test_names_without_network(name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        locate(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_single_file_needs_an_architecture(ours: Path) -> None:
    with pytest.raises(UserError, match="write open_clip:ARCHITECTURE/"):
        locate(str(ours / OPEN_CLIP_FILE))


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "type clip, metaclip_2, siglip, siglip2, or open_clip's" in refusal(tmp_path)


def test_a_place_that_this_rank_does_not_see(clip: Path) -> None:
    place = locate(str(clip))
    with pytest.raises(UserError, match="put the checkpoint under the same path on every node"):
        open_checkpoint(place._replace(path="/nowhere"))


def test_clip_without_projection_dim(clip: Path) -> None:
    edit(clip / "config.json", lambda tree: tree.pop("projection_dim"))
    assert "has no projection_dim, the width of the joint space; add it" in refusal(clip)


def test_siglip_whose_towers_end_in_different_widths(tmp_path: Path) -> None:
    save_siglip(tmp_path)
    edit(tmp_path / "config.json", lambda tree: tree["text_config"].update(projection_size=24))
    assert "projects texts to 24 numbers and images to 32" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "config.json"])
def test_files_that_are_no_json(clip: Path, name: str) -> None:
    (clip / name).write_text("{")
    assert f"{name} is not valid JSON" in refusal(clip)


def test_clip_without_its_processor(clip: Path) -> None:
    (clip / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json; put the checkpoint's file there" in refusal(clip)


def test_clip_without_mean(clip: Path) -> None:
    edit(clip / "preprocessor_config.json", lambda tree: tree.pop("image_mean"))
    assert "has no image_mean and image_std" in refusal(clip)


def test_clip_without_tokenizer(clip: Path) -> None:
    for path in clip.glob("tokenizer*"):
        path.unlink()
    message = refusal(clip)
    assert "holds no tokenizer that transformers can read" in message
    assert "put the model's tokenizer files there" in message


def test_a_tokenizer_of_another_model(clip: Path) -> None:
    edit(clip / "config.json", lambda tree: tree["text_config"].update(eos_token_id=3))
    assert "reads its feature at token 3, but the tokenizer ends a caption with" in refusal(clip)


def test_a_tokenizer_beyond_the_vocabulary(clip: Path) -> None:
    size = len(clip_tokenizer())
    edit(clip / "config.json", lambda tree: tree["text_config"].update(vocab_size=size - 1))
    assert f"has ids up to {size - 1}, but the model's vocabulary ends at {size - 2}" in refusal(clip)


def test_no_weights(clip: Path) -> None:
    (clip / "model.safetensors").unlink()
    assert "has no weights; put model.safetensors" in refusal(clip)


def test_no_weights_of_open_clip(ours: Path) -> None:
    (ours / OPEN_CLIP_FILE).unlink()
    assert f"has no weights; put {OPEN_CLIP_FILE} there" in refusal(ours)


def test_weights_of_another_depth(clip: Path) -> None:
    edit(clip / "config.json", lambda tree: tree["vision_config"].update(num_hidden_layers=3))
    assert "do not match its config: 16 tensors are missing" in refusal(clip)


def test_weights_of_another_width(clip: Path) -> None:
    edit(clip / "config.json", lambda tree: tree.update(projection_dim=24))
    assert "visual_projection.weight is (20, 32) instead of (24, 32)" in refusal(clip) or "2 tensors have" in refusal(
        clip
    )


def test_weights_left_over(ours: Path) -> None:
    edit_weights(ours / OPEN_CLIP_FILE, lambda tensors: tensors.update(extra=torch.zeros(2)))
    assert "1 tensors are unexpected (first extra)" in refusal(ours)


def test_open_clip_weights_of_another_shape(ours: Path) -> None:
    edit(ours / "open_clip_config.json", lambda tree: tree["model_cfg"].update(embed_dim=24))
    assert "2 tensors have another shape (first visual.proj is (32, 20) instead of (32, 24))" in refusal(ours)


def test_open_clip_without_embed_dim(ours: Path) -> None:
    edit(ours / "open_clip_config.json", lambda tree: tree["model_cfg"].pop("embed_dim"))
    assert "has no model_cfg.embed_dim, the width of the joint space; add it" in refusal(ours)


def test_open_clip_without_model_cfg(ours: Path) -> None:
    edit(ours / "open_clip_config.json", lambda tree: tree.pop("model_cfg"))
    assert "has no model_cfg" in refusal(ours)


def test_open_clip_with_unknown_parts(ours: Path) -> None:
    edit(ours / "open_clip_config.json", lambda tree: tree["model_cfg"]["text_cfg"].update(magic=1))
    assert "cannot build" in refusal(ours)


def test_open_clip_without_its_tokenizer(ours: Path) -> None:
    edit(ours / "open_clip_config.json", lambda tree: tree["model_cfg"]["text_cfg"].update(hf_tokenizer_name="x/y"))
    assert "open_clip cannot find the tokenizer" in refusal(ours)


def test_broken_weights(ours: Path) -> None:
    (ours / OPEN_CLIP_FILE).write_bytes(b"nothing of use")
    assert "is not a file of tensors only" in refusal(ours)


class Malicious:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (Path.touch, ("/tmp/should_not_exist",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "open_clip_pytorch_model.bin"])
def test_weights_that_would_run_code_are_refused(name: str, tmp_path: Path) -> None:
    (save_clip if name == "pytorch_model.bin" else save_open_clip)(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    torch.save({"state_dict": Malicious()}, tmp_path / name)
    refusal(tmp_path)
    assert not Path("/tmp/should_not_exist").exists()


@pytest.mark.parametrize("family", ["clip", "open_clip"])
def test_no_temperature_is_told_as_none(family: str, tmp_path: Path) -> None:
    (save_clip if family == "clip" else save_open_clip)(tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    edit_weights(path, lambda tensors: tensors.pop("logit_scale"))
    assert open_checkpoint(locate(str(tmp_path))).load().logits == (None, None)
