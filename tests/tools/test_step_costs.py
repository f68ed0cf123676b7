"""Check predictions of what an objective sends and computes at any size, and of how long a step takes."""

import dataclasses
import math

import pytest
import torch
from benchmarking.openclip_reference import REFERENCES
from step_costs import (
    Call,
    Cluster,
    Compute,
    Network,
    ObjectiveQuery,
    SimulatedRank,
    Work,
    collective_seconds,
    objective_calls,
    objective_work,
    step_time,
)
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import ring_bytes
from neuclip_ds.objectives import METHODS, build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.recipe import override, parse, validate

RANKS, ROWS, DIM, SEEN = 3, 12, 10, 4


def config_of(method: str) -> Config:
    npn, amortized = {"prototypes": 9, "inner_steps": 2, "replicas": 1}, {"online_every": 2, "width": 1.0}
    queue = {"size": 9}
    options = {"objective": {"other_methods": {"npn": npn, "amortized": amortized, "queue": queue}}}
    return validate(override(options, {} if method in REFERENCES else {"objective": {"method": method}}))


def at_size(method: str, pieces: int) -> list[tuple[str, str, int]]:
    """Return the collectives of two late steps of the real objective."""
    rank, config = SimulatedRank(RANKS), config_of(method)
    build = REFERENCES.get(method, build_objective)
    objective = build(config, Context(DIM, ROWS, rank), torch.float32)
    image, text = normalize(torch.randn(2, ROWS, DIM), dim=-1)
    features = Features(image, text, torch.arange(ROWS), torch.ones(ROWS, dtype=torch.bool))
    for number in range(SEEN + 2):
        if number == SEEN:
            rank.calls.clear()
        gather = objective.begin_gather(features.index, features.valid)
        if gather is not None:
            for part in text.chunk(pieces):
                gather.add_text(part)
            for part in image.chunk(pieces):
                gather.add_image(part)
        objective(dataclasses.replace(features, gather=gather), Step(number, 0, 1e-3, 1e-3))
    return [call[:3] for call in rank.calls]


QUICK = ("neuclip", "neuclip_queue", "amorlip", "openclip_reference")


@pytest.mark.parametrize(
    ("method", "pieces"),
    [
        *((name, 3) for name in QUICK),
        pytest.param("neuclip", 1, marks=pytest.mark.slow),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in (*METHODS, *REFERENCES) if name not in QUICK),
    ],
)
def test_collectives_at_another_size(method: str, pieces: int) -> None:
    found = at_size(method, pieces)
    build = REFERENCES.get(method, build_objective)
    predicted = objective_calls(ObjectiveQuery(config_of(method), RANKS, ROWS, DIM, torch.float32, pieces, build))
    assert {call[:3]: 2 * call.times for call in predicted} == {one: found.count(one) for one in found}


@pytest.mark.parametrize(
    ("method", "ranks", "dtype", "share"),
    [
        ("neuclip", 2, torch.float32, 0.55),
        ("neuclip", 8, torch.bfloat16, 0.75),
        pytest.param("neuclip", 64, torch.bfloat16, 0.75, marks=pytest.mark.slow),
        ("amorlip", 8, torch.bfloat16, 0.55),
    ],
)
def test_methods_as_published_send_less_than_openclips_scheme(
    method: str, ranks: int, dtype: torch.dtype, share: float
) -> None:
    """With B = m = 4,096 and d = 512, each prototype is on both of two ranks, on four of eight, or on eight of 64."""
    config, sent = parse([f"dfn14m_{method}"]).config, []
    for name in ("openclip_reference", method):
        build = REFERENCES.get(name, build_objective)
        query = ObjectiveQuery(config, ranks, 4096 // ranks, 512, dtype, 1, build)
        sent.append(sum(call.times * ring_bytes(call.op, call.size, ranks) for call in objective_calls(query)))
    assert sent[1] < share * sent[0]


def test_operations_are_those_of_the_formulas() -> None:
    """Count a rank's rows against all rows, both ways and for both gradients, and 8 B m/K d for an NPN update.

    Local pairs count once. The queue needs one product for its estimates and one for their gradient.
    """
    batch = RANKS * ROWS
    pairs = (8 * ROWS * batch - 2 * ROWS * ROWS) * DIM
    positives = 2 * batch * DIM
    # two updates, a prediction and its gradient; three prototypes per rank
    npn = (2 * 8 + 4 + 4) * batch * 3 * DIM
    queue = 2 * 2 * 2 * ROWS * 9 * DIM
    for method, wanted in (("openclip", pairs), ("neuclip", pairs + npn), ("neuclip_queue", pairs + queue)):
        found = objective_work(ObjectiveQuery(config_of(method), RANKS, ROWS, DIM, torch.float32)).flops
        assert wanted <= found * (1 + 1e-9) and found <= wanted + 3 * positives


COMPUTE = Compute(0.02, 4e10, 1e10, 5e8, 5e7, 1e4, skew=0.1, cores=2, sharing=0.4)
NETWORK = Network(start=1e-3, inner_latency=2e-4, inner_bandwidth=5e8)


def work(rows: int, ranks: int, stage_3: int = 0) -> Work:
    """Return work that grows with rows and ranks like a method's and varies enough to determine every rate."""
    calls = [
        Call("features", "all_gather", 4096 * rows, 2),
        Call("normalizer", "all_reduce", 16 * rows * ranks, 11),
        Call("gradient reduce", "all_reduce", 2_000_000),
    ]
    return Work(
        1e9 * rows, 0.7, 2e3 * rows**2 * ranks, 1e5 * rows * ranks, 4e6 / ranks, stage_3, calls if ranks > 1 else []
    )


def test_ranks_beyond_the_cores_slow_each_other_down() -> None:
    one, two, four = (step_time(work(64, 2), COMPUTE, Cluster(1, ranks, NETWORK)).computation for ranks in (1, 2, 4))
    assert two - 0.02 == pytest.approx(1.4 * (one - 0.02)) and four == pytest.approx(2 * two)


def test_the_ring_crosses_nodes_at_their_bandwidth() -> None:
    network = Network(1e-5, 2e-6, 4e11, latency=1e-5, bandwidth=1e10)
    size = 10**9
    within, between = (collective_seconds("all_reduce", size, Cluster(n, 8 // n, network)) for n in (1, 4))
    assert within == pytest.approx(1e-5 + 14 * 2e-6 + ring_bytes("all_reduce", size, 8) / 4e11)
    assert between == pytest.approx(1e-5 + 14 * 1e-5 + ring_bytes("all_reduce", size, 8) / 1e10)
    assert collective_seconds("all_gather", size, Cluster(1, 1, network)) == 0


def test_what_travels_under_computation_is_not_exposed() -> None:
    """The image tower can hide all feature gathers but one; engine collectives overlap if device and config allow."""
    cluster = Cluster(1, 4, NETWORK)
    slow = work(64, 4)
    fast = dataclasses.replace(COMPUTE, tower_rate=math.inf)
    hidden, exposed = (step_time(slow, compute, cluster).exposed for compute in (COMPUTE, fast))
    one = 2 * collective_seconds("all_gather", 4096 * 64, cluster)  # two ranks per core
    window = 0.7 / 3 * 2 * 1.4 * 1e9 * 64 / 4e10
    assert exposed - hidden == pytest.approx(min(one, window))
    beside = Compute(0.02, 4e8, 1e10, 5e8, 5e7, 1e4, overlaps_engine=True)
    reduction = collective_seconds("all_reduce", 2_000_000, cluster)
    times = [step_time(slow._replace(overlaps=overlaps), beside, cluster).exposed for overlaps in (False, True)]
    assert times[0] - times[1] == pytest.approx(reduction)


def test_a_slow_loader_is_waited_for() -> None:
    """A step takes at least as long as loading its pairs; a step without a loader does not wait."""
    slow = dataclasses.replace(COMPUTE, loading_rate=100.0)
    loaded, alone = (step_time(work(64, 4)._replace(rows=rows), slow, Cluster(1, 4, NETWORK)) for rows in (1000, 0))
    assert loaded.total == pytest.approx(10) and loaded.loading == pytest.approx(10 - alone.total)
    assert alone.loading == 0 and alone.total < 10
