"""Check the temperature's gradients against autograd, and check its schedule, bounds and initial value."""

import math

import oracle
import pytest
import torch
from build import SAMPLES, batch, objective, pairs, relative_error, step, with_scalar_gradients
from neuclip_ds.objectives import build_objective

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.losses.base import Context
from neuclip_ds.losses.temperature import trained_temperature


def tau_of(method) -> float:
    tau = trained_temperature(method.replicated_state())
    assert tau is not None
    return float(tau)


@pytest.mark.parametrize(("reference", "coefficient"), [("paper", 1), ("released_code", 2)])
def test_rgcl_g_gradient(reference: str, coefficient: int) -> None:
    image, text = pairs(17, 6)
    tau, rho, eps = torch.tensor(0.05, dtype=torch.float64), 6.5, 1e-6
    u = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
    level = float(torch.log(eps + u).mean(1).sum() + 2 * rho)
    data = float(oracle.robust_tau_gradient(image, text, tau, u, eps, rho)) - level
    options = {"initial": 0.05, "rho": rho}
    method = objective("fastclip_v3", Communicator(), 6, eps=eps, temperature=options, reference=reference)
    _, found = with_scalar_gradients(method, batch(image, text), step())
    assert float(found["theta"]) == pytest.approx(-0.05 * (level + coefficient * data), rel=1e-10)


@pytest.mark.parametrize("reading", ["stop", "full", "positive"])
def test_neuclip_without_rho(reading: str) -> None:
    """The loss is half the conjugate with eps = 1/(n-1), plus a constant; rho and eps in the config are ignored."""
    image, text = (x.requires_grad_() for x in pairs(17, 6))
    npn = {"prototypes": 17, "inner_steps": 3, "lr": 0.05, "alpha_grad": reading}
    temperature = {"rule": "learned", "rho": 3.0, "lr": 0.0}
    method = objective("neuclip", Communicator(), 6, npn=npn, temperature=temperature)
    method(batch(*pairs(17, 6, seed=5)), step(0))
    gradients, found = with_scalar_gradients(method, batch(image.detach(), text.detach()), step(1))
    table = method.row_tables()["npn"].tensors
    theta = torch.tensor(-math.log(0.07), dtype=torch.float64, requires_grad=True)
    tau, eps = (-theta).exp(), 1 / (SAMPLES - 1)
    alpha = oracle.alphas(image, text, tau, table["w1"], table["w2"], eps)
    loss = oracle.conjugate(image, text, tau, alpha, eps, reading) / 2
    by_image, by_text, by_theta = torch.autograd.grad(loss, (image, text, theta))
    assert relative_error(gradients.image, by_image) < 1e-10
    assert relative_error(gradients.text, by_text) < 1e-10
    assert float(found["theta"]) == pytest.approx(float(by_theta), rel=1e-10)
    assert float(gradients.loss) == pytest.approx(float(loss.detach()) + math.log(SAMPLES - 1), rel=1e-10)


def test_methods_with_one_rule_refuse_another() -> None:
    with pytest.raises(UserError, match=r"temperature\.rule=learned is read by neuclip.* only; .*method=fastclip_v3"):
        objective("fastclip_v3", Communicator(), 6, temperature={"rule": "learned"})


def test_a_loss_without_rho_needs_the_size_of_the_data_set() -> None:
    with pytest.raises(UserError, match="n is unknown"):
        ContrastiveLoss("neuclip", dim=6, temperature={"rule": "learned"})


def test_clamp_holds_openclip_at_one_hundred() -> None:
    method = objective("openclip", Communicator(), 6, temperature={"initial": 0.0101, "lr": 1.0})
    image, text = pairs(8, 6, likeness=100.0)  # all pairs are solved, so the loss lowers tau
    for number in range(3):
        method(batch(image, text), step(number))
    assert tau_of(method) == pytest.approx(0.01)


@pytest.mark.parametrize(("initial", "share"), [(0.05, 1.0), (0.02, 1 / 3)])
@pytest.mark.parametrize("variable", ["log", "tau"])
def test_learning_rate_falls_to_a_third_below_threshold(initial: float, share: float, variable: str) -> None:
    options = {"initial": initial, "lr": 1e-3, "schedule": "third_below_0.03", "rho": 100.0, "variable": variable}
    method = objective("fastclip_v3", Communicator(), 6, temperature=options)
    method(batch(*pairs(8, 6)), step(0))
    # Adam's first step equals the learning rate; a large rho lowers tau and raises theta
    moved = math.log(initial / tau_of(method)) if variable == "log" else initial - tau_of(method)
    assert moved == pytest.approx(1e-3 * share, rel=1e-4)


def test_tau_itself_descends_its_own_gradient() -> None:
    """SGD moves tau along autograd's gradient with respect to tau, within the bounds; saved states can be loaded."""
    image, text = pairs(17, 6)
    tau, rho, eps = torch.tensor(0.05, dtype=torch.float64), 6.5, 1e-6
    u = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
    gradient = float(oracle.robust_tau_gradient(image, text, tau, u, eps, rho))
    options = {"initial": 0.05, "rho": rho, "variable": "tau", "optimizer": "sgd", "lr": 1e-4, "schedule": "constant"}
    method = objective("fastclip_v3", Communicator(), 6, eps=eps, temperature=options)
    method(batch(image, text), step())
    assert tau_of(method) == pytest.approx(0.05 - 1e-4 * gradient, rel=1e-10)
    again = objective("fastclip_v3", Communicator(), 6, eps=eps, temperature={**options, "initial": 0.5})
    again.load_replicated_state(method.replicated_state())
    assert tau_of(again) == tau_of(method)
    with pytest.raises(UserError, match=r"learned with objective\.temperature\.variable=tau"):
        objective("fastclip_v3", Communicator(), 6).load_replicated_state(method.replicated_state())
    fast = objective("fastclip_v3", Communicator(), 6, eps=eps, temperature={**options, "lr": 10.0})
    fast(batch(image, text), step())
    assert tau_of(fast) == (0.01 if gradient > 0 else 1.0)


def test_encoder_schedule_scales_the_rate() -> None:
    options = {"lr": 1e-2, "rho": 100.0, "schedule": "encoder"}
    method = objective("fastclip_v3", Communicator(), 6, temperature=options)
    method(batch(*pairs(8, 6)), step(0, lr=2.5e-4))  # a quarter of the peak
    assert math.log(0.07 / tau_of(method)) == pytest.approx(2.5e-3, rel=1e-4)


def started(method: str, temperature: float | None, bias: float | None = None, **options: float) -> dict[str, float]:
    """Return the scalars in a new objective's state, given the temperature and the bias of the encoders' checkpoint."""
    tree = {"model": {"pretrained": "a checkpoint"}, "objective": {"method": method, "temperature": options}}
    config = Config.model_validate(tree)
    context = Context(4, 10, Communicator(), temperature=temperature, bias=bias)
    state = build_objective(config, context, torch.float32).replicated_state()
    return {name: float(value) for name, value in state.items() if value.numel() == 1}


def test_it_starts_from_the_config_else_from_the_checkpoint() -> None:
    assert started("tuneclip", 0.00851)["temperature.tau"] == pytest.approx(0.00851)
    assert started("openclip", 0.02)["temperature.theta"] == pytest.approx(-math.log(0.02))
    found = started("siglip", 0.02, -12.5)
    assert (found["theta"], found["bias"]) == (pytest.approx(-math.log(0.02)), -12.5)
    assert started("tuneclip", 0.01, initial=0.05)["temperature.tau"] == pytest.approx(0.05)
    assert started("openclip", 0.01, initial=0.05)["temperature.theta"] == pytest.approx(-math.log(0.05))
    rounded = math.exp(-4.6052)  # OpenAI's clamp, just beyond the bound
    assert started("openclip", rounded)["temperature.theta"] == pytest.approx(math.log(100))


@pytest.mark.parametrize(
    ("method", "temperature", "words"),
    [
        ("tuneclip", None, "has no logit_scale.*pass --objective.temperature.initial"),
        ("openclip", None, "has no logit_scale"),
        ("isogclr", None, "has no logit_scale"),
        ("openclip", 0.0085, r"temperature 0.0085 is outside \[minimum=0.01"),
        ("siglip", 0.02, "has no logit_bias.*pass --objective.siglip.bias"),
    ],
)
def test_what_the_checkpoint_lacks(method: str, temperature: float | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        started(method, temperature)


def test_a_constant_temperature_goes_with_the_checkpoint_of_the_run() -> None:
    saved = objective("tuneclip", Communicator(), 4, temperature={"initial": 0.02})
    resumed = objective("tuneclip", Communicator(), 4, temperature={"initial": 0.05})
    resumed.load_replicated_state(saved.replicated_state())
    assert float(resumed.replicated_state()["temperature.tau"]) == pytest.approx(0.02)


@pytest.mark.parametrize("name", ["lion", "sgd"])
@pytest.mark.parametrize("method", ["fastclip_v3", "siglip"])
def test_other_optimizers_of_tau(name: str, method: str) -> None:
    """A resumed run continues the optimizer's recurrence, and an undone step has no effect."""
    features, temperature = batch(*pairs(17, 6)), {"initial": 0.05, "lr": 1e-2, "optimizer": name, "rho": 6.5}
    kept = {"temperature": temperature} if method == "fastclip_v3" else {"temperature": temperature | {"rho": 0.0}}
    whole, first, second = (objective(method, Communicator(), 6, **kept) for _ in range(3))
    undo = first.restore_point()
    first(features, step())
    undo()
    for number in range(2):
        whole(features, step(number))
        first(features, step(number))
    second.load_replicated_state({key: value.clone() for key, value in first.replicated_state().items()})
    for number in range(2, 4):
        whole(features, step(number))
        second(features, step(number))
    initial = objective(method, Communicator(), 6, **kept).replicated_state()
    for key in initial:  # theta, and SigLIP's bias
        assert torch.equal(second.replicated_state()[key], whole.replicated_state()[key])
        assert not torch.allclose(whole.replicated_state()[key], initial[key], rtol=0, atol=1e-6), key


def test_lion_moves_log_tau_by_the_learning_rate() -> None:
    temperature = {"initial": 0.05, "lr": 1e-3, "optimizer": "lion", "rho": 6.5, "schedule": "constant"}
    method = objective("fastclip_v3", Communicator(), 6, temperature=temperature)
    method(batch(*pairs(17, 6)), step())
    assert abs(math.log(0.05 / tau_of(method))) == pytest.approx(1e-3, rel=1e-6)


def test_sgd_moves_log_tau_by_rate_and_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    temperature = {"initial": 0.05, "lr": 1e-4, "optimizer": "sgd", "rho": 6.5, "schedule": "constant"}
    method = objective("fastclip_v3", Communicator(), 6, temperature=temperature)
    rule, moves = method._temperature, []
    descend = rule.descend
    monkeypatch.setattr(rule, "descend", lambda at, theta: (moves.append(float(theta)), descend(at, theta=theta)))
    for number in range(2):
        method(batch(*pairs(17, 6, seed=number)), step(number))
    wanted = math.log(1 / 0.05) - 1e-4 * (moves[0] + (0.9 * moves[0] + moves[1]))
    assert math.log(1 / tau_of(method)) == pytest.approx(wanted, rel=1e-12)
