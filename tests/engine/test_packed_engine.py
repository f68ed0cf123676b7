"""ZeRO 3 trains an open_clip text tower on packed captions as on padded ones, on two real ranks.

This tower reads some parameters without calling a module: position embeddings, attention's weights, the projection.
"""

from __future__ import annotations

import torch
from ranks import run_ranks
from small_checkpoints import gathered_weights
from test_packing import captions_of, open_clip_tower
from test_step import ROWS, TOKENS, config_of, data, new_loss, position_of, rank_part
from torch import Tensor

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.start import start_engine
from neuclip_ds.models.build import apply_common_options, build_dual_encoder
from neuclip_ds.models.packing import PackedCaptions
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.training.step import train_step


def trained(communicator: Communicator, packed: bool, checkpointing: bool) -> dict[str, Tensor]:
    """Train for two steps of two micro-batches, and return the weights."""
    config = config_of("openclip", "zero3_fp32", optimizer={"name": "sgd", "lr": 0.1})
    options = {
        "activation_checkpointing": checkpointing,
        "text": config.model.text.model_copy(update={"packed": packed}),
    }
    torch.manual_seed(0)
    vision = build_dual_encoder(config.model, TOKENS).vision  # type: ignore[arg-type]
    text = open_clip_tower(output_dim=16)
    model = apply_common_options(DualEncoder(vision, text), config.model.model_copy(update=options))
    kinds: set[type] = set()
    model.text.register_forward_pre_hook(lambda _, inputs: kinds.add(type(inputs[0])))
    engine = start_engine(model, config.optimizer, load_engine_config(config, 2), communicator)
    loss = new_loss(config, communicator)
    batches = DeviceBatches(engine.device, ROWS // communicator.world_size // 2, engine.pack)
    for number in range(2):
        batch = data(number)
        tokens = captions_of([3 + (5 * row + number) % 18 for row in range(ROWS)])
        with_longer_captions = Batch(batch.image, tokens, batch.index, batch.valid)
        batches.start(iter([RankBatch([rank_part(with_longer_captions, communicator)])]))
        outcome = train_step(engine, loss, batches, next(batches), position_of(number))
        assert outcome.applied
    assert kinds == {PackedCaptions if packed else Tensor}
    return gathered_weights(model)


def compare(communicator: Communicator) -> None:
    expected = trained(communicator, packed=False, checkpointing=False)
    for checkpointing in (False, True):
        weights = trained(communicator, packed=True, checkpointing=checkpointing)
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6, msg=f"{name} differs")


def test_zero_3_trains_an_open_clip_tower_on_packed_captions() -> None:
    run_ranks(2, compare)
