"""open_clip's training loop with the page's loss gives the project trainer's weights and gradients."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from replay import DIM, EPOCHS, Call, Trained, assert_equal, code_blocks, replay, run_code
from tars import tokenize, write_pairs
from torch import Tensor, nn

from neuclip_ds.distributed.communicator import Communicator

pytest.importorskip("open_clip_train")
SIZES, ROWS, RATE = (6, 4, 7, 7), 3, 1e-2
EPS = 1e-3  # Adam's; far above rounding errors, which vary because open_clip shuffles each run differently
STEPS = EPOCHS * sum(SIZES) // (2 * ROWS)


def shards(folder: Path) -> Path:
    """Write shards in which each sample's caption contains the sample's index."""
    write_pairs(folder, SIZES)
    counts = {f"{number:05d}.tar": size for number, size in enumerate(SIZES)}
    (folder / "sizes.json").write_text(json.dumps(counts), encoding="utf-8")
    return folder


def small_clip() -> nn.Module:
    from open_clip import CLIP

    torch.manual_seed(0)
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
    text = {"context_length": 12, "vocab_size": 128, "width": 16, "heads": 2, "layers": 1}
    return CLIP(DIM, vision, text, output_dict=True).double()


def pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image.resize((16, 16)))).permute(2, 0, 1).double() / 255


def _on_ranks(
    communicator: Communicator, folder: Path, method: str
) -> tuple[Trained, dict[int, tuple[Tensor, Tensor]]]:
    """Train with open_clip's loop; also return the samples that the model received, by index."""
    from open_clip_train.data import get_data
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import train_one_epoch

    settings = {"train_data": f"{folder}/{{00000..00003}}.tar", "dataset_type": "webdataset", "batch_size": ROWS}
    settings |= {"train_num_samples": None, "train_data_upsampling_factors": None, "val_data": None, "workers": 0}
    settings |= {"imagenet_val": None, "imagenet_v2": None, "seed": 0, "world_size": 2, "rank": communicator.rank}
    settings |= {"epochs": EPOCHS, "lr": RATE, "precision": "fp32", "accum_freq": 1, "device": "cpu", "distill": False}
    settings |= {"skip_scheduler": False, "grad_clip_norm": None, "log_every_n_steps": 1, "wandb": False}
    args = SimpleNamespace(**settings)
    clip = small_clip()
    model = torch.nn.parallel.DistributedDataParallel(clip)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPS, weight_decay=0.0)
    data = get_data(args, (pixels, pixels), tokenizer=lambda text: tokenize([text]))
    scheduler = cosine_lr(optimizer, RATE, 1, STEPS)
    names = {"args": args, "data": data, "optimizer": optimizer, "device": "cpu", "os": os}
    loss = run_code(code_blocks("open_clip")[0], method, names)["loss"]
    calls: list[Call] = []
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
        calls.append(Call(index=loss.index.clone(), lr=optimizer.param_groups[0]["lr"]))
        seen.update(zip(loss.index.tolist(), zip(*inputs, strict=True), strict=True))

    clip.register_forward_pre_hook(record)
    for epoch in range(EPOCHS):
        train_one_epoch(model, data, loss, epoch, optimizer, None, scheduler, None, args)
    return Trained.of(clip, loss.temperature, calls), seen


@pytest.mark.parametrize("method", ["neuclip", pytest.param("fastclip_v3", marks=pytest.mark.slow)])
def test_open_clips_loop_equals_the_trainer(method: str, tmp_path: Path) -> None:
    results, samples = zip(*run_ranks(2, _on_ranks, shards(tmp_path), method), strict=True)
    assert len(results[0].calls) == STEPS
    seen = {**samples[0], **samples[1]}
    assert set(seen) <= set(range(sum(SIZES))), "of unequal shards, open_clip drops the last samples of an epoch"
    for index, (_, tokens) in seen.items():
        assert torch.equal(tokens, tokenize([f"caption {index}"])[0])
    clip = small_clip()
    optimizer = torch.optim.AdamW(clip.parameters(), RATE, eps=EPS, weight_decay=0.0)

    def encode(images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        features = clip(images, tokens)
        return features["image_features"], features["text_features"]

    unused = next(iter(seen.values()))
    data = [seen.get(index, unused) for index in range(sum(SIZES))]
    clip.logit_scale.requires_grad_(False)
    expected = replay([result.calls for result in results], data, method, clip, optimizer, encode)
    for result in results:
        assert not result.gradients.pop("logit_scale").any()
        assert result.weights.pop("logit_scale") == clip.logit_scale
        assert_equal(result, expected)
