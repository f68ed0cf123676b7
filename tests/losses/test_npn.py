"""Check the NPN's closed-form updates (Algorithm 3) against autograd with torch's Adagrad and AdamW, and its queue."""

from typing import Any

import oracle
import pytest
import torch
from amortization import DIM, MLP
from build import (
    NO_MOMENTUM,
    build_loss,
    call,
    pairs,
    position,
    relative_error,
    replicated_state,
    scalar_gradients,
    table_rows,
)

from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss

TAU = torch.tensor(0.07, dtype=torch.float64)


@pytest.mark.parametrize("separate", [False, True])
def test_updates_follow_adagrad_on_the_papers_objective(separate: bool) -> None:
    """Three updates equal Adagrad steps along autograd's gradient of tau/B sum [exp(-alpha)(eps + g) + alpha]."""
    size = 20
    eps = 1e-14
    npn: dict[str, Any] = {"prototypes": 2 * size, "inner_steps": 3, "weight_decay": 0.2}
    npn |= {"optimizer": "adagrad", "lr": 0.3, "objective": "separate" if separate else "unified"}
    loss_fn = build_loss("neuclip", eps=eps, npn=npn, temperature={"lr": 0.0})
    earlier = [pairs(size, DIM, seed=seed) for seed in (1, 2)]
    for number, (image, text) in enumerate(earlier):
        call(loss_fn, image, text, at=position(number))
    images, texts = (torch.cat(features) for features in zip(*earlier, strict=True))
    w1 = torch.nn.Parameter(texts.clone())
    w2 = torch.nn.Parameter(images.clone())
    adagrad = torch.optim.Adagrad([w1, w2], lr=0.3, weight_decay=0.2)
    image, text = pairs(size, DIM)
    g = oracle.mean_exponentials(image, text, TAU)
    for _ in range(3):
        adagrad.zero_grad()
        alpha = oracle.alphas(image, text, TAU, w1, w2, eps)
        if separate:
            terms = (alpha - torch.log(eps + g)).square()
        else:
            terms = TAU * ((-alpha).exp() * (eps + g) + alpha)
        terms.mean(1).sum().backward()
        adagrad.step()
    call(loss_fn, image, text, at=position(2))
    table = table_rows(loss_fn, "npn")
    for name, expected in (("w1", w1), ("w2", w2)):
        assert relative_error(table[name], expected.detach()) < 1e-10
        assert relative_error(table[f"{name}_accumulator"], adagrad.state[expected]["sum"]) < 1e-10


@pytest.mark.parametrize("separate", [False, True])
def test_scaled_updates_step_by_lr_tau_along_the_gradient_over_its_bound(separate: bool) -> None:
    """Each update normalizes W_k - lr tau B dJ/dW_k/(sum_i p_ik (1 + |1 - r_i|) + delta); moves are below lr tau."""
    size = 20
    m = 20
    lr = 0.4
    tau = torch.tensor(0.02, dtype=torch.float64)
    npn = {"prototypes": m, "inner_steps": 3, "lr": lr, "objective": "separate" if separate else "unified"}
    loss_fn = build_loss("neuclip", npn=npn, temperature={"initial": 0.02, "lr": 0.0})
    image, text = pairs(size, DIM)
    g = oracle.mean_exponentials(image, text, tau)
    w = [x.clone().requires_grad_() for x in (text, image)]
    for _ in range(3):
        alpha = oracle.alphas(image, text, tau, w[0], w[1], 1e-14)
        if separate:
            loss = (alpha - g.log()).square()
            r = 2 / tau * (alpha - g.log())
        else:
            loss = tau * ((-alpha).exp() * g + alpha)
            r = 1 - g * (-alpha).exp()
        gradients = torch.autograd.grad(loss.sum(), w)
        for number, anchors in enumerate((image, text)):
            p = torch.softmax(anchors @ w[number].detach().T / tau, dim=1)
            bound = (p * (1 + (1 - r[number]).abs()).unsqueeze(1)).sum(dim=0).detach() + 1e-3 * size / m
            move = lr * tau * gradients[number] / bound.unsqueeze(1)
            assert float(move.norm(dim=1).max()) < lr * tau
            w[number] = torch.nn.functional.normalize(w[number].detach() - move, dim=1).requires_grad_()
    call(loss_fn, image, text)  # m = B: the prototypes are drawn from this batch
    table = table_rows(loss_fn, "npn")
    assert relative_error(table["w1"], w[0].detach()) < 1e-10
    assert relative_error(table["w2"], w[1].detach()) < 1e-10


@pytest.mark.parametrize(("npn", "stable"), [({}, True), ({"optimizer": "adagrad", "lr": 0.05}, False)])
def test_a_perturbation_of_the_encoders_grows_less_than_a_hundredfold(npn: dict[str, Any], stable: bool) -> None:
    """Measure how much a relative change of 1e-12 in the weights changes the gradients of 20 steps at tau = 0.01."""

    def train(change: float) -> list[torch.Tensor]:
        towers = [torch.eye(32, dtype=torch.float64) + 0.5 * x for x in pairs(32, 32, seed=99)]
        towers[0] *= 1 + change * torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).double()
        weights = [tower.requires_grad_() for tower in towers]
        adam = torch.optim.Adam(weights, lr=1e-3)
        sizes = {"prototypes": 128, "redraw_every": 500, **npn}
        loss_fn = build_loss("neuclip", dim=32, npn=sizes, temperature={"initial": 0.01, "lr": 0.0})
        gradients = []
        for number in range(20):
            images, texts = pairs(64, 32, seed=number)
            image = torch.nn.functional.normalize(images @ weights[0], dim=1)
            text = torch.nn.functional.normalize(texts @ weights[1], dim=1)
            adam.zero_grad()
            loss_fn(image, text, torch.arange(64), position=position(number)).backward()
            gradients.append(torch.stack([w.grad for w in weights if w.grad is not None]))
            adam.step()
        return gradients

    growth = max(relative_error(*both) / 1e-12 for both in zip(train(1e-12), train(0.0), strict=True))
    if stable:
        assert growth < 100
    else:
        assert growth > 1e4


def test_updates_in_float32_are_accurate() -> None:
    """At tau = 0.01, updates in float32 match those in float64 to within 1e-4."""
    tables = []
    for dtype in (torch.float32, torch.float64):
        temperature = {"initial": 0.01, "lr": 0.0}
        loss_fn = build_loss("neuclip", dim=16, dtype=dtype, npn={"prototypes": 32}, temperature=temperature)
        for number in range(2):
            image, text = pairs(32, 16, seed=number)
            call(loss_fn, image.to(dtype), text.to(dtype), at=position(number))
        tables.append(table_rows(loss_fn, "npn"))
    for name in ("w1", "w2"):
        assert relative_error(tables[0][name].double(), tables[1][name]) < 1e-4


@pytest.mark.parametrize(("every", "unit", "draws"), [(4, "steps", (3, 4, 8)), (20, "samples", (3, 7))])
def test_prototypes_of_small_batches_come_from_earlier_ones(every: int, unit: str, draws: tuple[int, ...]) -> None:
    """A redraw sets W1 to the texts and W2 to the images of the last m samples before the current batch."""
    size = 5
    m = 12
    npn = {"prototypes": m, "inner_steps": 0, "redraw_every": every, "redraw_unit": unit}
    loss_fn = build_loss("neuclip", dim=4, npn=npn)
    history = [pairs(size, 4, seed=number) for number in range(9)]
    for number, (image, text) in enumerate(history):
        call(loss_fn, image, text, at=position(number))
        table = table_rows(loss_fn, "npn")
        if number < 3:  # 3 batches of 5 are needed before 12 samples have been seen
            assert not table["w1"].any()
            continue
        drawn = max(step for step in draws if step <= number)
        texts = torch.cat([text for _, text in history[:drawn]])[-m:]
        images = torch.cat([image for image, _ in history[:drawn]])[-m:]
        order = torch.cdist(table["w1"], texts).argmin(dim=1)
        assert sorted(order.tolist()) == list(range(m))
        torch.testing.assert_close(table["w1"], texts[order])
        torch.testing.assert_close(table["w2"], images[order])


def test_prototypes_of_large_batches_come_from_the_batch_itself() -> None:
    """A batch with at least m samples supplies all prototypes (Algorithm 1, line 4)."""
    loss_fn = build_loss("neuclip", dim=4, npn={"prototypes": 6, "inner_steps": 0, "redraw_every": 1})
    for number in range(2):
        image, text = pairs(20, 4, seed=number)
        call(loss_fn, image, text, at=position(number))
    w1 = table_rows(loss_fn, "npn")["w1"]
    order = torch.cdist(w1, text[-6:]).argmin(dim=1)
    assert sorted(order.tolist()) == list(range(6))
    torch.testing.assert_close(w1, text[-6:][order])


@pytest.mark.parametrize("network", ["prototypes", "mlp"])
@pytest.mark.parametrize("prototypes", [32, 64])
@pytest.mark.parametrize("reading", ["full", "positive", "stop"])
def test_float32_is_finite_at_a_temperature_of_three_thousandths(network: str, prototypes: int, reading: str) -> None:
    """All values stay finite for dissimilar batches whose normalizers the network misses by factors up to exp(600)."""
    npn: dict[str, Any] = {"prototypes": prototypes, "inner_steps": 5, "redraw_every": 3, "lr": 0.1}
    npn |= {"network": network, "alpha_grad": reading}
    temperature = {"initial": 0.003, "minimum": 0.003, "rho": 2.0}
    loss_fn = build_loss("neuclip", dim=16, dtype=torch.float32, npn=npn, temperature=temperature)
    for number in range(8):
        image, text = (x.float() for x in pairs(32, 16, seed=number, likeness=(-1) ** number))
        image[:8] = -text[:8]
        text[8:16] = text[16:17]
        result = call(loss_fn, image, text, at=position(number))
        assert all(value.isfinite().all() for value in result.tensors())
    assert all(value.isfinite().all() for value in replicated_state(loss_fn).values())
    for table in loss_fn.function.row_tables().values():
        assert all(value.isfinite().all() for value in table.tensors.values())


def test_with_joint_order_each_step_is_one_of_adamw_on_the_papers_objective() -> None:
    """With batches of 20, the 30 prototypes are drawn in the third step, from samples 10 to 39, and never again."""
    eps = 1e-14
    lr = 3e-3
    npn = {"prototypes": 30, "redraw_every": 3, "order": "joint", "weight_decay": 0.2, "alpha_grad": "stop"}
    loss_fn = build_loss("neuclip", eps=eps, npn=npn, temperature={"lr": 0.0})
    history = [pairs(20, DIM, seed=seed) for seed in range(5)]
    for number in range(2):
        call(loss_fn, *history[number], at=position(number, lr=lr))
    drawn = torch.cat([torch.arange(30, 40), torch.arange(10, 30)])
    images, texts = (torch.cat(features)[drawn] for features in zip(*history[:2], strict=True))
    w1 = torch.nn.Parameter(texts.clone())
    w2 = torch.nn.Parameter(images.clone())
    adamw = torch.optim.AdamW([w1, w2], lr=lr, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.2)
    for number in range(2, 5):
        image, text = history[number]
        g = oracle.mean_exponentials(image, text, TAU)
        alpha = oracle.alphas(image, text, TAU, w1, w2, eps)
        result = call(loss_fn, image, text, at=position(number, lr=lr))
        loss = ((-alpha).exp() * (eps + g) + alpha - 1).mean(1).sum()
        alpha_before_the_step = float(alpha.detach().mean())
        assert float(result.metrics["alpha"]) == pytest.approx(alpha_before_the_step)
        adamw.zero_grad()
        (TAU * loss).backward()
        adamw.step()
    table = table_rows(loss_fn, "npn")
    for name, expected in (("w1", w1), ("w2", w2)):
        assert relative_error(table[name], expected.detach()) < 1e-10
        assert relative_error(table[f"{name}_square"], adamw.state[expected]["exp_avg_sq"]) < 1e-10


def test_joint_order_refuses_the_mlp() -> None:
    with pytest.raises(UserError, match="order=joint needs network=prototypes"):
        build_loss("neuclip", npn={"network": "mlp", "order": "joint"})


EPS = 1e-6


def neuclip_with_mlp(**npn: Any) -> ContrastiveLoss:
    options = {"eps": EPS, "temperature": {"lr": 0.0}, "npn": {"network": "mlp", **npn}}
    return build_loss("neuclip", dim=DIM, betas=NO_MOMENTUM, **options)


@pytest.mark.parametrize("objective", ["unified", "separate"])
def test_updates_of_the_mlp_follow_adam_on_the_objective(objective: str) -> None:
    loss_fn = neuclip_with_mlp(inner_steps=3, objective=objective, lr=0.01)
    image, text = pairs(15, DIM)
    start = replicated_state(loss_fn)["normalizer.weights"]
    g = oracle.mean_exponentials(image, text, TAU)
    features = torch.stack([image, text])
    positive = (image * text).sum(1) / TAU
    with torch.no_grad():
        level = (torch.log(EPS + g) + positive - MLP(start, features)).mean(1)
        MLP.weights(start).out_bias.add_(level.view(2, 1, 1))
    weights = torch.nn.Parameter(start)
    adam = torch.optim.Adam([weights], lr=0.01)
    for _ in range(3):
        adam.zero_grad()
        alpha = torch.log(EPS + (MLP(weights, features) - positive).exp())
        if objective == "separate":
            terms = (alpha - torch.log(EPS + g)).square()
        else:
            terms = TAU * ((-alpha).exp() * (EPS + g) + alpha)
        terms.mean(1).sum().backward()
        adam.step()
    result = call(loss_fn, image, text)
    assert relative_error(replicated_state(loss_fn)["normalizer.weights"], weights.detach()) < 1e-9
    with torch.no_grad():
        alpha = torch.log(EPS + (MLP(weights, features) - positive).exp())
    assert float(result.metrics["alpha"]) == pytest.approx(float(alpha.mean()), rel=1e-8)


@pytest.mark.parametrize("reading", ["full", "positive", "stop"])
def test_gradients_through_the_mlp_are_autograds(reading: str) -> None:
    """The gradients for the features and theta = log(1/tau) match autograd for each value of alpha_grad."""
    loss_fn = neuclip_with_mlp(inner_steps=2, lr=0.1, alpha_grad=reading)
    call(loss_fn, *pairs(15, DIM, seed=1))
    image, text = (x.requires_grad_() for x in pairs(15, DIM))
    result = call(loss_fn, image, text, at=position(1))
    state = replicated_state(loss_fn)
    theta = state["temperature.theta"].requires_grad_()
    tau = (-theta).exp()
    log_normalizer = MLP(state["normalizer.weights"], torch.stack([image, text]))
    alpha = torch.log(EPS + (log_normalizer - (image * text).sum(1) / tau).exp())
    loss = tau * oracle.conjugate(image, text, tau, alpha, EPS, reading)
    image_gradient, text_gradient, theta_gradient = torch.autograd.grad(loss, (image, text, theta))
    assert relative_error(result.image, image_gradient) < 1e-10
    assert relative_error(result.text, text_gradient) < 1e-10
    assert float(scalar_gradients(loss_fn)["theta"]) == pytest.approx(float(theta_gradient), rel=1e-10)
