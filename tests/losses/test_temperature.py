"""Check the temperature's gradients against autograd, and check its schedule, bounds and initial value."""

import math

import oracle
import pytest
import torch
from build import (
    NO_MOMENTUM,
    SAMPLES,
    build_loss,
    call,
    pairs,
    position,
    relative_error,
    replicated_state,
    scalar_gradients,
    table_rows,
)

from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss


@pytest.mark.parametrize(("reference", "factor"), [("paper", 1), ("released_code", 2)])
def test_fastclip_v3s_code_counts_the_data_term_of_its_gradient_twice(reference: str, factor: int) -> None:
    image, text = pairs(17, 6)
    tau = torch.tensor(0.05, dtype=torch.float64)
    rho = 6.5
    eps = 1e-6
    u = oracle.mean_exponentials(image, text, tau)
    tau_term = float(torch.log(eps + u).mean(1).sum() + 2 * rho)
    data_term = float(oracle.robust_tau_gradient(image, text, tau, u, eps, rho)) - tau_term
    options = {"initial": 0.05, "rho": rho}
    loss_fn = build_loss("fastclip_v3", betas=NO_MOMENTUM, eps=eps, temperature=options, reference=reference)
    call(loss_fn, image, text)
    expected = -0.05 * (tau_term + factor * data_term)
    assert float(scalar_gradients(loss_fn)["theta"]) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("reading", ["stop", "full", "positive"])
def test_neuclip_without_rho_descends_half_the_conjugate(reading: str) -> None:
    """The loss is half the conjugate with eps = 1/(n-1), plus a constant; rho and eps in the config are ignored."""
    image, text = (x.requires_grad_() for x in pairs(17, 6))
    npn = {"prototypes": 17, "inner_steps": 3, "lr": 0.05, "alpha_grad": reading}
    temperature = {"rule": "learned", "rho": 3.0, "lr": 0.0}
    loss_fn = build_loss("neuclip", betas=NO_MOMENTUM, npn=npn, temperature=temperature)
    call(loss_fn, *pairs(17, 6, seed=5))
    result = call(loss_fn, image, text, at=position(1))
    prototypes = table_rows(loss_fn, "npn")
    theta = torch.tensor(-math.log(0.07), dtype=torch.float64, requires_grad=True)
    tau = (-theta).exp()
    eps = 1 / (SAMPLES - 1)
    alpha = oracle.alphas(image, text, tau, prototypes["w1"], prototypes["w2"], eps)
    loss = oracle.conjugate(image, text, tau, alpha, eps, reading) / 2
    image_gradient, text_gradient, theta_gradient = torch.autograd.grad(loss, (image, text, theta))
    assert relative_error(result.image, image_gradient) < 1e-10
    assert relative_error(result.text, text_gradient) < 1e-10
    assert float(scalar_gradients(loss_fn)["theta"]) == pytest.approx(float(theta_gradient), rel=1e-10)
    assert float(result.loss) == pytest.approx(float(loss.detach()) + math.log(SAMPLES - 1), rel=1e-10)


def test_methods_with_one_rule_refuse_another() -> None:
    with pytest.raises(
        UserError,
        match=r"method=fastclip_v3 does not use objective\.temperature\.rule=learned; these methods do: neuclip",
    ):
        build_loss("fastclip_v3", temperature={"rule": "learned"})


def test_a_loss_without_rho_needs_the_size_of_the_data_set() -> None:
    with pytest.raises(UserError, match="which is unknown: pass samples=n"):
        ContrastiveLoss("neuclip", dim=6, temperature={"rule": "learned"})


def test_clamp_holds_openclip_at_one_hundred() -> None:
    loss_fn = build_loss("openclip", temperature={"initial": 0.0101, "lr": 1.0})
    image, text = pairs(8, 6, likeness=100.0)  # all pairs are solved, so the loss lowers tau
    for number in range(3):
        call(loss_fn, image, text, at=position(number))
    assert loss_fn.temperature == pytest.approx(0.01)


@pytest.mark.parametrize(("initial", "share"), [(0.05, 1.0), (0.02, 1 / 3)])
@pytest.mark.parametrize("variable", ["log", "tau"])
def test_learning_rate_falls_to_a_third_below_threshold(initial: float, share: float, variable: str) -> None:
    options = {"initial": initial, "lr": 1e-3, "schedule": "third_below_0.03", "rho": 100.0, "variable": variable}
    loss_fn = build_loss("fastclip_v3", temperature=options)
    call(loss_fn, *pairs(8, 6))
    # Adam's first step equals the learning rate; a large rho lowers tau and raises theta
    change = math.log(initial / loss_fn.temperature) if variable == "log" else initial - loss_fn.temperature
    assert change == pytest.approx(1e-3 * share, rel=1e-4)


def test_tau_itself_descends_its_own_gradient() -> None:
    """SGD moves tau along autograd's gradient with respect to tau, within the bounds; saved states can be loaded."""
    image, text = pairs(17, 6)
    tau = torch.tensor(0.05, dtype=torch.float64)
    rho = 6.5
    eps = 1e-6
    u = oracle.mean_exponentials(image, text, tau)
    gradient = float(oracle.robust_tau_gradient(image, text, tau, u, eps, rho))
    options = {"initial": 0.05, "rho": rho, "variable": "tau", "optimizer": "sgd", "lr": 1e-4, "schedule": "constant"}
    loss_fn = build_loss("fastclip_v3", eps=eps, temperature=options)
    call(loss_fn, image, text)
    assert loss_fn.temperature == pytest.approx(0.05 - 1e-4 * gradient, rel=1e-10)
    loaded = build_loss("fastclip_v3", eps=eps, temperature={**options, "initial": 0.5})
    loaded.function.load_replicated_state(replicated_state(loss_fn))
    assert loaded.temperature == loss_fn.temperature
    with pytest.raises(UserError, match=r"learned with objective\.temperature\.variable=tau"):
        build_loss("fastclip_v3").function.load_replicated_state(replicated_state(loss_fn))
    fast = build_loss("fastclip_v3", eps=eps, temperature={**options, "lr": 10.0})
    call(fast, image, text)
    assert fast.temperature == (0.01 if gradient > 0 else 1.0)


def test_encoder_schedule_scales_the_rate() -> None:
    options = {"lr": 1e-2, "rho": 100.0, "schedule": "encoder"}
    loss_fn = build_loss("fastclip_v3", temperature=options)
    call(loss_fn, *pairs(8, 6), at=position(0, lr=2.5e-4))  # a quarter of the peak
    assert math.log(0.07 / loss_fn.temperature) == pytest.approx(2.5e-3, rel=1e-4)


def initial_scalars(
    method: str, temperature: float | None, bias: float | None = None, **options: float
) -> dict[str, float]:
    """Return the scalars in a new loss's state, given the temperature and the bias of the encoders' checkpoint."""
    config = Config.model_validate(
        {"model": {"pretrained": "a checkpoint"}, "objective": {"method": method, "temperature": options}}
    )
    loss_fn = build_loss(config.objective, dtype=torch.float32, encoder_temperature=temperature, encoder_bias=bias)
    return {name: float(value) for name, value in replicated_state(loss_fn).items() if value.numel() == 1}


def test_a_temperature_starts_from_the_config_else_from_the_checkpoint() -> None:
    assert initial_scalars("tuneclip", 0.00851)["temperature.tau"] == pytest.approx(0.00851)
    assert initial_scalars("openclip", 0.02)["temperature.theta"] == pytest.approx(-math.log(0.02))
    scalars = initial_scalars("siglip", 0.02, -12.5)
    assert scalars["theta"] == pytest.approx(-math.log(0.02))
    assert scalars["bias"] == -12.5
    assert initial_scalars("tuneclip", 0.01, initial=0.05)["temperature.tau"] == pytest.approx(0.05)
    assert initial_scalars("openclip", 0.01, initial=0.05)["temperature.theta"] == pytest.approx(-math.log(0.05))
    rounded = math.exp(-4.6052)  # OpenAI's clamp, just beyond the bound
    assert initial_scalars("openclip", rounded)["temperature.theta"] == pytest.approx(math.log(100))


@pytest.mark.parametrize(
    ("method", "temperature", "words"),
    [
        ("tuneclip", None, "has no logit_scale.*set objective.temperature.initial"),
        ("openclip", None, "has no logit_scale"),
        ("isogclr", None, "has no logit_scale"),
        ("openclip", 0.0085, r"temperature 0.0085 is outside \[minimum=0.01"),
        ("siglip", 0.02, "has no logit_bias.*set objective.siglip.bias"),
    ],
)
def test_an_error_names_the_option_that_the_checkpoint_lacks(
    method: str, temperature: float | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        initial_scalars(method, temperature)


def test_a_constant_temperature_goes_with_the_checkpoint_of_the_run() -> None:
    saved = build_loss("tuneclip", dim=4, temperature={"initial": 0.02})
    resumed = build_loss("tuneclip", dim=4, temperature={"initial": 0.05})
    resumed.function.load_replicated_state(replicated_state(saved))
    assert resumed.temperature == pytest.approx(0.02)


@pytest.mark.parametrize("optimizer", ["lion", "sgd"])
@pytest.mark.parametrize("method", ["fastclip_v3", "siglip"])
def test_other_optimizers_of_tau_resume_and_undo(method: str, optimizer: str) -> None:
    """A resumed run continues the optimizer's recurrence, and an undone step has no effect."""
    image, text = pairs(17, 6)
    rho = 6.5 if method == "fastclip_v3" else 0.0
    temperature = {"initial": 0.05, "lr": 1e-2, "optimizer": optimizer, "rho": rho}
    uninterrupted = build_loss(method, temperature=temperature)
    interrupted = build_loss(method, temperature=temperature)
    resumed = build_loss(method, temperature=temperature)
    initial = replicated_state(resumed)
    call(interrupted, image, text)
    interrupted.undo()
    for number in range(2):
        call(uninterrupted, image, text, at=position(number))
        call(interrupted, image, text, at=position(number))
    resumed.function.load_replicated_state(replicated_state(interrupted))
    for number in range(2, 4):
        call(uninterrupted, image, text, at=position(number))
        call(resumed, image, text, at=position(number))
    expected = replicated_state(uninterrupted)
    for key in initial:  # theta, and SigLIP's bias
        assert torch.equal(replicated_state(resumed)[key], expected[key])
        assert not torch.allclose(expected[key], initial[key], rtol=0, atol=1e-6), key


def test_lion_moves_log_tau_by_the_learning_rate() -> None:
    temperature = {"initial": 0.05, "lr": 1e-3, "optimizer": "lion", "rho": 6.5, "schedule": "constant"}
    loss_fn = build_loss("fastclip_v3", temperature=temperature)
    call(loss_fn, *pairs(17, 6))
    assert abs(math.log(0.05 / loss_fn.temperature)) == pytest.approx(1e-3, rel=1e-6)


def test_sgd_moves_log_tau_by_rate_and_momentum() -> None:
    options = {"rho": 6.5, "schedule": "constant"}

    def gradient(tau: float, seed: int) -> float:
        loss_fn = build_loss("fastclip_v3", betas=NO_MOMENTUM, temperature={**options, "initial": tau, "lr": 0.0})
        call(loss_fn, *pairs(17, 6, seed=seed))
        return float(scalar_gradients(loss_fn)["theta"])

    loss_fn = build_loss("fastclip_v3", temperature={**options, "initial": 0.05, "optimizer": "sgd", "lr": 1e-4})
    gradients = []
    for number in range(2):
        gradients.append(gradient(loss_fn.temperature, seed=number))
        call(loss_fn, *pairs(17, 6, seed=number), torch.arange(17) + 17 * number, at=position(number))
    momentum = 0.9 * gradients[0] + gradients[1]
    expected = math.log(1 / 0.05) - 1e-4 * (gradients[0] + momentum)
    assert math.log(1 / loss_fn.temperature) == pytest.approx(expected, rel=1e-12)
