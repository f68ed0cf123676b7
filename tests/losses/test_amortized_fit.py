"""Check AmorLIP's stage I: nets, targets and schedule by hand, and fitting losses by autograd of their formulas."""

import oracle
import pytest
import torch
from amortization import DIM, EXACT, MLP, TAU, UNCLIPPED, Net, amorlip, log_partition, net_of, predict
from build import call, pairs, position, relative_error, replicated_state
from torch import Tensor

from neuclip_ds.losses.amorlip import previous_weight
from neuclip_ds.losses.amorlip_options import AmortizedConfig
from neuclip_ds.losses.amortization_mlp import AmortizationMlp


@pytest.mark.parametrize("width", [0.5, 1.0, 2.0])
def test_a_draw_is_torchs_and_a_function_of_its_seed(width: float) -> None:
    mlp = AmortizationMlp(64, int(64 * width))
    before = torch.random.get_rng_state()
    flat = mlp.draw(3)
    assert torch.equal(torch.random.get_rng_state(), before), "the program's own random numbers are left alone"
    assert torch.equal(flat, mlp.draw(3))
    assert not torch.equal(flat, mlp.draw(4))
    w = mlp.weights(flat)
    for part, inputs in ((w.up, 64), (w.up_bias, 64), (w.down, 64 * width), (w.down_bias, 64 * width), (w.out, 64)):
        bound = inputs**-0.5
        assert float(part.abs().max()) <= bound
        assert float(part.std()) == pytest.approx(bound / 3**0.5, rel=0.2)
    assert (w.up_gain == 1).all()
    assert not w.down_shift.any()
    assert not torch.equal(w.up[0], w.up[1])


def test_the_net_is_the_specified_one() -> None:
    flat = torch.randn(MLP.size, dtype=torch.float64)
    image, text = pairs(9, DIM)
    outputs = MLP(flat, torch.stack([image, text]))
    torch.testing.assert_close(outputs, predict(flat, image, text), rtol=1e-12, atol=1e-12)
    assert MLP.size == 2 * sum(p.numel() for p in Net(flat, 0).parameters())


def test_the_weight_of_the_previous_net_rises_along_a_half_cosine() -> None:
    config = AmortizedConfig(previous_weight=0.8, previous_epochs=16)
    weights = [previous_weight(epoch, config) for epoch in (0, 4, 8, 16, 40)]
    assert weights == pytest.approx([0.0, 0.4 * (1 - 0.5**0.5), 0.4, 0.8, 0.8])
    assert previous_weight(0, AmortizedConfig(previous_weight=0.3, previous_epochs=0)) == 0.3


def test_the_second_epochs_target_holds_a_part_of_the_last_nets_answer() -> None:
    """The target is Z = (1 - beta) C + beta lambda', in the linear domain; the encoders' loss uses Z as normalizer."""
    loss_fn = amorlip(encoder_normalizer="combined", previous_weight=0.6, previous_epochs=2, positive_weight=1e-3)
    call(loss_fn, *pairs(9, DIM, seed=1), at=position(0, epoch=0))
    last_net = net_of(loss_fn, "target")
    image, text = (x.requires_grad_() for x in pairs(9, DIM, seed=2))
    result = call(loss_fn, image, text, at=position(1, epoch=1))
    beta = 0.6 / 2  # in the second of two epochs
    z = (1 - beta) * log_partition(image, text, TAU, 1e-3).exp() + beta * predict(last_net, image, text).exp()
    tau = torch.tensor(TAU, dtype=torch.float64)
    expected_loss = oracle.amorlip(image, text, tau, z.log(), 1e-3, 0.0)
    image_gradient, text_gradient = torch.autograd.grad(expected_loss, (image, text))
    assert relative_error(result.image, image_gradient) < EXACT
    assert relative_error(result.text, text_gradient) < EXACT
    assert torch.equal(net_of(loss_fn, "previous"), last_net)


def written_out(name: str, log_lambda: Tensor, log_target: Tensor, scores: Tensor, c: float, scale: str) -> Tensor:
    """Return one direction's loss over the B x B pairs: AmorLIP eq. 8-10, or with the released code's scale."""
    size = len(scores)
    is_released = scale == "released_code"
    half = 1 if is_released else 1 / 2
    over = size**2 if is_released else size
    error = half * (log_lambda - log_target).square().mean()
    exponentials = scores.exp() * (1 + (c - 1) * torch.eye(size).to(scores)) / (size - 1)
    p, q = (exponentials / x.exp().unsqueeze(1) for x in (log_lambda, log_target))
    if name == "l2_log":
        return error
    if name == "kl":
        return (p.sum(1) * (log_target - log_lambda)).sum() / over + 0.1 * error
    p = p[exponentials > 0]
    q = q[exponentials > 0]
    m = (p + q) / 2
    return (torch.xlogy(p, p / m).sum() + torch.xlogy(q, q / m).sum()) / (2 * over) + 0.1 * error


def of_both_directions(
    name: str, log_lambda: Tensor, log_target: Tensor, scores: Tensor, c: float, scale: str
) -> Tensor:
    of_images = written_out(name, log_lambda[0], log_target[0], scores, c, scale)
    of_texts = written_out(name, log_lambda[1], log_target[1], scores.T, c, scale)
    return of_images + of_texts


@pytest.mark.parametrize("name", ["l2_log", "kl", "js"])
@pytest.mark.parametrize("scale", ["paper", "released_code"])
@pytest.mark.parametrize(
    ("clip", "c", "amortizes"),
    [(UNCLIPPED, 1.0, "partition"), (UNCLIPPED, 1.0, "negatives"), (0.0, 1e-3, "partition"), (0.01, 1.0, "partition")],
)
def test_updates_are_adam_on_the_written_out_loss(name: str, scale: str, clip: float, c: float, amortizes: str) -> None:
    image, text = pairs(11, DIM)
    fitted = c if amortizes == "partition" else 0.0
    log_target = log_partition(image, text, TAU, fitted)
    drawn = MLP.draw(0).double()
    nets = [Net(drawn, direction) for direction in (0, 1)]
    weights = [p for net in nets for p in net.parameters()]
    adam = torch.optim.Adam(weights, lr=1e-2)
    for _ in range(3):
        adam.zero_grad()
        log_lambda = torch.stack([net(x) for net, x in zip(nets, (image, text), strict=True)])
        of_both_directions(name, log_lambda, log_target, image @ text.T / TAU, fitted, scale).backward()
        norm = torch.stack([p.grad.norm() for p in weights]).norm()  # type: ignore[union-attr]
        for p in weights:
            p.grad.mul_(min(1.0, clip / float(norm)) if clip else 1.0)  # type: ignore[union-attr]
        adam.step()
    options = {"inner_steps": 3, "lr": 1e-2, "max_grad_norm": clip, "positive_weight": c}
    loss_fn = amorlip(loss=name, common={"reference": scale}, amortizes=amortizes, **options)
    # start from a random level: if the mean error is zero, Adam turns rounding errors into steps
    start = {"epoch": torch.tensor(0), "online": drawn, "target": drawn}
    initial_state = {f"normalizer.{key}": value for key, value in start.items()}
    loss_fn.function.load_replicated_state(replicated_state(loss_fn) | initial_state)
    call(loss_fn, image, text)
    w = MLP.weights(net_of(loss_fn, "online"))
    for direction, net in enumerate(nets):
        assert relative_error(w.up[direction].T, net.up.weight.detach()) < EXACT
        assert relative_error(w.down[direction].T, net.down.weight.detach()) < EXACT
        assert relative_error(w.out[direction].T, net.out.weight.detach()) < EXACT


@pytest.mark.parametrize(
    ("online_every", "target_every", "epoch_steps"), [(1, 1, None), (1, 2, None), (3, 2, None), (3, 2, 5)]
)
def test_nets_are_fitted_and_followed_at_intervals_from_the_epochs_first_step(
    online_every: int, target_every: int, epoch_steps: int | None
) -> None:
    """The target moves by 1 - ema toward the same step's online net.

    With `epoch_steps`, the data's epochs are ignored.
    """
    options = {"online_every": online_every, "target_every": target_every}
    loss_fn = amorlip(inner_steps=2, ema=0.75, lr=0.05, common={"epoch_steps": epoch_steps}, **options)
    for number in range(9):
        epoch, within = divmod(number, 5)
        online_before = net_of(loss_fn, "online")
        target_before = net_of(loss_fn, "target")
        at = position(number, epoch=epoch if epoch_steps is None else 7)
        call(loss_fn, *pairs(9, DIM, seed=number), at=at)
        online = net_of(loss_fn, "online")
        target = net_of(loss_fn, "target")
        assert int(net_of(loss_fn, "adam.step")) == 2 * (within // online_every + 1)
        if within:
            assert torch.equal(online, online_before) == bool(within % online_every)
            expected = target_before if within % target_every else 0.75 * target_before + 0.25 * online
            torch.testing.assert_close(target, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reference", ["paper", "released_code"])
def test_an_epoch_starts_with_new_nets(reference: str) -> None:
    """The epoch number seeds the new nets; with `paper`, their mean output is then set to the batch's mean log C."""
    loss_fn = amorlip(common={"reference": reference}, previous_weight=0.0, inner_steps=0)
    for number in range(3):
        call(loss_fn, *pairs(9, DIM, seed=number), at=position(number, epoch=0))
    image, text = pairs(9, DIM, seed=7)
    call(loss_fn, image, text, at=position(3, epoch=1))
    online = net_of(loss_fn, "online")
    drawn = MLP.draw(1).double()
    assert torch.equal(online, net_of(loss_fn, "target"))
    assert torch.equal(online[:-2], drawn[:-2])
    assert torch.equal(online[-2:], drawn[-2:]) == (reference == "released_code")
    if reference == "paper":
        gap = predict(online, image, text) - log_partition(image, text, TAU, 1.0)
        torch.testing.assert_close(gap.mean(1), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
