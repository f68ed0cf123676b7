"""The trial of a micro-batch of full-length captions changes no state: training gives the same bits without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import gathered_weights
from test_step import ROWS, TOKENS, config_of, data, new_loss, position_of, rank_part

from neuclip_ds.config import VisionConfig
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.start import start_engine
from neuclip_ds.errors import UserError
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.packing import PackedCaptions
from neuclip_ds.training.step import train_step

STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine and a model to train."""

    engine: str
    micro_batches: int
    model: Mapping[str, Any] = field(default_factory=dict)  # options
    vision: VisionConfig | None = None  # instead of the ViT


LORA = {"lora": {"rank": 2, "dropout": 0.5}, "vision": {"trainable": 1}}
# in float32: torch's bf16 convolutions on a CPU differ from run to run
RESNET = VisionConfig(name="resnet10t", image_size=32, options={"layers": [1, 1, 1, 1]})
CASES = [
    Case(engine="zero0_fp32", micro_batches=1, vision=RESNET),
    Case(engine="zero0_bf16", micro_batches=2),
    Case(engine="zero1_fp32", micro_batches=2, model=LORA),
    Case(engine="zero1_bf16", micro_batches=2),
    Case(engine="zero2_bf16", micro_batches=1, model={"text": {"trainable": "frozen"}}),
    Case(engine="zero3_fp32", micro_batches=1, model=LORA),
    Case(engine="zero3_bf16", micro_batches=1),
]


def train(communicator: Communicator, case: Case, tries: bool) -> dict[str, Any]:
    """Train for some steps, and return all state that the trial could change."""
    config = config_of("fastclip_v3", case.engine, model=case.model)
    model_config = config.model
    if case.vision is not None:
        model_config = model_config.model_copy(update={"vision": case.vision})
    torch.manual_seed(0)
    model = build_dual_encoder(model_config, TOKENS)  # type: ignore[arg-type]
    engine_config = load_engine_config(config, communicator.world_size)
    engine = start_engine(model, config.optimizer, engine_config, communicator)
    lengths: list[int] = []
    model.text.register_forward_pre_hook(lambda _, inputs: lengths.append(longest(inputs[0])))
    loss = new_loss(config, communicator)
    rows = ROWS // communicator.world_size
    batches = DeviceBatches(engine.device, rows // case.micro_batches, engine.pack)
    batches.start(RankBatch([rank_part(data(number), communicator)]) for number in range(STEPS))
    for number in range(STEPS):
        batch = next(batches)
        if tries and number == 0:
            random_state = torch.get_rng_state()
            engine.try_full_captions(batch)
            assert torch.equal(torch.get_rng_state(), random_state)
            assert lengths == [TOKENS.context_length] * case.micro_batches
        train_step(engine, loss, batches, batch, position_of(number))
    state = {f"weight {key}": value for key, value in gathered_weights(model).items()}
    state |= {f"buffer {key}": value.clone() for key, value in model.named_buffers()}
    for placement in engine.placements():
        for kind, value in engine.optimizer_state.get(placement.master, {}).items():
            state[f"{kind} {placement.name}"] = value.clone()
    return state | {"counters": engine.counters, "temperature": loss.temperature}


def longest(captions: PackedCaptions) -> int:
    return captions.lengths[-1][0]


def differences(communicator: Communicator, cases: Sequence[Case]) -> dict[str, list[str]]:
    """Return what differs after training with and without the trial, by case."""
    found = {}
    for case in cases:
        expected = train(communicator, case, tries=False)
        state = train(communicator, case, tries=True)
        assert state.keys() == expected.keys()
        different = []
        for key, value in expected.items():
            equal = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
            if not equal:
                different.append(key)
        found[case.engine] = different
    return found


QUICK = ("zero0_fp32", "zero3_fp32")


@pytest.mark.parametrize(
    "cases",
    [
        [case for case in CASES if case.engine in QUICK],
        pytest.param([case for case in CASES if case.engine not in QUICK], marks=pytest.mark.slow),
    ],
)
def test_the_trial_changes_no_state_under_any_zero_stage(cases: list[Case]) -> None:
    for found in run_ranks(2, differences, cases):
        assert found == {case.engine: [] for case in cases}


def out_of_memory(communicator: Communicator) -> str:
    config = config_of("openclip")
    model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
    engine = start_engine(model, config.optimizer, load_engine_config(config, 1), communicator)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    model.vision.register_forward_pre_hook(fail)
    batches = DeviceBatches(engine.device, ROWS, engine.pack)
    batches.start(iter([RankBatch([data(0)])]))
    with pytest.raises(UserError) as error:
        engine.try_full_captions(next(batches))
    return str(error.value)


def test_exhausted_memory_is_reported_with_the_options_that_help() -> None:
    (message,) = run_ranks(1, out_of_memory)
    assert "16 pairs with captions of 8 tokens" in message
    assert "data.micro_batch" in message
