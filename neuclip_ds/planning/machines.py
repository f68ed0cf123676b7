"""Machines and networks by name, from machines.yaml, or from a file.

A rate that nobody has measured is a range: from what published training codes reached to what a good one may reach. A
machine therefore has two ends, and all that is predicted of it is a range too. A file is one that `neuclip-ds plan fit`
has fitted to profiled steps, or one in which `neuclip-ds doctor` has written what it measured, in the place of a data
sheet:

    {"machine": a row as in machines.yaml, "network": likewise, if measured, "reached": over both ends}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from neuclip_ds.documents import read_json
from neuclip_ds.errors import UserError
from neuclip_ds.planning.cost_model import Compute, Network, from_json

T = TypeVar("T")
_GB, _TERA, _MICRO = 1e9, 1e12, 1e-6
_ROW = {"tower_tflops", "objective_tflops", "memory_gb_per_s", "memory_gb", "link_gb_per_s"}


class Rates(NamedTuple):
    """The hardware of a rank, and the network between ranks."""

    compute: Compute
    network: Network


class Machine(NamedTuple):
    """What is assumed of a machine, from its slow end to its fast one; a fitted one has the same rates at both."""

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
    """Return a machine of machines.yaml with one of its networks, or that of a JSON file.

    Raises:
        UserError: no machine or network has that name, or the file holds no machine.
    """
    known, path = _known(), Path(name)
    found = _read(path) if path.suffix == ".json" else {}
    if "compute" in found:
        rates = Rates(*from_json(found))
        return Machine(rates, rates, None, math.inf, measured=True)
    gpu = found.get("machine") or _row(known, "machines", name)
    between = found.get("network") or _row(known, "networks", network)
    assumed, measured = known["assumed"], found.get("reached", {})
    slow, fast = (_rates(gpu, between, {**assumed, **known["reached"][end], **measured}) for end in ("slow", "fast"))
    return Machine(slow, fast, gpu["memory_gb"], gpu["tower_tflops"] * _TERA, measured=bool(found))


def _rates(gpu: dict[str, Any], between: dict[str, Any], assumed: dict[str, Any]) -> Rates:
    """Return the rates of a GPU and a network of which so much is reached."""
    compute = Compute(
        overhead=assumed["overhead_ms"] * 1e-3,
        tower_rate=gpu["tower_tflops"] * _TERA * assumed["utilisation"],
        objective_rate=gpu["objective_tflops"] * _TERA * assumed["objective_utilisation"],
        element_rate=gpu["memory_gb_per_s"] * _GB / assumed["bytes_an_element"],
        update_rate=gpu["memory_gb_per_s"] * _GB / assumed["bytes_an_update"],
        hook_rate=1 / (assumed["hook_us"] * _MICRO),
        skew=assumed["skew"],
        overlaps_engine=assumed["nccl"],
        loading_rate=assumed["loading_pairs_per_s"],
    )
    network = Network(
        start=assumed["start_us"] * _MICRO,
        inner_latency=assumed["inner_latency_us"] * _MICRO,
        inner_bandwidth=min(gpu["link_gb_per_s"] * assumed["inner_efficiency"], assumed["inner_gb_per_s"]) * _GB,
        latency=between["latency_us"] * _MICRO,
        bandwidth=min(between["gb_per_s"] * assumed["efficiency"], assumed["node_gb_per_s"]) * _GB,
        trees=assumed["nccl"],
    )
    return Rates(compute, network)


def data_sheet(device: str) -> dict[str, float] | None:
    """Return the row of machines.yaml whose name has its parts in a device's name; None where there is none."""
    known = _known()["machines"]
    names = [name for name in known if all(part in device.lower() for part in name.split("_"))]
    return known[max(names, key=len)] if names else None


def _row(known: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    if name not in known[kind]:
        raise UserError(f"{name} is none of the {kind} in machines.yaml: choose one of {', '.join(known[kind])}.")
    row: dict[str, Any] = known[kind][name]
    return row


def _read(path: Path) -> dict[str, Any]:
    """Return what a machine file holds.

    Raises:
        UserError: there is none, or it lacks a part.
    """
    if not path.is_file():
        raise UserError(f"There is no machine file {path}; `neuclip-ds plan fit` and `neuclip-ds doctor` write one.")
    found = read_json(path)
    parts = found if isinstance(found, dict) else {}
    row = parts.get("machine")
    missing = _ROW - row.keys() if isinstance(row, dict) else _ROW
    if {"compute", "network"} <= parts.keys() or not missing:
        return parts
    raise UserError(
        f"{path} is no machine: {', '.join(sorted(missing))} missing. Let `neuclip-ds doctor` write it on two ranks or "
        "more, or `neuclip-ds plan fit` from profiles; or add what machines.yaml has of such a machine."
    )


def network_names() -> list[str]:
    return list(_known()["networks"])


def _known() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8"))
    return found
