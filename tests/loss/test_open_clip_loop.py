"""open_clip's own training loop with the loss of the page gives the weights and gradients of the project's trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from reference import OPTIONS, GlobalBatch, Trained, assert_equal, python_blocks, train, trained, with_method
from tars import tokenize, write_pairs
from torch import Tensor, nn

from neuclip_ds.distributed.communicator import Communicator

pytest.importorskip("open_clip_train")
SIZES, ROWS, EPOCHS, LR, DIM = (6, 4, 7, 7), 3, 2, 1e-2, 6
STEPS = EPOCHS * sum(SIZES) // (2 * ROWS)


def shards(folder: Path) -> Path:
    """Write shards whose samples say their index in their caption."""
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


def _on_ranks(communicator: Communicator, folder: Path, method: str) -> tuple[Trained, list[GlobalBatch]]:
    from open_clip_train.data import get_data
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import train_one_epoch

    settings = {"train_data": f"{folder}/{{00000..00003}}.tar", "dataset_type": "webdataset", "batch_size": ROWS}
    settings |= {"train_num_samples": None, "train_data_upsampling_factors": None, "val_data": None, "workers": 0}
    settings |= {"imagenet_val": None, "imagenet_v2": None, "seed": 0, "world_size": 2, "rank": communicator.rank}
    settings |= {"epochs": EPOCHS, "lr": LR, "precision": "fp32", "accum_freq": 1, "device": "cpu", "distill": False}
    settings |= {"skip_scheduler": False, "grad_clip_norm": None, "log_every_n_steps": 1, "wandb": False}
    args, clip = SimpleNamespace(**settings), small_clip()
    model = torch.nn.parallel.DistributedDataParallel(clip)
    optimizer = torch.optim.AdamW(model.parameters(), LR, eps=1e-6, weight_decay=0.0)
    data = get_data(args, (pixels, pixels), tokenizer=lambda text: tokenize([text]))
    scheduler = cosine_lr(optimizer, LR, 1, STEPS)
    names = {"args": args, "data": data, "optimizer": optimizer, "device": "cpu", "os": os}
    names |= {"options": OPTIONS[method], "dim": DIM}
    (code,) = python_blocks("loss_in_open_clip.md")
    exec(compile(with_method(code, method), "page", "exec"), names)
    loss, seen = names["loss"], []

    def record(module: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
        seen.append(GlobalBatch(epoch, optimizer.param_groups[0]["lr"], *inputs, loss.index))

    clip.register_forward_pre_hook(record)
    for epoch in range(EPOCHS):
        train_one_epoch(model, data, loss, epoch, optimizer, None, scheduler, None, args)
    return trained(clip, loss.temperature), seen


class _Encoders(nn.Module):
    """open_clip's model as the trainer calls its own."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, image: Tensor, text: Tensor, text_ready: Any) -> tuple[Tensor, Tensor]:
        features = self.clip(image, text)
        text_ready(features["text_features"])
        return features["image_features"], features["text_features"]


@pytest.mark.parametrize("method", OPTIONS)
def test_the_loop_equals_the_trainer(method: str, tmp_path: Path) -> None:
    (first, seen), (second, others) = run_ranks(2, _on_ranks, shards(tmp_path), method)
    assert len(seen) == STEPS
    batches = [
        GlobalBatch(mine.epoch, mine.lr, *(torch.cat(pair) for pair in zip(mine[2:], other[2:], strict=True)))
        for mine, other in zip(seen, others, strict=True)
    ]
    for batch in batches:
        assert torch.equal(batch.texts, tokenize([f"caption {index}" for index in batch.index.tolist()]))
    clip = small_clip()
    optimizer = torch.optim.AdamW(clip.parameters(), LR, eps=1e-6, weight_decay=0.0)
    wanted = train(_Encoders(clip), optimizer, batches, method, DIM, sum(SIZES), STEPS)
    wanted = trained(clip, wanted.temperature)
    for found in (first, second):
        assert not found.gradients.pop("logit_scale").any()
        assert found.weights.pop("logit_scale") == clip.logit_scale
        assert_equal(found, wanted)
