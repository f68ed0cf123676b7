"""With a reference model, losses have the gradients of exponents from which the reference's differences are subtracted.

The expected values are float64 autograd of the losses as DRRho-CLIP writes them, on the whole batch.
"""

import math
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from build import (
    NO_MOMENTUM,
    SAMPLES,
    build_loss,
    call,
    columns,
    pairs,
    position,
    relative_error,
    replicated_state,
    scalar_gradients,
)
from ranks import run_ranks
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss, autograd_loss
from neuclip_ds.losses import pairs as pairs_module
from neuclip_ds.losses.methods import METHODS

ROWS = 24
DIM = 6
REFERENCE_DIM = 9
TAU = 0.06
EPS = 1e-6
RHO = 2.0
GAMMA = 0.3
STEPS = 2
EXACT = 1e-10
SHARED = {"eps": EPS, "temperature": {"initial": TAU, "lr": 0.0}}
AVERAGE = {**SHARED, "moving_average": {"gamma": "constant", "gamma_min": GAMMA}}
ROBUST = {**AVERAGE, "temperature": {"initial": TAU, "lr": 0.0, "rho": RHO}}
OPTIONS: dict[str, dict[str, Any]] = {
    "openclip": SHARED,
    "sogclr": AVERAGE,
    "isogclr": ROBUST,
    "fastclip_v0": AVERAGE,
    "fastclip_v3": ROBUST,
    "gcl": AVERAGE,
    "neuclip_queue": {"queue": {"size": ROWS}, **SHARED},
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """The batch of a step: (B, d) features, (B, D) stored features, and which rows are valid."""

    image: Tensor
    text: Tensor
    reference: tuple[Tensor, Tensor]
    valid: Tensor

    @classmethod
    def of(cls, number: int) -> "Step":
        """Return a step; in the second one, rows are missing, unevenly over ranks."""
        image, text = pairs(ROWS, DIM, seed=number)
        valid = torch.ones(ROWS, dtype=torch.bool)
        reference = pairs(ROWS, REFERENCE_DIM, seed=50)
        if number == 1:
            valid[[0, 1, 7, *range(16, ROWS)]] = False
            for rows in reference:
                rows[~valid] = math.nan
        return cls(image=image, text=text, reference=reference, valid=valid)


def run_steps(
    communicator: Communicator, chunk: int | None, micro_batches: tuple[int, int] | None
) -> dict[str, list[dict[str, Tensor]]]:
    """Run the steps of all methods on this rank's rows, and return losses and gradients."""
    share = ROWS // communicator.world_size
    local = slice(communicator.rank * share, (communicator.rank + 1) * share)
    results: dict[str, list[dict[str, Tensor]]] = {}
    for method, options in OPTIONS.items():
        loss_fn = build_loss(method, communicator, DIM, betas=NO_MOMENTUM, chunk_size=chunk, **options)
        results[method] = []
        for number in range(STEPS):
            step = Step.of(number)
            reference = (step.reference[0][local], step.reference[1][local])
            result = call(
                loss_fn,
                step.image[local],
                step.text[local],
                torch.arange(ROWS)[local],
                step.valid[local],
                at=position(number),
                micro_batches=micro_batches,
                reference=reference,
            )
            values = {"loss": result.loss, "image": result.image, "text": result.text, **scalar_gradients(loss_fn)}
            if method == "isogclr" and communicator.world_size == 1:
                rows = columns(loss_fn.function.row_tables()["temperatures"])
                values["taus"] = torch.stack([rows["moment_image"], rows["moment_text"]])[:, :ROWS][:, step.valid]
            results[method].append(values)
    return results


def exponents(image: Tensor, text: Tensor, tau: Tensor, reference: tuple[Tensor, Tensor]) -> Tensor:
    """Return the (2, B, B) exponents ((s_ij - s_ii) - (r_ij - r_ii))/tau of image anchors and of text anchors."""
    s = image @ text.T
    r = reference[0] @ reference[1].T
    of_images = (s - s.diagonal().unsqueeze(1)) - (r - r.diagonal().unsqueeze(1))
    of_texts = (s.T - s.diagonal().unsqueeze(1)) - (r.T - r.diagonal().unsqueeze(1))
    return torch.stack([of_images, of_texts]) / tau.expand(2, len(image)).unsqueeze(2)


def mean_exponentials(x: Tensor, divisor_offset: int = 1) -> Tensor:
    """Return g, of shape (2, B), from (2, B, B) exponents."""
    size = x.shape[1]
    return x.exp().masked_fill(torch.eye(size, dtype=torch.bool), 0.0).sum(2) / (size - divisor_offset)


def expected_steps(method: str) -> list[dict[str, Tensor]]:
    """Return the same values as `run_steps`, for the valid rows of the whole batch."""
    u = torch.full((2, ROWS), math.nan, dtype=torch.float64)
    results: list[dict[str, Tensor]] = []
    for number in range(STEPS):
        step = Step.of(number)
        valid = step.valid
        image = step.image[valid].requires_grad_()
        text = step.text[valid].requires_grad_()
        reference = (step.reference[0][valid], step.reference[1][valid])
        individual = method == "isogclr"
        theta = torch.full((2, len(image)) if individual else (), -math.log(TAU), dtype=torch.float64)
        tau = (-theta.requires_grad_()).exp()
        x = exponents(image, text, tau, reference)
        if method == "openclip":
            value = x.logsumexp(2).mean(1).sum() / 2
            loss = value
        elif method == "neuclip_queue":
            value = torch.log(1 / (SAMPLES - 1) + pooled(number, image, text, tau, reference, x)).mean(1).sum() / 2
            loss = value + math.log(SAMPLES - 1)
        else:
            g = mean_exponentials(x, 0 if method == "gcl" else 1)
            u[:, valid] = g.detach() if number == 0 else (1 - GAMMA) * u[:, valid] + GAMMA * g.detach()
            logs = torch.log(EPS + u[:, valid])
            data = g / (EPS + u[:, valid])
            scale = torch.ones_like(tau) if method == "fastclip_v0" else tau.detach()
            value = (scale * data).mean(1).sum()
            if method in ("isogclr", "fastclip_v3"):
                value = value + (tau * (logs + RHO)).mean(1).sum()
            loss = (scale * (logs + (RHO if "rho" in OPTIONS[method]["temperature"] else 0))).mean(1).sum()
        grad_image, grad_text, grad_theta = torch.autograd.grad(value, (image, text, theta))
        values = {"loss": loss.detach(), "image": grad_image, "text": grad_text}
        if method not in ("sogclr", "gcl", "isogclr"):
            values["theta"] = grad_theta
        if individual:
            values["taus"] = -grad_theta * len(image) / tau.detach()
        results.append(values)
    return results


def pooled(
    number: int, image: Tensor, text: Tensor, tau: Tensor, reference: tuple[Tensor, Tensor], x: Tensor
) -> Tensor:
    """Return (g + ghat)/2 with a queue that contains the first step's batch; before, g."""
    g = mean_exponentials(x)
    if number == 0:
        return g
    queued = Step.of(0)
    features = (image, text)
    entries = (queued.image, queued.text)
    others = ~torch.eye(ROWS, dtype=torch.bool)[Step.of(1).valid]
    sides: list[Tensor] = []
    for side in (0, 1):
        anchors = oracle.relative_to_mean(features[side])
        positive = (anchors * features[1 - side].detach()).sum(1) - (reference[0] * reference[1]).sum(1)
        similarity = anchors @ entries[1 - side].T - reference[side] @ queued.reference[1 - side].T
        z = (similarity - positive.unsqueeze(1)) / tau
        sides.append((z.exp() * others).sum(1) / others.sum(1))
    return (g + torch.stack(sides)) / 2


def assert_equal_to_autograd(ranks: list[dict[str, list[dict[str, Tensor]]]]) -> None:
    for method in OPTIONS:
        for number, expected in enumerate(expected_steps(method)):
            valid = Step.of(number).valid
            for name, exact in expected.items():
                if name in ("image", "text"):
                    value = torch.cat([rank[method][number][name] for rank in ranks])
                    assert not value[~valid].any()
                    value = value[valid]
                elif name == "taus" and len(ranks) > 1:
                    continue
                else:
                    value = ranks[0][method][number][name]
                assert relative_error(value, exact) < EXACT, (method, number, name)


@pytest.mark.parametrize(("chunk", "micro_batches", "factors"), [(None, None, True), (5, (7, 10), False)])
def test_gradients_equal_autograd(
    chunk: int | None, micro_batches: tuple[int, int] | None, factors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test whole batches with the arithmetic of CPUs, and blocks and micro-batches with the arithmetic of GPUs."""
    monkeypatch.setattr(pairs_module, "factors_exponentials", lambda device_type: factors)
    assert_equal_to_autograd([run_steps(Communicator(), chunk, micro_batches)])


def test_gradients_on_three_ranks_equal_autograd() -> None:
    assert_equal_to_autograd(run_ranks(3, run_steps, 5, (3, 5)))


@pytest.mark.parametrize("method", ["openclip", "fastclip_v3"])
def test_a_reference_that_equals_the_features_leaves_uniform_normalizers(method: str) -> None:
    """All exponents are zero, even where one exponential per pair would overflow."""
    image, text = (x.float() for x in pairs(ROWS, DIM))
    options = {"temperature": {"initial": 0.01, "lr": 0.0}}
    loss_fn = build_loss(method, dim=DIM, dtype=torch.float32, **options)
    log_g = loss_fn.log_normalizers(image, text, torch.arange(ROWS), reference=(image, text))
    if method == "openclip":
        torch.testing.assert_close(log_g, torch.zeros(2, ROWS), rtol=0, atol=1e-4)
    result = call(loss_fn, image, text, reference=(image, text))
    assert result.image.isfinite().all()
    log_g = loss_fn.log_normalizers(image, text, torch.arange(ROWS), reference=(image, text))
    torch.testing.assert_close(log_g, torch.zeros(2, ROWS), rtol=0, atol=1e-4)


def test_stored_rows_are_sent_like_features() -> None:
    """Stored rows are rounded to the communication dtype, and their traffic is counted under a separate name."""
    image, text = pairs(ROWS, DIM)
    reference = pairs(ROWS, REFERENCE_DIM, seed=1)
    rounded = (reference[0].bfloat16().double(), reference[1].bfloat16().double())
    features = (image.bfloat16().double(), text.bfloat16().double())
    sent = call(build_loss("openclip", comm_dtype="bfloat16"), image, text, reference=reference)
    exact = call(build_loss("openclip"), *features, reference=rounded)
    assert torch.equal(sent.loss, exact.loss)
    assert torch.equal(sent.image, exact.image)
    first, second = run_ranks(2, traffic_of_a_step)
    assert first == second == {"stored_features": 2 * (ROWS // 2) * (REFERENCE_DIM + 2 * DIM) * 8}


def traffic_of_a_step(communicator: Communicator) -> dict[str, int]:
    """Return the bytes of stored features that this rank sends in a step with a reference and two teachers."""
    rows = ROWS // 2
    loss_fn = build_loss("openclip", communicator, DIM)
    image, text = pairs(rows, DIM, seed=communicator.rank)
    teacher = pairs(rows, DIM, seed=2)
    call(loss_fn, image, text, reference=pairs(rows, REFERENCE_DIM), teacher=[teacher, teacher])
    sent: dict[str, int] = {}
    for purpose, traffic in communicator.traffic.items():
        if "stored" in purpose:
            sent[purpose] = traffic.bytes_sent
    return sent


def test_the_table_of_methods_says_which_refuse_a_reference() -> None:
    for method, row in METHODS.items():
        uses_reference = "reference" in build_loss(method).function.uses_stored
        assert uses_reference != row.refuses_reference, method


@pytest.mark.parametrize("method", ["neuclip", "amorlip", "siglip", "tuneclip"])
def test_methods_without_a_form_for_a_reference_refuse_it_by_name(method: str) -> None:
    with pytest.raises(
        UserError, match=f"objective.method={method} does not use objective.reference_model; .* openclip"
    ):
        build_loss(method, reference_model="features")
    image, text = pairs(ROWS, DIM)
    loss_fn = build_loss(method)
    for begins in (False, True):
        with pytest.raises(ValueError, match=f"{method} cannot use a reference model"):
            if begins:
                loss_fn.begin(torch.arange(ROWS), reference=(image, text))
            else:
                loss_fn(image, text, torch.arange(ROWS), reference=(image, text))


def test_a_custom_loss_refuses_stored_features() -> None:
    image, text = pairs(ROWS, DIM)
    loss_fn = build_loss(autograd_loss(lambda image, text, index: (image - text).square().sum()))
    for arguments in ({"reference": (image, text)}, {"teacher": (image, text)}):
        with pytest.raises(ValueError, match="The loss cannot use"):
            loss_fn(image, text, **arguments)


def test_rows_that_the_options_announce_must_come() -> None:
    image, text = pairs(ROWS, DIM)
    index = torch.arange(ROWS)
    for options, name in (
        ({"reference_model": "features"}, "reference_model"),
        ({"distill": {"features": "features"}}, "distill.features"),
    ):
        loss_fn = build_loss("openclip", **options)
        with pytest.raises(ValueError, match=f"{name} is set"):
            loss_fn(image, text, index)
        with pytest.raises(ValueError, match=f"{name} is set"):
            loss_fn.begin(index)
    with pytest.raises(UserError, match="reference_model is set"):
        build_loss("openclip", reference_model="features").log_normalizers(image, text, index)


def test_the_queue_keeps_one_reference_for_a_run() -> None:
    image, text = pairs(ROWS, DIM)
    loss_fn = build_loss("neuclip_queue", queue={"size": 7})
    reference = pairs(ROWS, REFERENCE_DIM)
    first = call(loss_fn, image, text, reference=reference)
    restored = build_loss("neuclip_queue", queue={"size": 7})
    restored.function.load_replicated_state(replicated_state(loss_fn))
    loss_fn.undo()
    assert torch.equal(call(loss_fn, image, text, reference=reference).image, first.image)
    later = call(loss_fn, *pairs(ROWS, DIM, seed=1), torch.arange(ROWS) + ROWS, reference=reference)
    restored_later = call(restored, *pairs(ROWS, DIM, seed=1), torch.arange(ROWS) + ROWS, reference=reference)
    assert torch.equal(later.image, restored_later.image)
    with pytest.raises(UserError, match="features of the same reference model in every call"):
        call(loss_fn, image, text)


BAD = [
    (lambda image, text: (image[1:], text[1:]), "must be two floating-point tensors"),
    (lambda image, text: (image, text[:, 1:]), "must be two floating-point tensors"),
    (lambda image, text: (image.long(), text.long()), "must be two floating-point tensors"),
    (lambda image, text: (image, 2 * text), "must have finite rows of norm 1"),
    (lambda image, text: (image, text.index_fill(0, torch.tensor([3]), math.nan)), "must have finite rows of norm 1"),
    (lambda image, text: (image, text.tolist()), "reference contains an object of type list"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rows_that_cannot_be_used_are_refused(change: Any, message: str) -> None:
    image, text = (x.float() for x in pairs(ROWS, DIM))
    reference = change(*(x.float() for x in pairs(ROWS, REFERENCE_DIM)))
    loss_fn = ContrastiveLoss("openclip", dim=DIM, samples=SAMPLES)
    with pytest.raises(ValueError, match=message):
        loss_fn(image, text, reference=reference)
    with pytest.raises(ValueError, match=message):
        loss_fn.begin(torch.arange(ROWS), reference=reference)
    loss_fn(image, text, reference=pairs(ROWS, REFERENCE_DIM))  # the refused batch leaves no trace


def widths_that_differ(communicator: Communicator) -> str:
    image, text = (x.float() for x in pairs(6, DIM))
    loss_fn = ContrastiveLoss("openclip", dim=DIM)
    reference = pairs(6, REFERENCE_DIM) if communicator.rank else None
    with pytest.raises(ValueError) as caught:
        loss_fn(image, text, reference=reference)
    return str(caught.value)


def rows_that_differ(communicator: Communicator) -> Tensor:
    """Return the loss of a batch of which the ranks have 5 and 7 rows."""
    rows = slice(0, 5) if communicator.rank == 0 else slice(5, 12)
    image, text = (x[rows] for x in pairs(12, DIM))
    reference_image, reference_text = (x[rows] for x in pairs(12, REFERENCE_DIM))
    loss_fn = ContrastiveLoss("openclip", dim=DIM, dtype=torch.float64)
    return loss_fn(image, text, reference=(reference_image, reference_text))


def on_two_ranks(communicator: Communicator) -> tuple[str, Tensor]:
    return widths_that_differ(communicator), rows_that_differ(communicator)


def test_ranks_check_widths_together_and_may_have_different_numbers_of_rows() -> None:
    whole = ContrastiveLoss("openclip", dim=DIM, dtype=torch.float64)
    loss = whole(*pairs(12, DIM), reference=pairs(12, REFERENCE_DIM))
    for message, value in run_ranks(2, on_two_ranks):
        assert "differ in number, width or dtype between ranks" in message
        assert relative_error(value, loss) < EXACT


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"reference": (*pairs(10, DIM), torch.zeros(10, DIM))}, "reference has 3 elements"),
        ({"reference": pairs(9, DIM)}, r"reference .* of the same shape \(10, D\)"),
        ({"teacher": ["a", "b"]}, "teacher has type str"),
    ],
)
def test_accumulate_refuses_stored_rows_that_are_not_pairs_of_matrices(stored: dict[str, Any], message: str) -> None:
    loss_fn = build_loss("openclip")
    with pytest.raises(ValueError, match=message), loss_fn.accumulate() as passes, passes.features():
        passes.add(*pairs(10, DIM), torch.arange(10), **stored)


def test_accumulate_passes_on_the_stored_rows_of_micro_batches() -> None:
    image, text = (x.requires_grad_() for x in pairs(ROWS, DIM))
    reference = pairs(ROWS, REFERENCE_DIM)
    teacher = pairs(ROWS, DIM, seed=4)
    whole = call(build_loss("openclip"), image, text, reference=reference, teacher=teacher)
    loss_fn = build_loss("openclip")
    halves = (slice(0, 10), slice(10, ROWS))
    with loss_fn.accumulate() as passes:
        for half in halves:
            with passes.features():
                passes.add(
                    image[half],
                    text[half],
                    torch.arange(ROWS)[half],
                    reference=(reference[0][half], reference[1][half]),
                    teacher=(teacher[0][half], teacher[1][half]),
                )
        loss = passes.loss()
        for half in halves:
            with passes.gradients():
                passes.backward(image[half], text[half])
    assert image.grad is not None
    assert relative_error(loss, whole.loss) < EXACT
    assert relative_error(image.grad, whole.image) < EXACT
