"""Test the rules for DeepSpeed: a config's optimizer class, its master tensors, and where weights are stored."""

import dataclasses
import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from small_checkpoints import Layers, small_engine
from step_costs import optimizer_steps
from torch import nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import EngineConfig, EngineOptions, read_engine_file
from neuclip_ds.engine.zero import Wrapper
from neuclip_ds.engine.zero_rules import ZeroRules


def changed(name: str, accumulates: str | None = None, **zero: Any) -> dict[str, Any]:
    engine = read_engine_file(name)[1]
    engine["zero_optimization"].update(zero)
    if accumulates:
        engine["data_types"]["grad_accum_dtype"] = accumulates
    return {**engine, "zero_force_ds_cpu_optimizer": False}


def rules_of(engine: dict[str, Any]) -> ZeroRules:
    return ZeroRules.of(EngineConfig(EngineOptions.model_validate(engine), engine))


CPU, NONE = {"device": "cpu"}, {"device": "none"}
CASES: dict[str, tuple[dict[str, Any], Wrapper]] = {
    "no ZeRO, float32": (changed("zero0_fp32"), Wrapper.NONE),
    "no ZeRO, bf16": (changed("zero0_bf16"), Wrapper.UNFUSED),
    "1, float32": (changed("zero1_fp32"), Wrapper.ZERO_1_2),
    "1, bf16": (changed("zero1_bf16"), Wrapper.BF16),
    "1, bf16, float32 by another name": (changed("zero1_bf16", accumulates="float32"), Wrapper.BF16),
    "1, bf16, float32 as a torch dtype": (changed("zero1_bf16", accumulates="torch.float32"), Wrapper.BF16),
    "1, bf16, gradients too": (changed("zero1_bf16", accumulates="bf16"), Wrapper.ZERO_1_2),
    "1, bf16, offload": (changed("zero1_bf16", offload_optimizer=CPU), Wrapper.ZERO_1_2),
    "1, bf16, offload to none": (changed("zero1_bf16", offload_optimizer=NONE), Wrapper.BF16),
    "2": (changed("zero2_bf16"), Wrapper.ZERO_1_2),
    "2, offload": (changed("zero2_bf16_offload"), Wrapper.ZERO_1_2),
    "3": (changed("zero3_fp32", sub_group_size=40), Wrapper.ZERO_3),
    "3, offload": (changed("zero3_bf16_offload", sub_group_size=40), Wrapper.ZERO_3),
}


def test_the_rules_read_offload_and_dtypes_from_a_config() -> None:
    assert rules_of(changed("zero2_bf16_offload")).offloads
    assert not rules_of(changed("zero1_bf16", offload_optimizer=NONE)).offloads
    rules = rules_of(changed("zero1_bf16", accumulates="bf16"))
    assert (rules.weight, rules.accumulated, rules.sent) == (2, 2, 4)
    plain = rules_of({"bf16": {"enabled": True}})
    assert (plain.weight, plain.accumulated, plain.sent) == (2, 2, 2)


def net() -> Layers:
    """Return a module whose parameters two ranks cannot all split evenly."""
    return Layers(nn.Embedding(5, 3), nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 7))


def start_all(communicator: Communicator, folder: Path) -> dict[str, dict[str, Any]]:
    """Start an engine for each case; return its wrapper, its parameter shapes and this rank's placements."""
    found = {}
    for number, (name, (engine_file, _)) in enumerate(CASES.items()):
        path = folder / f"{number}-{communicator.rank}.json"
        path.write_text(json.dumps(engine_file))
        module = net()
        exact = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        sizes = [[p.numel() for p in module.parameters() if (p.ndim >= 2) == matrix] for matrix in (True, False)]
        engine = small_engine(module, OptimizerConfig(), str(path), 8, communicator)
        placements = list(engine.placements())
        for placement in placements:
            part = exact[placement.name].flatten()[placement.start : placement.stop]
            assert torch.equal(placement.within(placement.master), part), f"{name}: {placement.name} was rounded"
        steps = optimizer_steps(rules_of(engine_file), sizes, communicator.world_size)
        found[name] = {
            "wrapper": engine.wrapper,
            "placements": [dataclasses.replace(placement, master=torch.empty(0)) for placement in placements],
            "masters": len({id(placement.master) for placement in placements}),
            "parts": sum(map(len, steps)),
            "shapes": engine.parameter_shapes(),
        }
    return found


def test_the_rules_predict_deepspeeds_optimizer_and_every_element_is_stored(tmp_path: Path) -> None:
    """The optimizer class is as predicted; each element is stored unrounded, on one rank or on every rank."""
    ranks = run_ranks(2, start_all, tmp_path)
    numel = {name: p.numel() for name, p in net().named_parameters()}
    shapes = {name: list(p.shape) for name, p in net().named_parameters()}
    for case, (engine, wrapper) in CASES.items():
        assert rules_of(engine).wrapper is wrapper
        of_ranks = [found[case] for found in ranks]
        for one in of_ranks:
            assert one["wrapper"] is wrapper, case
            assert one["shapes"] == shapes
            names = [placement.name for placement in one["placements"]]
            assert names == [placement.name for placement in of_ranks[0]["placements"]]
            assert wrapper in (Wrapper.NONE, Wrapper.UNFUSED) or one["masters"] == one["parts"], case
        replicated = wrapper in (Wrapper.NONE, Wrapper.UNFUSED)
        for name, size in numel.items():
            placements = [placement for one in of_ranks for placement in one["placements"] if placement.name == name]
            assert all(placement.replicated == replicated for placement in placements)
            elements = sorted(chain.from_iterable(range(place.start, place.stop) for place in placements))
            assert elements == sorted([*range(size)] * (2 if replicated else 1)), (case, name)
