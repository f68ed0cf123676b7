"""Predictions of the cost of a run on many nodes."""

from __future__ import annotations

from neuclip_ds.distributed.ring import ring_bytes
from neuclip_ds.planning.activations import Activations
from neuclip_ds.planning.engine_memory import Parameters
from neuclip_ds.planning.machines import find_machine
from neuclip_ds.planning.memory import Towers
from neuclip_ds.planning.scaling import ClusterAssumptions, count_model, predict, step_work
from neuclip_ds.recipe import parse


def test_bytes_received_are_those_of_every_collective() -> None:
    """Also of equal ones, such as ZeRO 3's for weights of one shape."""
    config = parse(["demo", "--deepspeed=zero3_bf16", "--data.batch_size=32"]).config
    model, around = count_model(config), ClusterAssumptions(1000, 1e4, 1e9, 1e4)
    towers = Towers(Parameters((10,), 10), Activations(1, 1))
    work = step_work(config, model, 8)
    found = predict(config, model, work, towers, find_machine("h100", "infiniband"), 2, 4, around)
    calls = work.calls
    assert len(set(calls)) < len(calls)
    assert found.received == round(sum(call.times * ring_bytes(call.op, call.size, 8) for call in calls))
