"""What is carried over from a few rows is what an objective sends and multiplies at another size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.objectives import METHODS, build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.planning.objective_cost import (
    ObjectiveQuery,
    SimulatedRank,
    _prototype_sections,
    _run,
    objective_calls,
    objective_work,
    prototypes_of,
)
from neuclip_ds.planning.openclip_reference import REFERENCES
from neuclip_ds.recipe import override, validate

RANKS, ROWS, DIM, SEEN = 3, 12, 10, 4


def config_of(method: str) -> Config:
    npn, amortized = {"prototypes": 9, "updates": 2, "lr": 1e-3}, {"online_every": 2, "width": 1.0}
    queue = {"prototypes": 9}
    options = {"objective": {"other_methods": {"npn": npn, "amortized": amortized, "queue": queue}}}
    return validate(override(options, {} if method in REFERENCES else {"objective": {"method": method}}))


def at_size(method: str, pieces: int) -> list[tuple[str, str, int]]:
    """Collectives of two late steps of the objective itself."""
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


@pytest.mark.parametrize("method", [*METHODS, *REFERENCES])
@pytest.mark.parametrize("pieces", [1, 3])
def test_collectives_at_another_size(method: str, pieces: int) -> None:
    found = at_size(method, pieces)
    build = REFERENCES.get(method, build_objective)
    predicted = objective_calls(ObjectiveQuery(config_of(method), RANKS, ROWS, DIM, torch.float32, pieces, build))
    assert {call[:3]: 2 * call.times for call in predicted} == {one: found.count(one) for one in found}


def test_operations_are_those_of_the_formulas() -> None:
    """A rank's rows against all, both ways and for both gradients, own pairs once; 8 B m/K d an NPN update.

    The queue has a product for its estimates, and one for their gradient.
    """
    batch = RANKS * ROWS
    pairs = (8 * ROWS * batch - 2 * ROWS * ROWS) * DIM
    positives = 2 * batch * DIM
    # two updates, a prediction and its gradient, three prototypes a rank
    npn = (2 * 8 + 4 + 4) * batch * 3 * DIM
    queue = 2 * 2 * 2 * ROWS * 9 * DIM
    for method, wanted in (("openclip", pairs), ("neuclip", pairs + npn), ("neuclip_queue", pairs + queue)):
        found = objective_work(ObjectiveQuery(config_of(method), RANKS, ROWS, DIM, torch.float32)).flops
        assert wanted <= found * (1 + 1e-9) and found <= wanted + 3 * positives


@pytest.mark.parametrize(
    "method",
    [
        "siglip",
        "openclip_reference",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fastclip_v2", "amorlip", "neuclip", "neuclip_queue")
        ),
    ],
)
def test_operations_are_polynomials_of_the_size(method: str) -> None:
    """Between and beyond the sizes that the coefficients come from; NeuCLIP's queue fills by whole slots."""
    build = REFERENCES.get(method, build_objective)
    config = config_of(method)
    for rows, dim, columns in ((4, 5, 2), (12, 10, 3)):
        for section in _prototype_sections(config):
            section.prototypes = columns * RANKS
        query = ObjectiveQuery(config, RANKS, rows, dim, torch.float32, build=build)
        assert objective_work(query) == pytest.approx(_run(query, columns)[1], rel=0.05)


@pytest.mark.parametrize(("method", "wanted"), [("openclip", 0), ("neuclip", 9), ("neuclip_queue", 9)])
def test_prototypes_are_those_of_the_method(method: str, wanted: int) -> None:
    assert prototypes_of(config_of(method)) == wanted
