"""Check predictions of what a loss sends and computes at any size."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from benchmarking.openclip_reference import REFERENCES
from benchmarking.run_loss import build_loss
from benchmarking.stored_rows import StoredShape
from step_costs import Call, ObjectiveQuery, SimulatedRank, objective_calls, objective_work
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.traffic import ring_bytes
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.methods import METHODS
from neuclip_ds.recipe import override, parse, validate

RANKS = 3
ROWS = 12  # per rank
DIM = 10
WARM_UP = 4  # steps, after which NeuCLIP's prototypes are drawn and the queue is full
COUNTED = 2  # steps, because AmorLIP fits its nets in every second one


def config_of(method: str) -> Config:
    options = {
        "npn": {"prototypes": 9, "inner_steps": 2, "replicas": 1},
        "amortized": {"online_every": 2, "width": 1.0},
        "queue": {"size": 9},
    }
    named = {} if method in REFERENCES else {"objective": {"method": method}}
    return validate(override({"objective": {"other_methods": options}}, named))


STORED = {
    "reference": StoredShape(width=5, dtype=torch.float32),
    "teacher": StoredShape(width=7, dtype=torch.float16),
    "teacher 2": StoredShape(width=8, dtype=torch.float16),
}


def with_stored_features(query: ObjectiveQuery) -> ObjectiveQuery:
    """Return the query with the rows of a reference and two teachers."""
    distill = {"features": ["first", "second"], "temperature": 0.1}
    options = {"objective": {"reference_model": "reference", "distill": distill}}
    config = validate(override(options, query.config.model_dump(exclude_unset=True)))
    return replace(query, config=config, stored=STORED)


def query_of(method: str, micro_batches: int = 1) -> ObjectiveQuery:
    return ObjectiveQuery(
        config=config_of(method),
        world_size=RANKS,
        rows=ROWS,
        dim=DIM,
        comm_dtype=torch.float32,
        micro_batches=micro_batches,
        build=REFERENCES.get(method, build_loss),
    )


def calls_of_late_steps(query: ObjectiveQuery) -> list[Call]:
    """Return the collectives of `COUNTED` steps of the loss at its real size."""
    rank = SimulatedRank(RANKS)
    loss = query.build(query.config, DIM, ROWS, rank, torch.float32)
    image, text = normalize(torch.randn(2, ROWS, DIM), dim=-1)
    image.requires_grad_()
    text.requires_grad_()
    generator = torch.Generator().manual_seed(0)
    rows = {name: shape.random_rows(ROWS, generator).pair() for name, shape in query.stored.items()}
    stored = {}
    if rows:
        stored = {"reference": rows.pop("reference"), "teacher": list(rows.values())}
    for number in range(WARM_UP + COUNTED):
        if number == WARM_UP:
            rank.calls.clear()
        pending = loss.begin(torch.arange(ROWS), None, Position(step=number, lr=1e-3, peak_lr=1e-3), **stored)
        for piece in text.chunk(query.micro_batches):
            pending.add_text(piece)
        for piece in image.chunk(query.micro_batches):
            pending.add_image(piece)
        pending.begin_reads()
        loss(image, text, pending=pending)
    return rank.calls


QUICK = ("neuclip", "neuclip_queue", "amorlip", "openclip_reference")


@pytest.mark.parametrize(
    ("method", "micro_batches"),
    [
        *((name, 3) for name in QUICK),
        pytest.param("neuclip", 1, marks=pytest.mark.slow),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in (*METHODS, *REFERENCES) if name not in QUICK),
    ],
)
def test_small_runs_predict_the_collectives_of_a_larger_size(method: str, micro_batches: int) -> None:
    query = query_of(method, micro_batches)
    real = Counter((call.purpose, call.op, call.size) for call in calls_of_late_steps(query))
    predicted = {(call.purpose, call.op, call.size): COUNTED * call.times for call in objective_calls(query)}
    assert predicted == real


@pytest.mark.parametrize("method", ["fastclip_v1", pytest.param("neuclip_queue", marks=pytest.mark.slow)])
def test_stored_features_are_predicted(method: str) -> None:
    """The rows of each model are gathered once, and a reference makes the products of pairs D wider."""
    plain = query_of(method, 3)
    query = with_stored_features(plain)
    real = Counter((call.purpose, call.op, call.size) for call in calls_of_late_steps(query))
    predicted = {(call.purpose, call.op, call.size): COUNTED * call.times for call in objective_calls(query)}
    assert predicted == real
    sent = {size: times for (purpose, _, size), times in predicted.items() if purpose == "stored_features"}
    assert sent == {4 * ROWS * shape.width: 2 * COUNTED for shape in STORED.values()}
    assert objective_work(query).flops > 1.5 * objective_work(plain).flops


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
    config = parse([f"dfn14m_{method}"]).config
    ours = ObjectiveQuery(config=config, world_size=ranks, rows=4096 // ranks, dim=512, comm_dtype=dtype)
    reference = replace(ours, build=REFERENCES["openclip_reference"])
    assert bytes_sent(ours) < share * bytes_sent(reference)


def bytes_sent(query: ObjectiveQuery) -> float:
    return sum(call.times * ring_bytes(call.op, call.size, query.world_size) for call in objective_calls(query))


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
        counted = objective_work(query_of(method)).flops
        assert wanted <= counted * (1 + 1e-9)
        assert counted <= wanted + 3 * positives
