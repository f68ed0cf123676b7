"""The page's `transformers.Trainer` gives the project trainer's weights on one and two processes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from replay import DIM, LR, RENDEZVOUS, SAMPLES, Call, Trained, assert_equal, code_blocks, recorded, replay, run_code
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
EPS = 1e-3  # Adam's; far above the rounding errors that are the gradient of the biases of attention keys


def build(kind: str) -> Any:
    """Build a small random model in float64."""
    torch.manual_seed(0)
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 20, "max_position_embeddings": 4, "eos_token_id": 19, "bos_token_id": 0}
    vision = {**tower, "image_size": 4, "patch_size": 2}
    if kind == "CLIPModel":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=DIM)
        return transformers.CLIPModel(config).double()
    towers = (
        transformers.ViTConfig(**vision),
        transformers.BertConfig(**text, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    )
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(*towers, projection_dim=DIM)
    return transformers.VisionTextDualEncoderModel(config).double()


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, 4, 4, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, 19, (SAMPLES, 4), generator=generator)
    tokens[:, -1] = 19
    return list(zip(images, tokens, strict=True))


def _trained(communicator: Communicator, kind: str, method: str, folder: Path, changes: dict[str, str]) -> Trained:
    os.chdir(folder)
    os.environ.update(RENDEZVOUS)
    data = [{"pixel_values": image, "input_ids": tokens} for image, tokens in samples()]
    small = {"use_cpu": True, "learning_rate": LR, "warmup_steps": 4, "adam_epsilon": EPS}
    names = {"model": build(kind), "train_set": data, "val_set": data[:16], "small": small}
    changes = {'TrainingArguments("runs/clip"': "TrainingArguments('runs/clip', **small", **changes}
    with recorded() as calls:
        names = run_code(code_blocks("Hugging Face Trainer")[0], method, names, changes)
    model, loss_fn = names["model"], names["loss_fn"]
    assert model.logit_scale.exp().item() == pytest.approx(1 / loss_fn.temperature)
    training_calls = len(calls)
    assert 0 < names["trainer"].evaluate()["eval_loss"] < 20
    assert len(calls) == training_calls
    return Trained.of(model, loss_fn.temperature, calls)


def _train_and_resume(communicator: Communicator, cases: list[tuple[str, str]], folder: Path) -> list[list[Trained]]:
    """Return, for each case, the result of a full run and, for a CLIPModel, of a run resumed from its middle."""
    results: list[list[Trained]] = []
    for kind, method in cases:
        runs = folder / kind
        runs.mkdir(exist_ok=True)
        of_case = [_trained(communicator, kind, method, runs, {})]
        if kind == "CLIPModel":  # transformers 5.23 cannot load a ViT's checkpoint: it looks for other weight names
            last = f"runs/clip/checkpoint-{6 // communicator.world_size}"
            resume = f'loss_fn.load("{last}/loss")\ntrainer.train(resume_from_checkpoint="{last}")'
            of_case.append(_trained(communicator, kind, method, runs, {"trainer.train()": resume}))
        results.append(of_case)
    return results


def _replayed(calls: list[list[Call]], kind: str, method: str) -> Trained:
    model = build(kind)
    model.logit_scale.requires_grad_(False)
    # the optimizer that Trainer builds
    optimizer = torch.optim.AdamW(model.parameters(), LR, eps=EPS, weight_decay=0.0)

    def encode(image: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(pixel_values=image, input_ids=tokens)
        return outputs.image_embeds, outputs.text_embeds

    return replay(calls, samples(), method, model, optimizer, encode, clip=1.0)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [("CLIPModel", "fastclip_v3"), ("VisionTextDualEncoder", "neuclip")]),
        (2, [("CLIPModel", "neuclip")]),
    ],
)
def test_a_run_and_a_resumed_one_equal_the_trainer_of_the_project(
    ranks: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    results_by_rank = run_ranks(ranks, _train_and_resume, cases, tmp_path)
    for (kind, method), *results in zip(cases, *results_by_rank, strict=True):
        calls = [full.calls for full, *_ in results]
        assert len(calls[0]) == 12 // ranks
        expected = _replayed(calls, kind, method)
        for full, *resumed in results:
            assert_equal(full, expected, kind)
            for second_half in resumed:
                assert len(second_half.calls) == 6 // ranks
                assert_equal(second_half, expected, f"{kind}, resumed")
