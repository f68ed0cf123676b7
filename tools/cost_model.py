"""Estimate the time of a training step on any number of nodes from compute rates, network latency and bandwidth.

    fit FOLDER ...       compare the collectives of profiled steps (breakdown.json, which profile_communication.py
                         writes at several --world-sizes and --rows) with the predicted ones, fit compute and network,
                         print the measured and predicted times, and write the machine to --out
    scale RECIPE         print step time, exposed communication, traffic, memory and GPU hours for --nodes x --gpus
    published            compare the step times that FastCLIP, NeuCLIP and AmorLIP report with the model

    step = max(busy (1 + skew) + exposed communication, pairs / loading rate)
    busy = slowdown (overhead + sharing x sum over kinds of work / rate)
    collective = slowdown (start + messages x latency + bytes by the ring / bandwidth)    (an all-reduce: ring or tree)

The kinds of work are those of `step_costs.Work`. Slowdown is the number of ranks per core, at least 1; sharing is the
factor by which work on other cores slows down a rank; skew is the wait for the slowest rank as a fraction of the busy
time. If a collective can overlap computation, only its excess over this computation is exposed. A machine is a name in
tools/machines.yaml, whose rates are ranges (so predictions are ranges, too: low - high), or a fitted machine.json.

Examples:
  python tools/cost_model.py fit runs/cost --cores 2 --out machine.json
  python tools/cost_model.py scale dfn192m_neuclip --methods openclip neuclip --nodes 1 8 64 --gpus 8 --rows 640
  python tools/cost_model.py published
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import yaml
from benchmarking.method_config import config_for
from benchmarking.openclip_reference import REFERENCES
from benchmarking.synthetic_profile import CONFIG
from scipy.optimize import nnls
from step_costs import (
    Build,
    Call,
    Cluster,
    Compute,
    CountedModel,
    Network,
    StepTime,
    Work,
    count_model,
    step_time,
    step_work,
)

from neuclip_ds.cli.program import Parser, exit_on_mistake
from neuclip_ds.distributed.communicator import ring_bytes
from neuclip_ds.errors import UserError
from neuclip_ds.objectives import build_objective
from neuclip_ds.planning.memory import MemoryQuery, Towers, account, count_towers
from neuclip_ds.profiling.recorder import BREAKDOWN
from neuclip_ds.recipe import parse

T = TypeVar("T")
HERE = Path(__file__).parent
_RATES = ("tower_rate", "objective_rate", "element_rate", "update_rate", "hook_rate")
_GRID = [number / 20 for number in range(21)]  # values of sharing and skew


class Range(NamedTuple):
    """A quantity at both ends of a machine's assumed rates."""

    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Range:
        """Return the smallest and the largest value."""
        found = sorted(values)
        return Range(found[0], found[-1])

    def text(self, scale: float = 1.0) -> str:
        """Return both ends as text, or one number if both round to the same number."""
        low, high = (f"{scale * value:,.0f}" for value in self)
        return low if low == high else f"{low} - {high}"


class Rates(NamedTuple):
    """Rates of a rank's hardware and of the network between ranks."""

    compute: Compute
    network: Network


class Machine(NamedTuple):
    """Assumed rates of a machine at the slow and fast ends of their ranges, which are equal for a fitted machine."""

    slow: Rates
    fast: Rates

    def cases(self, quantity: Callable[[Rates], T]) -> list[T]:
        """Return a quantity with slow and with fast computation, each on a slow and on a fast network."""
        ends = (self.slow, self.fast)
        return [quantity(Rates(one.compute, other.network)) for one in ends for other in ends]


def find_machine(name: str, network: str) -> Machine:
    """Return a machine from machines.yaml with a network from the same file, or the machine in a JSON file of `fit`.

    Raises:
        UserError: no machine or network has this name, or the file does not describe a machine.
    """
    if name.endswith(".json"):
        try:
            rates = from_json(json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{name} does not describe a machine ({error!r}); use `cost_model.py fit`.") from error
        return Machine(rates, rates)
    known = _known()
    gpu, between = _row(known, "machines", name), _row(known, "networks", network)
    return Machine(*(_rates(gpu, between, {**known["assumed"], **known["reached"][end]}) for end in ("slow", "fast")))


def _known() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((HERE / "machines.yaml").read_text(encoding="utf-8"))
    return found


def _row(known: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    if name not in known[kind]:
        raise UserError(f"{name} is not among the {kind} in machines.yaml: choose one of {', '.join(known[kind])}.")
    row: dict[str, Any] = known[kind][name]
    return row


def _rates(gpu: dict[str, Any], between: dict[str, Any], assumed: dict[str, Any]) -> Rates:
    """Return the rates of a GPU and a network at the assumed efficiencies."""
    compute = Compute(
        overhead=assumed["overhead_ms"] / 1e3,
        tower_rate=gpu["tower_tflops"] * 1e12 * assumed["utilization"],
        objective_rate=gpu["objective_tflops"] * 1e12 * assumed["objective_utilization"],
        element_rate=gpu["memory_gb_per_s"] * 1e9 / assumed["bytes_an_element"],
        update_rate=gpu["memory_gb_per_s"] * 1e9 / assumed["bytes_an_update"],
        hook_rate=1e6 / assumed["hook_us"],
        skew=assumed["skew"],
        overlaps_engine=assumed["nccl"],
        loading_rate=assumed["loading_pairs_per_s"],
    )
    network = Network(
        start=assumed["start_us"] / 1e6,
        inner_latency=assumed["inner_latency_us"] / 1e6,
        inner_bandwidth=min(gpu["link_gb_per_s"] * assumed["inner_efficiency"], assumed["inner_gb_per_s"]) * 1e9,
        latency=between["latency_us"] / 1e6,
        bandwidth=min(between["gb_per_s"] * assumed["efficiency"], assumed["node_gb_per_s"]) * 1e9,
        trees=assumed["nccl"],
    )
    return Rates(compute, network)


def to_json(rates: Rates) -> dict[str, Any]:
    """Return a machine in a JSON-serializable form, without infinite rates."""
    return {
        name: {key: value for key, value in asdict(part).items() if value != math.inf}
        for name, part in rates._asdict().items()
    }


def from_json(machine: Mapping[str, Any]) -> Rates:
    """Invert `to_json`."""
    compute = Compute(**{**dict.fromkeys(_RATES, math.inf), **machine["compute"]})
    return Rates(compute, Network(**{"inner_bandwidth": math.inf, **machine["network"]}))


class Observation(NamedTuple):
    """A profiled configuration."""

    work: Work
    world_size: int  # on one node
    total: float  # seconds per step
    transfers: Sequence[tuple[Call, float]]  # with the seconds of one call, without waiting


def fit(observations: Sequence[Observation], cores: int) -> Rates:
    """Return the observed machine's compute and network rates, fitted by nonnegative least squares on relative errors.

    The network is fitted to the times of the collectives. The kinds of work are then fitted to the remaining time of
    the steps, for each point on a grid of sharing and skew.
    """
    network = _fit_network(observations, cores)
    # extremely slow towers hide all communication that can be hidden
    endless = Compute(0.0, 1.0, math.inf, math.inf, math.inf, math.inf, cores=cores)
    shapes = (replace(endless, sharing=sharing, skew=skew) for sharing, skew in product(_GRID, _GRID))
    best, _ = min((_fit_work(observations, shape, network) for shape in shapes), key=lambda found: found[1])
    return Rates(best, network)


def _fit_work(observations: Sequence[Observation], shape: Compute, network: Network) -> tuple[Compute, float]:
    """Return the overhead and rates for given values of sharing and skew, and the error of the fit."""
    rows, seconds = [], []
    for one in observations:
        exposed = step_time(one.work, shape, Cluster(1, one.world_size, network)).exposed
        waits = 1 + (shape.skew if one.world_size > 1 else 0.0)
        slowdown = waits * shape.slowdown(one.world_size)
        shared = slowdown * shape.shared(one.world_size)
        work = one.work
        kinds = (work.tower_flops, work.objective_flops, work.objective_elements, work.updated, work.hooks)
        # relative to the whole step, whose communication is already known
        rows.append([part / one.total for part in (slowdown, *(shared * kind for kind in kinds))])
        seconds.append(1 - exposed / one.total)
    found, error = _nonnegative_fit(rows, seconds)
    rates: dict[str, Any] = dict(zip(_RATES, map(_rate, found[1:]), strict=True))
    return replace(shape, overhead=found[0], **rates), error


def _fit_network(observations: Iterable[Observation], cores: int) -> Network:
    """Fit the network to the sum over a step's collectives, because single collectives vary by a factor of ten."""
    rows = []
    for one in observations:
        if one.world_size == 1:
            continue
        sums = np.zeros(3)
        for call, _ in one.transfers:
            messages = (2 if call.op == "all_reduce" else 1) * (one.world_size - 1)
            sums += call.times * np.array([1.0, messages, ring_bytes(call.op, call.size, one.world_size)])
        took = sum(call.times * transfer for call, transfer in one.transfers)
        rows.append((max(1.0, one.world_size / cores) * sums / took).tolist())
    start, latency, by_byte = _nonnegative_fit(rows, [1.0] * len(rows))[0] if rows else (0.0, 0.0, 0.0)
    return Network(start, latency, _rate(by_byte))


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf


def _nonnegative_fit(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[list[float], float]:
    """Return the nonnegative least-squares coefficients and the norm of the residual."""
    matrix = np.array(rows)
    unit = np.abs(matrix).max(axis=0).clip(min=np.finfo(float).tiny)  # columns differ by 1e12
    found, rest = nnls(matrix / unit, np.array(targets))
    return (found / unit).tolist(), float(rest)


def observe(path: Path, found: Mapping[str, Any]) -> Observation:
    """Return a profiled configuration from its breakdown.json, with its predicted work."""
    config = parse([str(path.with_name(CONFIG))]).config
    transfers = [
        (Call(one["purpose"], one["op"], one["size"], one["calls"]), one["transfer_seconds"] / one["calls"])
        for one in found["collectives"]
    ]
    work = step_work(config, count_model(config), found["world_size"], build_of(found["method"]))
    return Observation(work, found["world_size"], found["seconds"]["total"]["mean"], transfers)


def counted(calls: Iterable[Call]) -> dict[tuple[str, str, int], float]:
    """Return the number of calls per step by purpose, operation and size."""
    found: defaultdict[tuple[str, str, int], float] = defaultdict(float)
    for call in calls:
        found[call.purpose, call.op, call.size] += call.times
    return dict(found)


def build_of(method: str) -> Build:
    return REFERENCES.get(method, build_objective)


class Table(NamedTuple):
    """A Markdown table with a title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fit_profiles(folders: Sequence[Path], cores: int, out: Path) -> list[Table]:
    """Fit compute and network to the profiles below some folders; return a table of measured and predicted times.

    Raises:
        UserError: the folders contain no profile.
    """
    paths = sorted(path for folder in folders for path in folder.rglob(BREAKDOWN))
    if not paths:
        raise UserError("There is no breakdown.json in these folders; tools/profile_communication.py writes them.")
    profiles = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    observations = [observe(path, found) for path, found in profiles.items()]
    rates = fit(observations, cores)
    rows = []
    for found, one in zip(profiles.values(), observations, strict=True):
        time = step_time(one.work, rates.compute, Cluster(1, one.world_size, rates.network))
        alone = one.world_size == 1  # DeepSpeed then calls collectives that send nothing
        same = alone or counted(call for call, _ in one.transfers) == counted(one.work.calls)
        name = f"{found['method']}, ZeRO {found['zero_stage']}, {found['precision']}, batch {found['batch_size']}"
        transfer = sum(call.times * seconds for call, seconds in one.transfers)
        times = [f"{1e3 * x:.1f}" for x in (one.total, time.total, transfer, time.communication)]
        ratio = f"{time.total / one.total:.2f}"
        rows.append([name, str(one.world_size), *times[:2], ratio, *times[2:], "yes" if same else "NO"])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(to_json(rates), indent=1), encoding="utf-8")
    print(f"Written: {out}")
    header = ["profile", "ranks", "ms", "predicted", "ratio", "collectives, ms", "predicted", "same collectives"]
    return [Table("Predicted and measured steps", header, rows)]


def scale(asked: argparse.Namespace, overrides: Sequence[str]) -> list[Table]:
    """Predict the cost of a step for every method, number of nodes and network."""
    methods = asked.methods or [parse([asked.recipe, *overrides]).config.objective.method]
    machines = {network: find_machine(asked.machine, network) for network in asked.networks or _known()["networks"]}
    model: CountedModel | None = None
    towers: dict[int, Towers] = {}  # by micro-batch
    rows = []
    for method, nodes in product(methods, asked.nodes):
        ranks = nodes * asked.gpus
        batch = [f"--data.batch_size={asked.rows * ranks}"] if asked.rows else []
        config = config_for(None if method in REFERENCES else method, [asked.recipe, *batch, *overrides])
        model, micro = model or count_model(config), config.micro_batch(ranks)
        query = MemoryQuery(config, ranks, int(asked.samples))
        if micro not in towers:
            towers[micro] = count_towers(query)
        work = step_work(config, model, ranks, build_of(method))
        found = {name: _times(work, machine, nodes, asked.gpus) for name, machine in machines.items()}
        steps = [
            f"{Range.of(t.total for t in times).text(1e3)} ({Range.of(t.exposed for t in times).text(1e3)})"
            for times in found.values()
        ]
        speed = Range.of(config.rank_batch(ranks) / time.total for time in next(iter(found.values())))
        hours = Range.of(asked.seen / one / 3600 for one in speed)
        received = sum(call.times * ring_bytes(call.op, call.size, ranks) for call in work.calls)
        sizes = [f"{received / 1e6:,.0f}", f"{account(query, towers[micro]).peak / 1e9:,.1f}"]
        rows.append([method, str(nodes), f"{config.data.batch_size:,}", *steps, speed.text(), *sizes, hours.text()])
    first = next(iter(machines))
    header = ["method", "nodes", "batch", *(f"{network}: ms (exposed)" for network in machines)]
    header += [f"samples/s per GPU, {first}", "MB received", "GB of memory per rank", f"GPU hours, {first}"]
    return [Table("A step, predicted", header, rows)]


def _times(work: Work, machine: Machine, nodes: int, gpus: int) -> list[StepTime]:
    return machine.cases(lambda rates: step_time(work, rates.compute, Cluster(nodes, gpus, rates.network)))


class Comparison(NamedTuple):
    """A published step and the model's range for it, in seconds."""

    source: str  # paper and table
    setting: str
    method: str
    gpus: str  # GPUs per node; a star marks what the paper does not state
    rows: str  # pairs per GPU, with the same mark
    nodes: int
    published: Mapping[str, float]  # `total` and, if the paper reports it, `exposed`
    model: Mapping[str, Range]


def compare_published() -> Iterator[Comparison]:
    """Yield a comparison for every step in published_steps.yaml, by table, method and number of nodes.

    The published programs are modeled as they ran: with replicated weights, whose float32 gradients are all-reduced
    during the backward pass (DistributedDataParallel), and, in OpenCLIP's rows, with OpenCLIP's communication scheme.
    """
    models: dict[str, CountedModel] = {}
    for table in yaml.safe_load((HERE / "published_steps.yaml").read_text(encoding="utf-8")):
        recipe, rows, gpus = table["recipe"], table["rows"], table["gpus"]
        machine = find_machine(table["machine"], table["network"])
        stars = ["*" if name in table.get("assumed", ()) else "" for name in ("machine", "rows")]
        labels = f"{gpus} x {table['machine']}{stars[0]}", f"{rows}{stars[1]}"
        for method, lists in table["methods"].items():
            for place, nodes in enumerate(table["nodes"]):
                ranks = nodes * gpus
                options = [f"--data.batch_size={rows * ranks}", "--deepspeed=zero0_fp32"]
                config = config_for(None if method in REFERENCES else method, [recipe, *options])
                if recipe not in models:
                    models[recipe] = count_model(config)
                work = step_work(config, models[recipe], ranks, build_of(method))._replace(overlaps=True)
                times = _times(work, machine, nodes, gpus)
                published = {part: values[place] / 1e3 for part, values in lists.items()}
                model = {part: Range.of(getattr(time, part) for time in times) for part in ("total", "exposed")}
                yield Comparison(table["source"], table["setting"], method, *labels, nodes, published, model)


def published_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return a table of total times and a table of exposed communication, with the model's error by number of nodes."""
    counts = sorted({one.nodes for one in found})
    header = ["published in", "towers", "method", "pairs per GPU", "GPUs per node"]
    header += [f"{count} nodes" if count > 1 else "1 node" for count in counts]
    titles = {"total": "Published and predicted steps, ms"}
    titles["exposed"] = "Published and predicted exposed communication, ms"
    tables = []
    for part, title in titles.items():
        rows = []
        for labels, steps in groupby(found, key=lambda one: one[:5]):
            by_nodes = {one.nodes: _against(one, part) for one in steps if part in one.published}
            if by_nodes:
                source, setting, method, gpus, pairs = labels
                cells = [by_nodes.get(count, "-") for count in counts]
                rows.append([source, setting, f"`{method}`", pairs, gpus, *cells])
        tables.append(Table(title, header, rows))
    return tables


def _against(one: Comparison, part: str) -> str:
    """Return a published time, the model's range and its errors; +10 % means that the model's time is 10 % longer."""
    published, model = one.published[part], one.model[part]
    errors = [f"{100 * (end / published - 1):+,.0f}" for end in model]
    return f"{1e3 * published:,.0f}: {model.text(1e3)} ({' to '.join(errors)} %)"


def main() -> None:
    parser = Parser(prog="cost_model.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit the cost model to profiled steps")
    fitting.add_argument("folders", nargs="+", type=Path, help="folders with breakdown.json files at any depth")
    fitting.add_argument("--cores", type=int, required=True, help="number of the profiled machine's cores")
    fitting.add_argument("--out", type=Path, default=Path("runs/machine.json"), help="file for the machine")
    scaling = commands.add_parser("scale", help="predict a recipe's cost on more nodes; config options may follow")
    scaling.add_argument("recipe", help="a recipe's name, or the path of a YAML file")
    scaling.add_argument("--methods", nargs="+", help="methods to compare (default: the recipe's)")
    scaling.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 4, 8], help="numbers of nodes")
    scaling.add_argument("--gpus", type=int, default=8, help="GPUs per node")
    scaling.add_argument("--rows", type=int, help="pairs per rank (default: the recipe's batch, divided by the ranks)")
    scaling.add_argument("--machine", default="h100", help="a name in machines.yaml, or a fitted machine.json")
    scaling.add_argument("--networks", nargs="+", help="networks between nodes (default: all in machines.yaml)")
    scaling.add_argument("--samples", type=float, default=1e9, help="size n of the dataset")
    scaling.add_argument("--seen", type=float, default=1.28e10, help="samples seen in the whole run")
    commands.add_parser("published", help="compare the cost model with published times")
    with exit_on_mistake():
        asked, overrides = parser.parse_with_overrides(sys.argv[1:])
        if asked.command != "scale" and overrides:
            raise UserError(f"Unknown option {overrides[0]}; see {parser.prog} {asked.command} --help.")
        match asked.command:
            case "fit":
                tables = fit_profiles(asked.folders, asked.cores, asked.out)
            case "scale":
                tables = scale(asked, overrides)
            case _:
                tables = published_tables(list(compare_published()))
        print("\n\n".join(f"## {table.title}\n\n{table}" for table in tables))


if __name__ == "__main__":
    main()
