"""Check `autograd_loss`, which makes a loss from a function of the gathered features."""

from pathlib import Path

import oracle
import pytest
import torch
from build import build_loss, call, pairs, position, relative_error
from torch import Tensor

from neuclip_ds.losses import ContrastiveLoss, autograd_loss

TAU = torch.tensor(0.07, dtype=torch.float64)


def infonce(image: Tensor, text: Tensor, index: Tensor) -> Tensor:
    return oracle.openclip(image, text, TAU.to(image))


def test_infonce_by_autograd_equals_the_closed_form() -> None:
    """Compare training calls, with and without invalid rows that contain NaN, and an evaluation."""
    by_autograd = build_loss(autograd_loss(infonce))
    closed_form = build_loss("openclip", temperature={"lr": 0.0})
    for number, valid in enumerate((None, torch.arange(12) % 3 > 0)):
        image, text = pairs(12, 6, seed=number)
        if valid is not None:
            image[~valid] = torch.nan
        result = call(by_autograd, image, text, None, valid, at=position(number))
        expected = call(closed_form, image, text, None, valid, at=position(number))
        assert relative_error(result.loss, expected.loss) < 1e-10
        assert relative_error(result.image, expected.image) < 1e-10
        assert relative_error(result.text, expected.text) < 1e-10
        norm = result.metrics["feature_grad_norm"]
        assert relative_error(norm, expected.metrics["feature_grad_norm"]) < 1e-10
        with torch.no_grad():
            assert torch.equal(by_autograd(image, text, None, valid), result.loss)


def test_the_function_receives_the_indices_of_the_valid_rows() -> None:
    received = []

    def loss_of_samples(image: Tensor, text: Tensor, index: Tensor) -> Tensor:
        received.extend(index.tolist())
        return (image - text).square().sum()

    image, text = pairs(3, 6)
    loss_fn = build_loss(autograd_loss(loss_of_samples))
    result = call(loss_fn, image, text, torch.tensor([7, 3, 5]), torch.tensor([True, False, True]))
    assert received == [7, 5]
    torch.testing.assert_close(result.image, 2 * (image - text) * torch.tensor([[1.0], [0], [1]]))


def test_a_loss_that_ignores_a_modality_has_no_gradient_for_it() -> None:
    loss_fn = build_loss(autograd_loss(lambda image, text, index: image.sum()))
    result = call(loss_fn, *pairs(4, 6))
    assert (result.image == 1).all()
    assert not result.text.any()


def test_a_function_must_return_a_scalar() -> None:
    loss_fn = build_loss(autograd_loss(lambda image, text, index: (image * text).sum(dim=1)))
    with pytest.raises(TypeError, match=r"must be a scalar, but the function returned a tensor of shape \(4,\)"):
        call(loss_fn, *pairs(4, 6))


def test_it_is_saved_and_loaded_like_any_loss(tmp_path: Path) -> None:
    """There is no state but the number of calls, which gives the position in training."""

    def new_loss() -> ContrastiveLoss:
        return ContrastiveLoss(autograd_loss(infonce), dim=6, dtype=torch.float64)

    loss_fn = new_loss()
    image, text = pairs(4, 6)
    for _ in range(3):
        loss_fn(image.requires_grad_(), text.requires_grad_()).backward()
    loss_fn.save(tmp_path)
    loaded = new_loss()
    loaded.load(tmp_path)
    assert loaded.begin(torch.arange(4)[:0]).position.step == 3
    with_state_dict = new_loss()
    with_state_dict.load_state_dict(loss_fn.state_dict())
    assert with_state_dict.begin(torch.arange(4)[:0]).position.step == 3
    with_state_dict.abandon()
    assert torch.equal(with_state_dict.train()(image, text), loss_fn(image, text))
