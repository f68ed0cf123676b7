"""Machines and networks by name, from machines.yaml, or from a file.

A file is one that `neuclip-ds plan fit` has fitted to profiled steps, or one in which `neuclip-ds doctor` has written
what it measured, in the place of a data sheet:

    {"machine": a row as in machines.yaml, "network": likewise, if measured, "reached": over the assumed shares}
"""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from neuclip_ds.documents import read_json
from neuclip_ds.errors import UserError
from neuclip_ds.planning.cost_model import Compute, Network, from_json

_GB, _TERA, _MICRO = 1e9, 1e12, 1e-6
_ROW = {"tower_tflops", "objective_tflops", "memory_gb_per_s", "memory_gb", "link_gb_per_s"}


class Machine(NamedTuple):
    """The hardware of a rank and the network between ranks."""

    compute: Compute
    network: Network
    memory_gb: float | None  # of a rank's GPU
    measured: bool


def find_machine(name: str, network: str) -> Machine:
    """Return a machine of machines.yaml with one of its networks, or that of a JSON file.

    Raises:
        UserError: no machine or network has that name, or the file holds no machine.
    """
    known, path = _known(), Path(name)
    found = _read(path) if path.suffix == ".json" else {}
    if "compute" in found:
        return Machine(*from_json(found), None, measured=True)
    gpu = found.get("machine") or _row(known, "machines", name)
    between = found.get("network") or _row(known, "networks", network)
    assumed = {**known["assumed"], **found.get("reached", {})}
    compute = Compute(
        overhead=assumed["overhead_ms"] * 1e-3,
        tower_rate=gpu["tower_tflops"] * _TERA * assumed["utilisation"],
        objective_rate=gpu["objective_tflops"] * _TERA * assumed["objective_utilisation"],
        element_rate=gpu["memory_gb_per_s"] * _GB / assumed["bytes_an_element"],
        update_rate=gpu["memory_gb_per_s"] * _GB / assumed["bytes_an_update"],
        hook_rate=1 / (assumed["hook_us"] * _MICRO),
        skew=assumed["skew"],
        overlaps_engine=assumed["nccl"],
    )
    links = Network(
        start=assumed["start_us"] * _MICRO,
        inner_latency=assumed["inner_latency_us"] * _MICRO,
        inner_bandwidth=gpu["link_gb_per_s"] * _GB * assumed["inner_efficiency"],
        latency=between["latency_us"] * _MICRO,
        bandwidth=between["gb_per_s"] * _GB * assumed["efficiency"],
        trees=assumed["nccl"],
    )
    return Machine(compute, links, gpu["memory_gb"], measured=bool(found))


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
