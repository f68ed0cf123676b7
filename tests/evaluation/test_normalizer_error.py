"""Compare the normalizer error with a float64 reference from the method's state, on one to three ranks."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import oracle
import pytest
import torch
from build import build_loss, call, columns, pairs, position, replicated_state, table_rows
from torch import Tensor

from neuclip_ds.data.feature_table import StoredFeatures
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.normalizer_error import normalizer_error
from neuclip_ds.losses.amortization_mlp import AmortizationMlp
from neuclip_ds.losses.methods import find_method, reads_option

N = 29  # samples
DIM = 6
BATCH = 12  # the last of three batches has five rows
BAD = [3, 11, 20]  # samples that cannot be used
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


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A batch whose `image` and `tokens` are already the features, which `identity` returns unchanged."""

    image: Tensor
    tokens: Tensor
    index: Tensor
    valid: Tensor
    stored: dict[str, StoredFeatures] = field(default_factory=dict)

    def split(self, parts: int) -> list[Rows]:
        """Split the rows into nearly equal parts."""
        return [self._rows(rows) for rows in torch.arange(len(self.index)).tensor_split(parts)]

    def _rows(self, rows: Tensor) -> Rows:
        stored: dict[str, StoredFeatures] = {}
        for name, features in self.stored.items():
            image, text = features.pair()
            stored[name] = StoredFeatures(image=image[rows], text=text[rows])
        return Rows(
            image=self.image[rows],
            tokens=self.tokens[rows],
            index=self.index[rows],
            valid=self.valid[rows],
            stored=stored,
        )


def identity(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return image, tokens


def batches_of(
    samples: Tensor, features: tuple[Tensor, Tensor], rank: Any, batch: int = BATCH, has_reference: bool = False
) -> list[Rows]:
    """Return this rank's rows of each global batch of `samples`; invalid rows are NaN, and those of a reference 0."""
    steps = math.ceil(len(samples) / batch)
    index = torch.full((steps * batch,), -1)
    index[: len(samples)] = samples
    valid = (index >= 0) & ~torch.isin(index, torch.tensor(BAD))
    image, text = (torch.where(valid[:, None], rows[index.clamp(min=0)], math.nan) for rows in features)
    batches = []
    rows_per_rank = batch // rank.world_size
    for step_number in range(steps):
        start = step_number * batch + rank.rank * rows_per_rank
        local = slice(start, start + rows_per_rank)
        stored: dict[str, StoredFeatures] = {}
        if has_reference:
            is_valid = valid[local].unsqueeze(1)
            of_rows = [torch.where(is_valid, rows[index[local].clamp(min=0)], 0.0) for rows in STORED]
            stored["reference"] = StoredFeatures(image=of_rows[0], text=of_rows[1])
        batches.append(
            Rows(image=image[local], tokens=text[local], index=index[local], valid=valid[local], stored=stored)
        )
    return batches


def trained(name: str, communicator: Any, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return the loss after three training steps on features that differ from those of the evaluation."""
    method, options = METHODS[name]
    defaults = {
        "eps": 1e-6,
        "temperature": {"initial": TAU, "lr": 0.02, "rho": 2.0},
        "moving_average": {"gamma_epochs": 2},
    }
    options = {**defaults, **options, **changes}
    row = find_method(method)
    read = {key: value for key, value in options.items() if reads_option(row, f"objective.{key}")}
    loss_fn = build_loss(method, communicator, DIM, dtype, **read)
    for number, samples in enumerate(TRAINED):
        image, text = pairs(N, DIM, seed=number)
        (rows,) = batches_of(samples, (image.to(dtype), text.to(dtype)), communicator)
        image = rows.image.nan_to_num()
        text = rows.tokens.nan_to_num()
        call(loss_fn, image, text, rows.index, rows.valid, at=position(number, number))
    return loss_fn


def measure(
    loss_fn: Any,
    communicator: Any,
    features: tuple[Tensor, Tensor],
    samples: Tensor | None = None,
    order: Tensor | None = None,
    anchors: int = N,
    parts_per_batch: int = 1,
    chunk: int = 4096,
    has_reference: bool = False,
) -> dict[str, float]:
    """Measure the error, by default with all samples as anchors; check that this changes no state of the loss."""
    anchor_batches: list[Any] = []
    for rows in batches_of(ORDER if order is None else order, features, communicator, has_reference=has_reference):
        anchor_batches += rows.split(parts_per_batch)
    all_samples = torch.arange(N) if samples is None else samples
    all_batches: list[Any] = [*batches_of(all_samples, features, communicator, 6, has_reference)]

    before = state_of(loss_fn)
    errors = normalizer_error(
        identity,
        loss_fn.estimate_normalizers,
        loss_fn.function.pair_loss,
        anchor_batches,
        all_batches,
        communicator,
        anchors=anchors,
        chunk=chunk,
        parts_per_batch=parts_per_batch,
    )
    after = state_of(loss_fn)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before), "a measurement changes no state"
    return errors


def state_of(loss_fn: Any) -> dict[str, Tensor]:
    """Return copies of all tensors of a loss's state, by name."""
    state = replicated_state(loss_fn)
    for name, table in loss_fn.function.row_tables().items():
        for column, tensor in table.tensors.items():
            state[f"{name}/{column}"] = tensor.clone()
    return state


def on_ranks(run_ranks: Any, world_size: int, name: str, **options: Any) -> dict[str, float]:
    results = run_ranks(world_size, lambda rank: measure(trained(name, rank), rank, FEATURES, **options))
    assert all(result == results[0] for result in results)
    return results[0]


ORDER = torch.randperm(N, generator=torch.Generator().manual_seed(5))
FEATURES = pairs(N, DIM, seed=99, likeness=0.7)
STORED = pairs(N, 4, seed=98)  # features of a reference model
VALID = torch.tensor([i for i in range(N) if i not in BAD])


def temperatures(loss_fn: Any) -> Tensor:
    """Return the temperature of every sample in both directions, (2, N)."""
    tables = loss_fn.function.row_tables()
    if "temperatures" in tables:
        tau = columns(tables["temperatures"])
        return torch.stack([tau["tau_image"], tau["tau_text"]])[:, :N]
    state = replicated_state(loss_fn)
    tau = torch.tensor(TAU, dtype=torch.float64)
    if "temperature.theta" in state:
        tau = (-state["temperature.theta"]).exp()
    return tau.expand(2, N)


def log_means(loss_fn: Any, samples: Tensor) -> Tensor:
    """Return log g, (2, N), computed within the given samples; the values of all other samples are NaN."""
    pair_loss = loss_fn.function.pair_loss
    hinge = None if pair_loss.is_identity else pair_loss.margin
    image, text = (x[samples] for x in FEATURES)
    exponents = oracle.logits(image, text, temperatures(loss_fn)[:, samples], hinge)
    log_mean_exp = torch.stack([oracle.log_mean_exp(exponents_of_direction) for exponents_of_direction in exponents])
    size = len(samples)
    divisor = size - pair_loss.divisor_offset
    result = torch.full((2, N), math.nan, dtype=torch.float64)
    result[:, samples] = log_mean_exp + math.log((size - 1) / divisor)
    return result


def valid_batches() -> list[Tensor]:
    """Return the valid samples of each batch of anchors."""
    return [batch[torch.isin(batch, VALID)] for batch in ORDER.split(BATCH)]


def batch_means(loss_fn: Any) -> Tensor:
    result = torch.zeros(2, N, dtype=torch.float64)
    for samples in valid_batches():
        result[:, samples] = log_means(loss_fn, samples)[:, samples]
    return result


def averages(loss_fn: Any) -> Tensor:
    u = columns(loss_fn.function.row_tables()["samples"])
    return torch.stack([u["log_u_image"], u["log_u_text"]])[:, :N]


def predictions(loss_fn: Any) -> Tensor:
    weights = table_rows(loss_fn, "npn")
    tau = temperatures(loss_fn)[0, 0]
    image, text = FEATURES
    return oracle.alphas(image, text, tau, weights["w1"], weights["w2"], eps=0.0)


def pooled(loss_fn: Any) -> Tensor:
    """Return (2, N) estimates from the queue and the valid rows of the same batch."""
    state = replicated_state(loss_fn)
    tau = temperatures(loss_fn)[0, 0]
    queues = (state["normalizer.queue_text"], state["normalizer.queue_image"])
    result = torch.zeros(2, N, dtype=torch.float64)
    for samples in valid_batches():
        image, text = (features[samples] for features in FEATURES)
        is_other = samples.unsqueeze(1) != state["normalizer.queue_index"]
        result[:, samples] = oracle.pooled_normalizers(image, text, tau, queues, is_other, kappa=2.0).log()
    return result


def network(loss_fn: Any, name: str = "weights") -> Tensor:
    """Return the MLP's outputs, (2, N), minus the positives' scaled similarities."""
    weights = replicated_state(loss_fn)[f"normalizer.{name}"]
    image, text = FEATURES
    outputs = AmortizationMlp(DIM, DIM)(weights, torch.stack(FEATURES))
    return outputs - (image * text).sum(1) / temperatures(loss_fn)


def amortized(loss_fn: Any) -> Tensor:
    """Return the target net's (2, N) estimates without the positive's contribution, c/(B-1)."""
    result = torch.zeros(2, N, dtype=torch.float64)
    for samples in valid_batches():
        targets = network(loss_fn, "target")[:, samples]
        result[:, samples] = (targets.exp() - 1e-3 / (len(samples) - 1)).log()
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
    "amorlip_negatives": lambda loss_fn: network(loss_fn, "target"),
}


def reference(loss_fn: Any, name: str, anchors: Tensor = VALID) -> dict[str, float]:
    """Return the errors computed from the state of a loss that was trained on one rank."""
    error = (ESTIMATES[name](loss_fn) - log_means(loss_fn, VALID))[:, anchors]
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


@pytest.mark.parametrize("name", METHODS)
def test_the_error_is_that_of_the_estimates_in_the_methods_state(run_ranks: Any, name: str) -> None:
    """Compare with all samples as anchors, and with the first 15 valid samples as anchors against all samples."""
    some_anchors = ORDER[torch.isin(ORDER, VALID)][:15]
    some = {"anchors": 15, "order": ORDER[: 2 * BATCH]}  # the second batch is still complete

    (loss_fn,) = run_ranks(1, lambda rank: trained(name, rank))
    expected = reference(loss_fn, name)
    (errors,) = run_ranks(1, lambda rank: measure(loss_fn, rank, FEATURES, chunk=7))
    assert errors == pytest.approx(expected, rel=1e-9)
    assert errors["normalizer_mse"] > 1e-3, "the estimate must differ from the truth"
    unvisited = 5 if ESTIMATES[name] is averages else 0
    assert errors["normalizer_unseen"] == unvisited
    assert errors["normalizer_anchors"] == N - len(BAD) - unvisited

    expected_of_some = reference(loss_fn, name, some_anchors)
    (errors_of_some,) = run_ranks(1, lambda rank: measure(loss_fn, rank, FEATURES, **some))
    assert errors_of_some == pytest.approx(expected_of_some, rel=1e-9)

    def on_three_ranks(rank: Any) -> tuple[dict[str, float], dict[str, float]]:
        loss_fn = trained(name, rank)
        return measure(loss_fn, rank, FEATURES, chunk=7), measure(loss_fn, rank, FEATURES, **some)

    for errors, errors_of_some in run_ranks(3, on_three_ranks):
        assert errors == pytest.approx(expected, rel=1e-9)
        assert errors_of_some == pytest.approx(expected_of_some, rel=1e-9)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_similarities_of_a_reference_are_subtracted(
    run_ranks: Any, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    options = {"has_reference": True, "parts_per_batch": 2, "chunk": 7}
    results = run_ranks(world_size, lambda rank: measure(trained("openclip", rank), rank, FEATURES, **options))
    (loss_fn,) = run_ranks(1, lambda rank: trained("openclip", rank))
    image = torch.cat([FEATURES[0], -STORED[0]], dim=1)
    text = torch.cat([FEATURES[1], STORED[1]], dim=1)
    monkeypatch.setattr(sys.modules[__name__], "FEATURES", (image, text))
    for errors in results:
        assert errors == pytest.approx(reference(loss_fn, "openclip"), rel=1e-9)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_that_arrives_in_parts_has_the_same_error(run_ranks: Any, world_size: int) -> None:
    expected = on_ranks(run_ranks, world_size, "openclip")
    assert on_ranks(run_ranks, world_size, "openclip", parts_per_batch=3) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["openclip", "neuclip", "tuneclip"])
def test_float32_equals_float64_at_the_coldest_temperature(run_ranks: Any, name: str) -> None:
    """Check exponents of up to 190, for which exp overflows in float32."""
    image, text = pairs(N, DIM, seed=99, likeness=0.3)
    text[:4] = -image[:4]
    text[4:8] = image[:4]
    options = {
        "temperature": {"initial": 0.01, "lr": 0.0},
        "npn": {"prototypes": 8, "inner_steps": 0},  # inner updates would amplify rounding errors
    }

    def errors_in(dtype: torch.dtype) -> dict[str, float]:
        def work(rank: Any) -> dict[str, float]:
            return measure(trained(name, rank, dtype, **options), rank, (image.to(dtype), text.to(dtype)))

        (errors,) = run_ranks(1, work)
        return errors

    assert errors_in(torch.float32) == pytest.approx(errors_in(torch.float64), rel=1e-3)


def test_a_batch_of_one_gives_no_estimate(run_ranks: Any) -> None:
    """With 13 samples in batches of 12, the last sample has no negative in its batch."""
    errors = on_ranks(run_ranks, 2, "openclip", order=VALID[:13])
    assert errors["normalizer_anchors"] == 12
    assert errors["normalizer_unseen"] == 1


def test_the_error_of_a_broken_model_is_nan(run_ranks: Any) -> None:
    (loss_fn,) = run_ranks(1, lambda rank: trained("openclip", rank))
    broken = (torch.full_like(FEATURES[0], math.nan), FEATURES[1])
    (errors,) = run_ranks(1, lambda rank: measure(loss_fn, rank, broken))
    assert math.isnan(errors["normalizer_mse"])
    assert errors["normalizer_anchors"] == N - len(BAD)


def test_one_readable_pair_is_a_user_error(run_ranks: Any) -> None:
    with pytest.raises(UserError, match=r"two readable pairs.*data\.train"):
        on_ranks(run_ranks, 2, "openclip", order=VALID[:1], samples=VALID[:1])
