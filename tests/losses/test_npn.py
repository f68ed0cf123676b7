"""Check the NPN's closed-form updates (Algorithm 3) against autograd with torch's Adagrad and AdamW, and its queue."""

from typing import Any

import oracle
import pytest
import torch
from amortization import DIM, MLP
from build import batch, objective, pairs, relative_error, step, with_scalar_gradients

from neuclip_ds.distributed.communicator import Communicator


@pytest.mark.parametrize("separate", [False, True])
def test_updates_follow_adagrad_on_the_papers_objective(separate: bool) -> None:
    """Three updates equal Adagrad steps along autograd's gradient of tau/B sum [exp(-alpha)(eps + g) + alpha]."""
    dim, size, eps, tau = 6, 20, 1e-14, torch.tensor(0.07, dtype=torch.float64)
    npn: dict[str, Any] = {"prototypes": 2 * size, "inner_steps": 3}
    npn |= {"optimizer": "adagrad", "lr": 0.3}
    npn["objective"] = "separate" if separate else "unified"
    decayed = {**npn, "weight_decay": 0.2}
    method = objective("neuclip", Communicator(), dim, eps=eps, npn=decayed, temperature={"lr": 0.0})
    earlier = [pairs(size, dim, seed=seed) for seed in (1, 2)]
    for number, rows in enumerate(earlier):
        method(batch(*rows), step(number))
    images, texts = (torch.cat(side) for side in zip(*earlier, strict=True))
    w1, w2 = (torch.nn.Parameter(start.clone()) for start in (texts, images))
    adagrad = torch.optim.Adagrad([w1, w2], lr=0.3, weight_decay=0.2)
    image, text = pairs(size, dim)
    g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
    for _ in range(3):
        adagrad.zero_grad()
        alpha = oracle.alphas(image, text, tau, w1, w2, eps)
        unified = tau * ((-alpha).exp() * (eps + g) + alpha)
        ((alpha - torch.log(eps + g)).square() if separate else unified).mean(1).sum().backward()
        adagrad.step()
    method(batch(image, text), step(2))
    table = method.row_tables()["npn"].tensors
    for name, wanted in (("w1", w1), ("w2", w2)):
        assert relative_error(table[name], wanted.detach()) < 1e-10
        assert relative_error(table[f"{name}_accumulator"], adagrad.state[wanted]["sum"]) < 1e-10


@pytest.mark.parametrize("separate", [False, True])
def test_scaled_updates_step_by_lr_tau_along_the_gradient_over_its_bound(separate: bool) -> None:
    """Each update normalizes W_k - lr tau B dJ/dW_k/(sum_i p_ik (1 + |1 - r_i|) + delta); moves are below lr tau."""
    dim, size, m, lr, tau = 6, 20, 20, 0.4, torch.tensor(0.02, dtype=torch.float64)
    npn = {"prototypes": m, "inner_steps": 3, "lr": lr, "objective": "separate" if separate else "unified"}
    method = objective("neuclip", Communicator(), dim, npn=npn, temperature={"initial": 0.02, "lr": 0.0})
    image, text = pairs(size, dim)
    g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
    w = [x.clone().requires_grad_() for x in (text, image)]
    for _ in range(3):
        alpha = oracle.alphas(image, text, tau, *w, 1e-14)
        unified = tau * ((-alpha).exp() * g + alpha)
        loss = (alpha - g.log()).square() if separate else unified
        r = 2 / tau * (alpha - g.log()) if separate else 1 - g * (-alpha).exp()
        gradients = torch.autograd.grad(loss.sum(), w)
        for number, anchors in enumerate((image, text)):
            p = torch.softmax(anchors @ w[number].detach().T / tau, dim=1)
            bound = (p * (1 + (1 - r[number]).abs()).unsqueeze(1)).sum(dim=0).detach() + 1e-3 * size / m
            move = lr * tau * gradients[number] / bound.unsqueeze(1)
            assert float(move.norm(dim=1).max()) < lr * tau
            w[number] = torch.nn.functional.normalize(w[number].detach() - move, dim=1).requires_grad_()
    method(batch(image, text), step(0))  # m = B: the prototypes are drawn from this batch
    table = method.row_tables()["npn"].tensors
    assert max(relative_error(table[name], x.detach()) for name, x in zip(("w1", "w2"), w, strict=True)) < 1e-10


@pytest.mark.parametrize(("npn", "stable"), [({}, True), ({"optimizer": "adagrad", "lr": 0.05}, False)])
def test_a_perturbation_of_the_encoders_grows_less_than_a_hundredfold(npn: dict[str, Any], stable: bool) -> None:
    """Measure how much a relative change of 1e-12 in the weights changes the gradients of 20 steps at tau = 0.01."""

    def train(change: float) -> list[torch.Tensor]:
        rows = [pairs(128, 32, seed=number) for number in range(20)]
        towers = [torch.eye(32, dtype=torch.float64) + 0.5 * x for x in pairs(32, 32, seed=99)]
        towers[0] *= 1 + change * torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).double()
        weights = [tower.requires_grad_() for tower in towers]
        adam, found = torch.optim.Adam(weights, lr=1e-3), []
        sizes = {"prototypes": 256, "redraw_every": 500, **npn}
        method = objective("neuclip", Communicator(), 32, npn=sizes, temperature={"initial": 0.01, "lr": 0.0})
        for number, inputs in enumerate(rows):
            pair = [torch.nn.functional.normalize(x @ w, dim=1) for x, w in zip(inputs, weights, strict=True)]
            by = method(batch(*(x.detach() for x in pair)), step(number))
            adam.zero_grad()
            torch.autograd.backward(pair, [by.image, by.text])
            found.append(torch.stack([w.grad for w in weights if w.grad is not None]))
            adam.step()
        return found

    grown = max(relative_error(*both) / 1e-12 for both in zip(train(1e-12), train(0.0), strict=True))
    assert grown < 100 if stable else grown > 1e4


def test_updates_in_float32() -> None:
    """At tau = 0.01, updates in float32 match those in float64 to within 1e-4."""
    tables = []
    for dtype in (torch.float32, torch.float64):
        npn = {"prototypes": 32}
        method = objective("neuclip", Communicator(), 16, dtype, npn=npn, temperature={"initial": 0.01, "lr": 0.0})
        for number in range(2):
            image, text = pairs(32, 16, seed=number)
            method(batch(image.to(dtype), text.to(dtype)), step(number))
        tables.append(method.row_tables()["npn"].tensors)
    for name in ("w1", "w2"):
        assert relative_error(tables[0][name].double(), tables[1][name]) < 1e-4


def test_prototypes_of_small_batches_come_from_earlier_ones() -> None:
    """A redraw sets W1 to the texts and W2 to the images of the last m samples before the current batch."""
    dim, size, m = 4, 5, 12
    npn = {"prototypes": m, "inner_steps": 0, "redraw_every": 4}
    method = objective("neuclip", Communicator(), dim, npn=npn)
    history = [pairs(size, dim, seed=number) for number in range(9)]
    for number, (image, text) in enumerate(history):
        method(batch(image, text), step(number))
        table = method.row_tables()["npn"].tensors
        if number < 3:  # 3 batches of 5 are needed before 12 samples have been seen
            assert not table["w1"].any()
            continue
        drawn = max(3, number - number % 4)
        texts = torch.cat([text for _, text in history[:drawn]])[-m:]
        images = torch.cat([image for image, _ in history[:drawn]])[-m:]
        order = torch.cdist(table["w1"], texts).argmin(dim=1)
        assert sorted(order.tolist()) == list(range(m))
        torch.testing.assert_close(table["w1"], texts[order])
        torch.testing.assert_close(table["w2"], images[order])


def test_prototypes_of_large_batches_come_from_the_batch_itself() -> None:
    """A batch with at least m samples supplies all prototypes (Algorithm 1, line 4)."""
    npn = {"prototypes": 6, "inner_steps": 0, "redraw_every": 1}
    method = objective("neuclip", Communicator(), 4, npn=npn)
    for number in range(2):
        image, text = pairs(20, 4, seed=number)
        method(batch(image, text), step(number))
    found = method.row_tables()["npn"].tensors["w1"]
    order = torch.cdist(found, text[-6:]).argmin(dim=1)
    assert sorted(order.tolist()) == list(range(6))
    torch.testing.assert_close(found, text[-6:][order])


@pytest.mark.parametrize("network", ["prototypes", "mlp"])
@pytest.mark.parametrize("prototypes", [32, 64])
@pytest.mark.parametrize("reading", ["full", "positive", "stop"])
def test_float32_at_a_temperature_of_three_thousandths(network: str, prototypes: int, reading: str) -> None:
    """All values stay finite for dissimilar batches whose normalizers the network misses by factors up to exp(600)."""
    npn: dict[str, Any] = {"prototypes": prototypes, "inner_steps": 5, "redraw_every": 3, "lr": 0.1}
    npn |= {"network": network, "alpha_grad": reading}
    temperature = {"initial": 0.003, "minimum": 0.003, "rho": 2.0}
    method = objective("neuclip", Communicator(), 16, torch.float32, npn=npn, temperature=temperature)
    for number in range(8):
        image, text = (x.float() for x in pairs(32, 16, seed=number, likeness=(-1) ** number))
        image[:8], text[8:16] = -text[:8], text[16:17]
        found = method(batch(image, text), step(number))
        assert all(torch.isfinite(x).all() for x in (found.image, found.text, found.loss, *found.metrics.values()))
    tensors = [value for rows in method.row_tables().values() for value in rows.tensors.values()]
    assert all(torch.isfinite(value).all() for value in (*method.replicated_state().values(), *tensors))


def test_each_step_is_one_of_adamw_on_the_papers_objective() -> None:
    """With batches of 20, the 30 prototypes are drawn in the third step, from samples 10 to 39, and never again."""
    dim, eps, lr = 6, 1e-14, 3e-3
    tau = torch.tensor(0.07, dtype=torch.float64)
    npn = {"prototypes": 30, "redraw_every": 3, "order": "joint", "weight_decay": 0.2, "alpha_grad": "stop"}
    method = objective("neuclip", Communicator(), dim, eps=eps, npn=npn, temperature={"lr": 0.0})
    seen = [pairs(20, dim, seed=seed) for seed in range(5)]
    for number in range(2):
        method(batch(*seen[number]), step(number, lr=lr))
    drawn = torch.cat([torch.arange(30, 40), torch.arange(10, 30)])
    image, text = (torch.cat(parts)[drawn] for parts in zip(*seen[:2], strict=True))
    w1, w2 = torch.nn.Parameter(text.clone()), torch.nn.Parameter(image.clone())
    adamw = torch.optim.AdamW([w1, w2], lr=lr, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.2)
    for number in range(2, 5):
        image, text = seen[number]
        g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
        alpha = oracle.alphas(image, text, tau, w1, w2, eps)
        found = method(batch(image, text), step(number, lr=lr))
        loss = ((-alpha).exp() * (eps + g) + alpha - 1).mean(1).sum()
        before = float(alpha.detach().mean())  # before the step moves the prototypes
        assert float(found.metrics["alpha"]) == pytest.approx(before)
        adamw.zero_grad()
        (tau * loss).backward()
        adamw.step()
    table = method.row_tables()["npn"].tensors
    for name, wanted in (("w1", w1), ("w2", w2)):
        assert relative_error(table[name], wanted.detach()) < 1e-10
        assert relative_error(table[f"{name}_square"], adamw.state[wanted]["exp_avg_sq"]) < 1e-10


def test_the_mlp_is_refused() -> None:
    with pytest.raises(ValueError, match="order=joint is for prototypes"):
        objective("neuclip", Communicator(), 4, npn={"network": "mlp", "order": "joint"})


EPS = 1e-6


def mlp(**npn: Any) -> Any:
    """Build NeuCLIP with the MLP form of the network."""
    common = {"eps": EPS, "temperature": {"lr": 0.0}}
    return objective("neuclip", Communicator(), DIM, npn={"network": "mlp", **npn}, **common)


@pytest.mark.parametrize("goal", ["unified", "separate"])
def test_updates_of_the_mlp_follow_adam_on_the_objective(goal: str) -> None:
    method = mlp(inner_steps=3, objective=goal, lr=0.01)
    image, text = pairs(15, DIM)
    tau = torch.tensor(0.07, dtype=torch.float64)
    start = method.replicated_state()["normalizer.weights"].clone()
    g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
    features, positive = torch.stack([image, text]), (image * text).sum(1) / tau
    with torch.no_grad():
        level = (torch.log(EPS + g) + positive - MLP(start, features)).mean(1)
        MLP.weights(start).out_bias.add_(level.view(2, 1, 1))
    weights = torch.nn.Parameter(start)
    adam = torch.optim.Adam([weights], lr=0.01)
    for _ in range(3):
        adam.zero_grad()
        alpha = torch.log(EPS + (MLP(weights, features) - positive).exp())
        unified = tau * ((-alpha).exp() * (EPS + g) + alpha)
        (unified if goal == "unified" else (alpha - torch.log(EPS + g)).square()).mean(1).sum().backward()
        adam.step()
    found = method(batch(image, text), step())
    assert relative_error(method.replicated_state()["normalizer.weights"], weights.detach()) < 1e-9
    with torch.no_grad():
        alpha = torch.log(EPS + (MLP(weights, features) - positive).exp())
    assert float(found.metrics["alpha"]) == pytest.approx(float(alpha.mean()), rel=1e-8)


@pytest.mark.parametrize("reading", ["full", "positive", "stop"])
def test_gradients_through_the_mlp_are_autograds(reading: str) -> None:
    """The gradients for the features and theta = log(1/tau) match autograd for each value of alpha_grad."""
    method = mlp(inner_steps=2, lr=0.1, alpha_grad=reading)
    method(batch(*pairs(15, DIM, seed=1)), step())
    image, text = (x.requires_grad_() for x in pairs(15, DIM))
    found, scalars = with_scalar_gradients(method, batch(image.detach(), text.detach()), step(1))
    theta = torch.tensor(method.replicated_state()["temperature.theta"].item(), dtype=torch.float64, requires_grad=True)
    tau, positive = (-theta).exp(), (image * text).sum(1)
    log_normalizer = MLP(method.replicated_state()["normalizer.weights"], torch.stack([image, text]))
    alpha = torch.log(EPS + (log_normalizer - positive / tau).exp())
    loss = tau * oracle.conjugate(image, text, tau, alpha, EPS, reading)
    by_image, by_text, by_theta = torch.autograd.grad(loss, (image, text, theta))
    assert relative_error(found.image, by_image) < 1e-10
    assert relative_error(found.text, by_text) < 1e-10
    assert float(scalars["theta"]) == pytest.approx(float(by_theta), rel=1e-10)
