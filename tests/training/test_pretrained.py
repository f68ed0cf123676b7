"""Pretrained models train under DeepSpeed as in plain PyTorch, and a dry run reports their sizes."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from miniatures import CAPTIONS, images, save_clip, save_open_clip, save_siglip
from ranks import run_ranks
from test_checkpoints import saved_timm
from test_encoders import save_text_encoder
from test_step import Trainee

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.start import build_optimizer, start_engine
from neuclip_ds.errors import UserError
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.source import ModelSource, locate_model, locate_on_rank_zero, model_source
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.dry_run import print_dry_run

ROWS, STEPS, LR = 8, 3, 1e-3
TOWERS = "towers"  # pretrained image weights and a new text tower
TEXT_ENCODER = "text_encoder"  # pretrained image weights and a pretrained text encoder
TEXT = {"vocab_size": 300, "context_length": 16, "width": 24, "layers": 2, "heads": 2}


def save_towers(folder: Path) -> None:
    saved_timm(folder / "image.safetensors")


def save_with_text_encoder(folder: Path) -> None:
    save_towers(folder)
    save_text_encoder("modernbert", folder / "text")


FAMILIES = {
    "clip": save_clip,
    "siglip": save_siglip,
    "open_clip": save_open_clip,
    TOWERS: save_towers,
    TEXT_ENCODER: save_with_text_encoder,
}
ENGINES = ["zero0_fp32", "zero3_fp32"]


def bpe() -> CaptionTokenizer:
    return train_bpe(CAPTIONS, TEXT["vocab_size"], TEXT["context_length"])


def config_of(folder: Path, engine: str = "zero0_fp32") -> Config:
    model: dict[str, object] = {"pretrained": str(folder)}
    if folder.name in (TOWERS, TEXT_ENCODER):
        vision = {"name": "test_vit", "image_size": 32, "pretrained": f"{folder}/image.safetensors"}
        text = TEXT
        if folder.name == TEXT_ENCODER:
            text = {"pretrained": f"{folder}/text", "pooling": "mean", "context_length": 16, "projection": "mlp"}
        model = {"vision": vision, "text": text, "embed_dim": 16}
    return Config.model_validate(
        {
            "data": {"batch_size": ROWS},
            "model": {**model, "activation_checkpointing": True},
            "objective": {"method": "tuneclip"},
            # eps is far above rounding errors, which Adam would magnify to full steps where gradients are nearly 0
            "optimizer": {"lr": LR, "weight_decay": 0.02, "eps": 1e-4},
            "deepspeed": engine,
        }
    )


def batch_of(source: ModelSource, number: int) -> Batch:
    captions = [f"{CAPTIONS[row % 2]} {row} {number}" for row in range(ROWS)]
    valid = torch.ones(ROWS, dtype=torch.bool)
    return Batch(images(32, ROWS) ^ number, (source.own_tokenizer() or bpe())(captions), torch.arange(ROWS), valid)


def new_loss(config: Config, source: ModelSource, tau: float | None, communicator: Communicator) -> ContrastiveLoss:
    """Return the loss that the trainer would build for a checkpoint of encoders with the temperature `tau`."""
    return ContrastiveLoss(
        config.objective,
        dim=source.embed_dim,
        samples=100,
        epochs=config.epochs,
        steps_per_epoch=STEPS,
        lr=LR,
        betas=config.optimizer.betas,
        adam_eps=config.optimizer.eps,
        communicator=communicator,
        undo=True,
        validate=False,
        spare_row=False,
        encoder_temperature=tau,
    )


def position_of(number: int) -> Position:
    return Position(step=number, lr=LR, peak_lr=LR)


def plain(folder: Path) -> dict[str, torch.Tensor]:
    config = config_of(folder)
    source = model_source(config.model, locate_model(config.model))
    torch.manual_seed(0)  # for the new projections
    model, logits = source.load(source.own_tokenizer() or bpe())
    optimizer = build_optimizer(model, config.optimizer)
    loss = new_loss(config, source, logits.temperature, Communicator())
    for number in range(STEPS):
        batch = batch_of(source, number)
        image, text = model(batch.image, batch.tokens)
        value = loss(image, text, batch.index, batch.valid, position=position_of(number))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def under_deepspeed(
    communicator: Communicator, folder: Path, families: Sequence[str], engines: Sequence[str]
) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    import deepspeed

    results = {}
    for family, name in product(families, engines):
        config = config_of(folder / family, name)
        source = model_source(config.model, locate_on_rank_zero(config.model, communicator))
        torch.manual_seed(0)
        model, logits = source.load(source.own_tokenizer() or bpe())
        engine = start_engine(model, config.optimizer, load_engine_config(config, 2), communicator)
        loss = new_loss(config, source, logits.temperature, communicator)
        trainee = Trainee(engine, loss, micro_batch=2)
        for number in range(STEPS):
            batch = batch_of(source, number)
            local_rows = slice(communicator.rank * ROWS // 2, (communicator.rank + 1) * ROWS // 2)
            local_batch = Batch(
                batch.image[local_rows],
                batch.tokens[local_rows],
                batch.index[local_rows],
                batch.valid[local_rows],
            )
            trainee.step(local_batch, position_of(number))
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            results[family, name] = {key: value.detach().clone() for key, value in model.named_parameters()}
    return results


@pytest.mark.parametrize(
    ("families", "engines"),
    [
        pytest.param(list(FAMILIES), ENGINES, marks=pytest.mark.slow, id="all_families"),
        pytest.param([TEXT_ENCODER], [f"zero{stage}_fp32" for stage in range(4)], id=TEXT_ENCODER),
    ],
)
def test_zero_stages_with_micro_batches_equal_plain_pytorch(
    families: Sequence[str], engines: Sequence[str], tmp_path: Path
) -> None:
    """Two ranks use TuneCLIP at the checkpoint's temperature, activation checkpointing and micro-batches of 2 rows."""
    for family in families:
        FAMILIES[family](tmp_path / family)
    wanted = {family: plain(tmp_path / family) for family in families}
    for rank in run_ranks(2, under_deepspeed, tmp_path, families, engines):
        for (family, name), weights in rank.items():
            for key, value in weights.items():
                if key.endswith(("k_proj.bias", "in_proj_bias", "key.bias", "qkv.bias")):
                    continue  # the keys' bias cannot affect attention: Adam magnifies its rounding error
                torch.testing.assert_close(
                    value,
                    wanted[family][key],
                    rtol=0,
                    atol=2e-5,
                    msg=lambda text, at=(family, name, key): f"{at} {text}",
                )


@pytest.mark.parametrize("family", ["siglip", "open_clip", TOWERS, TEXT_ENCODER])
def test_a_dry_run_reports_the_size_of_pretrained_models(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FAMILIES[family](tmp_path / family)
    config = config_of(tmp_path / family)
    with pytest.raises(UserError, match="Set the training data"):
        print_dry_run(config, RankEnvironment(0, 0, 2), None)
    printed = capsys.readouterr().out
    source = model_source(config.model, locate_model(config.model))
    total = Parameters.of(source.build(source.own_tokenizer() or bpe())).total
    assert f"= {total:,} parameters" in printed
    assert f"{4 * (2 * source.embed_dim * 4 + 8) / 1e6:,.2f} MB of features received" in printed
