"""Machines and networks by name, from machines.yaml, or as `neuclip-ds plan fit` has measured them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from neuclip_ds.errors import UserError
from neuclip_ds.planning.cost_model import Compute, Network, from_json

_GB, _TERA, _MICRO = 1e9, 1e12, 1e-6


class Machine(NamedTuple):
    """The hardware of a rank and the network between ranks."""

    compute: Compute
    network: Network
    memory_gb: float | None  # of a rank's GPU
    measured: bool


def find_machine(name: str, network: str) -> Machine:
    """Return a machine of machines.yaml with one of its networks, or one that was fitted, from its JSON file.

    Raises:
        UserError: no machine or network has that name.
    """
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise UserError(f"There is no machine file {path}; `neuclip-ds plan fit` writes one.")
        compute, links = from_json(json.loads(path.read_text(encoding="utf-8")))
        return Machine(compute, links, None, measured=True)
    known = _known()
    for kind, asked in (("machines", name), ("networks", network)):
        if asked not in known[kind]:
            raise UserError(f"{asked} is none of the {kind} in machines.yaml: choose one of {', '.join(known[kind])}.")
    gpu, between, assumed = known["machines"][name], known["networks"][network], known["assumed"]
    compute = Compute(
        overhead=assumed["overhead_ms"] * 1e-3,
        tower_rate=gpu["tower_tflops"] * _TERA * assumed["utilisation"],
        objective_rate=gpu["objective_tflops"] * _TERA * assumed["objective_utilisation"],
        element_rate=gpu["memory_gb_per_s"] * _GB / assumed["bytes_an_element"],
        update_rate=gpu["memory_gb_per_s"] * _GB / assumed["bytes_an_update"],
        hook_rate=1 / (assumed["hook_us"] * _MICRO),
        skew=assumed["skew"],
        overlaps_engine=True,
    )
    links = Network(
        start=assumed["start_us"] * _MICRO,
        inner_latency=assumed["inner_latency_us"] * _MICRO,
        inner_bandwidth=gpu["link_gb_per_s"] * _GB * assumed["efficiency"],
        latency=between["latency_us"] * _MICRO,
        bandwidth=between["gb_per_s"] * _GB * assumed["efficiency"],
        trees=True,
    )
    return Machine(compute, links, gpu["memory_gb"], measured=False)


def network_names() -> list[str]:
    return list(_known()["networks"])


def _known() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8"))
    return found
