"""Compare the normalizer error with a float64 reference from the method's state, on one to three ranks."""

import math
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from build import columns, objective, pairs, step
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.normalizer_error import normalizer_error
from neuclip_ds.objectives import find_method
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.normalizers.amortization_mlp import AmortizationMlp

N, DIM, BATCH = 29, 6, 12  # the last of three batches has five rows
BAD = [3, 11, 20]
TAU = 0.1
TRAINED = [torch.arange(12), torch.arange(6, 18), torch.arange(12, 24)]  # samples 24 to 28 are never visited
ROBUST = {"initial": TAU, "lr": 0.02, "rho": 2.0, "rule": "robust"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "openclip": ("openclip", {}),
    "fastclip_v3": ("fastclip_v3", {}),
    "isogclr": ("isogclr", {}),
    "gcl": ("gcl", {}),
    "tuneclip": ("tuneclip", {}),
    "neuclip": ("neuclip", {"npn": {"prototypes": 8, "inner_steps": 3}}),
    "neuclip_not_drawn": ("neuclip", {"npn": {"prototypes": 500}}),
    "neuclip_mlp": ("neuclip", {"npn": {"network": "mlp", "inner_steps": 3, "lr": 0.02}}),
    "neuclip_queue": ("neuclip_queue", {"temperature": ROBUST, "queue": {"size": 16, "kappa": 2.0}}),
    "amorlip": ("amorlip", {"amortized": {"positive_weight": 1e-3, "inner_steps": 9, "lr": 0.02, "ema": 0.3}}),
    "amorlip_negatives": ("amorlip", {"amortized": {"amortizes": "negatives", "ema": 0.3}}),
}


class Rows(NamedTuple):
    """A batch whose `image` and `tokens` are already the features, which `identity` returns unchanged."""

    image: Tensor
    tokens: Tensor
    index: Tensor  # type: ignore[assignment]
    valid: Tensor


def identity(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return image, tokens


def batches_of(samples: Tensor, features: tuple[Tensor, Tensor], rank: Any, batch: int = BATCH) -> list[Rows]:
    """Return this rank's rows of each global batch of `samples`; invalid rows are NaN."""
    steps = math.ceil(len(samples) / batch)
    index = torch.full((steps * batch,), -1)
    index[: len(samples)] = samples
    valid = (index >= 0) & ~torch.isin(index, torch.tensor(BAD))
    image, text = (torch.where(valid[:, None], rows[index.clamp(min=0)], math.nan) for rows in features)
    shares = [x.unflatten(0, (steps, rank.world_size, -1))[:, rank.rank] for x in (image, text, index, valid)]
    return [Rows(*rows) for rows in zip(*shares, strict=True)]


def trained(name: str, communicator: Any, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return the method after three training steps on features that differ from those of the evaluation."""
    method, options = METHODS[name]
    temperature = {"initial": TAU, "lr": 0.02, "rho": 2.0}
    averages = {"moving_average": {"gamma_epochs": 2}}
    options = {"eps": 1e-6, "temperature": temperature, **averages, **options, **changes}
    read = {key: value for key, value in options.items() if find_method(method).reads(f"objective.{key}")}
    built = objective(method, communicator, DIM, dtype, **read)
    for number, samples in enumerate(TRAINED):
        features = tuple(x.to(dtype) for x in pairs(N, DIM, seed=number))
        (rows,) = batches_of(samples, features, communicator)  # type: ignore[arg-type]
        built(Features(rows.image.nan_to_num(), rows.tokens.nan_to_num(), rows.index, rows.valid), step(number, number))
    return built


def measure(method: Any, communicator: Any, features: tuple[Tensor, Tensor], **options: Any) -> dict[str, float]:
    everything = batches_of(options.pop("samples", torch.arange(N)), features, communicator, 6)
    batches = batches_of(options.pop("order", ORDER), features, communicator, options.pop("batch", BATCH))
    options = {"anchors": N, "communicator": communicator, **options}
    cut = [zip(*(x.tensor_split(options.get("parts", 1)) for x in rows), strict=True) for rows in batches]
    batches = [Rows(*part) for parts in cut for part in parts]

    def answer(*rows: Tensor) -> tuple[Tensor, Tensor]:
        return method.log_normalizers(Features(*rows))

    return normalizer_error(identity, answer, method.pair_loss, batches, everything, **options)


def on_ranks(run_ranks: Any, world_size: int, name: str, **options: Any) -> dict[str, float]:
    results = run_ranks(world_size, lambda rank: measure(trained(name, rank), rank, FEATURES, **options))
    assert all(result == results[0] for result in results)
    return results[0]


ORDER = torch.randperm(N, generator=torch.Generator().manual_seed(5))
FEATURES = pairs(N, DIM, seed=99, likeness=0.7)
VALID = torch.tensor([i for i in range(N) if i not in BAD])


def temperatures(method: Any) -> Tensor:
    """Return the temperature of every sample in both directions, (2, N)."""
    tables = method.row_tables()
    if "temperatures" in tables:
        tau = columns(tables["temperatures"])
        return torch.stack([tau["tau_image"], tau["tau_text"]])[:, :N]
    state = method.replicated_state()
    tau = (
        (-state["temperature.theta"]).exp() if "temperature.theta" in state else torch.tensor(TAU, dtype=torch.float64)
    )
    return tau.expand(2, N)


def log_means(method: Any, samples: Tensor) -> Tensor:
    """Return log g, (2, N), computed within the given samples; the values of all other samples are NaN."""
    loss = method.pair_loss
    hinge = None if loss.is_identity else loss.margin
    image, text = (x[samples] for x in FEATURES)
    exponents = oracle.logits(image, text, temperatures(method)[:, samples], hinge)
    result = torch.full((2, N), math.nan, dtype=torch.float64)
    size = len(samples)
    divisor = size - method.pair_loss.excluded
    result[:, samples] = torch.stack([oracle.log_mean_exp(x) for x in exponents]) + math.log((size - 1) / divisor)
    return result


def batch_means(method: Any) -> Tensor:
    parts = [batch[torch.isin(batch, VALID)] for batch in ORDER.split(BATCH)]
    return torch.stack([log_means(method, part) for part in parts]).nan_to_num(0.0).sum(0)


def averages(method: Any) -> Tensor:
    u = columns(method.row_tables()["samples"])
    return torch.stack([u["log_u_image"], u["log_u_text"]])[:, :N]


def predictions(method: Any) -> Tensor:
    w = method.row_tables()["npn"].tensors
    tau = temperatures(method)[0, 0]
    return oracle.alphas(*FEATURES, tau, w["w1"], w["w2"], eps=0.0)


def pooled(method: Any) -> Tensor:
    """Return (2, N) estimates from the queue and the valid rows of the same batch."""
    state, result = method.replicated_state(), torch.zeros(2, N, dtype=torch.float64)
    entries = torch.stack([state["normalizer.queue_text"], state["normalizer.queue_image"]])
    for batch in ORDER.split(BATCH):
        rows = batch[torch.isin(batch, VALID)]
        image, text = (x[rows] for x in FEATURES)
        tau, others = temperatures(method)[0, 0], rows.unsqueeze(1) != state["normalizer.queue_index"]
        means = torch.stack([text.mean(0), image.mean(0)])  # queue entries move with the means
        means = state["normalizer.queue_means"].flip(0).lerp(means, len(rows) / 256)
        queues = (entries + means.unsqueeze(1)).unbind()
        result[:, rows] = oracle.pooled_normalizers(image, text, tau, queues, others, kappa=2.0).log()
    return result


def network(method: Any, name: str = "weights") -> Tensor:
    """Return the MLP's outputs, (2, N), minus the positives' scaled similarities."""
    flat = method.replicated_state()[f"normalizer.{name}"]
    image, text = FEATURES
    return AmortizationMlp(DIM, DIM)(flat, torch.stack(FEATURES)) - (image * text).sum(1) / temperatures(method)


def amortized(method: Any) -> Tensor:
    """Return the target net's (2, N) estimates without the positive's contribution, c/(B-1)."""
    result = torch.zeros(2, N, dtype=torch.float64)
    for batch in ORDER.split(BATCH):
        rows = batch[torch.isin(batch, VALID)]
        result[:, rows] = (network(method, "target")[:, rows].exp() - 1e-3 / (len(rows) - 1)).log()
    return result


ESTIMATES: dict[str, Any] = {
    "openclip": batch_means,
    "fastclip_v3": averages,
    "isogclr": averages,
    "gcl": averages,
    "tuneclip": averages,
    "neuclip": predictions,
    "neuclip_not_drawn": batch_means,
    "neuclip_queue": pooled,
    "neuclip_mlp": network,
    "amorlip": amortized,
    "amorlip_negatives": lambda method: network(method, "target"),
}


def reference(run_ranks: Any, name: str, anchors: Tensor = VALID) -> dict[str, float]:
    (method,) = run_ranks(1, lambda rank: trained(name, rank))
    error = (ESTIMATES[name](method) - log_means(method, VALID))[:, anchors]
    seen = error.isfinite().all(0)
    error = error[:, seen]
    square = error.square()
    return {
        "normalizer_mse": float(square.mean()),
        "normalizer_mse_image": float(square[0].mean()),
        "normalizer_mse_text": float(square[1].mean()),
        "normalizer_bias": float(error.mean()),
        "normalizer_anchors": int(seen.sum()),
        "normalizer_unseen": int((~seen).sum()),
    }


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_equals_the_reference(run_ranks: Any, name: str, world_size: int) -> None:
    wanted = reference(run_ranks, name)
    found = on_ranks(run_ranks, world_size, name, chunk=7)
    assert found == pytest.approx(wanted, rel=1e-9)
    assert found["normalizer_mse"] > 1e-3, "the estimate must differ from the truth"
    unvisited = 5 if ESTIMATES[name] is averages else 0
    assert found["normalizer_unseen"] == unvisited
    assert found["normalizer_anchors"] == N - len(BAD) - unvisited


@pytest.mark.parametrize("world_size", [1, 2])
def test_parts_make_a_batch_of_the_trainings_size(run_ranks: Any, world_size: int) -> None:
    wanted = on_ranks(run_ranks, world_size, "openclip")
    assert on_ranks(run_ranks, world_size, "openclip", parts=3) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["openclip", "neuclip"])
def test_some_anchors_against_all_samples(run_ranks: Any, name: str, world_size: int) -> None:
    """Use the first 15 valid samples as anchors; the second batch is still complete."""
    anchors = ORDER[torch.isin(ORDER, VALID)][:15]
    wanted = reference(run_ranks, name, anchors)
    found = on_ranks(run_ranks, world_size, name, anchors=15, order=ORDER[: 2 * BATCH])
    assert found == pytest.approx(wanted, rel=1e-9)
    assert found["normalizer_anchors"] == 15


@pytest.mark.parametrize("name", ["openclip", "neuclip", "tuneclip"])
def test_float32_at_the_coldest_temperature(run_ranks: Any, name: str) -> None:
    """Check exponents of up to 190, for which exp overflows in float32."""
    image, text = pairs(N, DIM, seed=99, likeness=0.3)
    text[:4], text[4:8] = -image[:4], image[:4]
    results = []
    for dtype in (torch.float32, torch.float64):
        # without inner updates, which amplify rounding errors at this temperature
        npn = {"prototypes": 8, "inner_steps": 0}
        cold = {"temperature": {"initial": 0.01, "lr": 0.0}, "npn": npn}

        def work(rank: Any, dtype: torch.dtype = dtype, cold: dict[str, Any] = cold) -> dict[str, float]:
            method = trained(name, rank, dtype, **cold)
            return measure(method, rank, (image.to(dtype), text.to(dtype)))

        results += run_ranks(1, work)
    assert results[0] == pytest.approx(results[1], rel=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_changes_no_state(run_ranks: Any, name: str) -> None:
    def state(method: Any) -> dict[str, Tensor]:
        tables = [table.tensors for table in method.row_tables().values()]
        return {key: x.clone() for part in (method.replicated_state(), *tables) for key, x in part.items()}

    def work(rank: Any) -> None:
        method = trained(name, rank)
        before = state(method)
        measure(method, rank, FEATURES)
        after = state(method)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)

    run_ranks(2, work)


def test_a_batch_of_one_gives_no_estimate(run_ranks: Any) -> None:
    """With 13 samples in batches of 12, the last sample has no negative in its batch."""
    found = on_ranks(run_ranks, 2, "openclip", order=VALID[:13])
    assert found["normalizer_anchors"] == 12
    assert found["normalizer_unseen"] == 1


def test_a_broken_model_is_not_hidden(run_ranks: Any) -> None:
    (method,) = run_ranks(1, lambda rank: trained("openclip", rank))
    broken = (torch.full_like(FEATURES[0], math.nan), FEATURES[1])
    (found,) = run_ranks(1, lambda rank: measure(method, rank, broken))
    assert math.isnan(found["normalizer_mse"])
    assert found["normalizer_anchors"] == N - len(BAD)


def test_one_readable_pair_is_a_user_error(run_ranks: Any) -> None:
    with pytest.raises(UserError, match=r"two readable pairs.*data\.train"):
        on_ranks(run_ranks, 2, "openclip", order=VALID[:1], samples=VALID[:1])
