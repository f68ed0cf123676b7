"""Machines and networks by name, from machines.yaml, or as `neuclip-ds plan fit` has measured them.

A rate that nobody has measured is a range: from what published training codes reached to what a good one may reach. A
machine therefore has two ends, and all that is predicted of it is a range too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from neuclip_ds.errors import UserError
from neuclip_ds.planning.cost_model import Compute, Network, from_json

T = TypeVar("T")
_GB, _TERA, _MICRO = 1e9, 1e12, 1e-6


class Rates(NamedTuple):
    """The hardware of a rank, and the network between ranks."""

    compute: Compute
    network: Network


class Machine(NamedTuple):
    """What is assumed of a machine, from its slow end to its fast one; a measured one has the same rates at both."""

    slow: Rates
    fast: Rates
    memory_gb: float | None  # of a rank's GPU
    tower_peak: float  # operations a second of the towers by the data sheet; infinite where that is not known
    measured: bool

    def cases(self, quantity: Callable[[Rates], T]) -> list[T]:
        """Return what something is with slow and with fast computation, each on a slow and on a fast network."""
        ends = (self.slow, self.fast)
        return [quantity(Rates(one.compute, other.network)) for one in ends for other in ends]


def find_machine(name: str, network: str) -> Machine:
    """Return a machine of machines.yaml with one of its networks, or one that was fitted, from its JSON file.

    Raises:
        UserError: no machine or network has that name.
    """
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise UserError(f"There is no machine file {path}; `neuclip-ds plan fit` writes one.")
        rates = Rates(*from_json(json.loads(path.read_text(encoding="utf-8"))))
        return Machine(rates, rates, None, math.inf, measured=True)
    known = _known()
    for kind, asked in (("machines", name), ("networks", network)):
        if asked not in known[kind]:
            raise UserError(f"{asked} is none of the {kind} in machines.yaml: choose one of {', '.join(known[kind])}.")
    gpu, between = known["machines"][name], known["networks"][network]
    slow, fast = (_rates(gpu, between, {**known["assumed"], **known["reached"][end]}) for end in ("slow", "fast"))
    return Machine(slow, fast, gpu["memory_gb"], gpu["tower_tflops"] * _TERA, measured=False)


def _rates(gpu: dict[str, float], between: dict[str, float], assumed: dict[str, float]) -> Rates:
    """Return the rates of a GPU and a network of which so much is reached."""
    compute = Compute(
        overhead=assumed["overhead_ms"] * 1e-3,
        tower_rate=gpu["tower_tflops"] * _TERA * assumed["utilisation"],
        objective_rate=gpu["objective_tflops"] * _TERA * assumed["objective_utilisation"],
        element_rate=gpu["memory_gb_per_s"] * _GB / assumed["bytes_an_element"],
        update_rate=gpu["memory_gb_per_s"] * _GB / assumed["bytes_an_update"],
        hook_rate=1 / (assumed["hook_us"] * _MICRO),
        skew=assumed["skew"],
        overlaps_engine=True,
        loading_rate=assumed["loading_pairs_per_s"],
    )
    network = Network(
        start=assumed["start_us"] * _MICRO,
        inner_latency=assumed["inner_latency_us"] * _MICRO,
        inner_bandwidth=min(gpu["link_gb_per_s"] * assumed["inner_efficiency"], assumed["inner_gb_per_s"]) * _GB,
        latency=between["latency_us"] * _MICRO,
        bandwidth=min(between["gb_per_s"] * assumed["efficiency"], assumed["node_gb_per_s"]) * _GB,
        trees=True,
    )
    return Rates(compute, network)


def network_names() -> list[str]:
    return list(_known()["networks"])


def _known() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8"))
    return found
