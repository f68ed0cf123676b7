"""Position embeddings that are fitted to another size, against the libraries and the paper's own positions."""

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor
from torch.nn.functional import interpolate

from neuclip_ds.errors import UserError
from neuclip_ds.models.positions import fit_context, fit_grid, fit_positions


def table(rows: int, width: int = 6) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def test_long_clip_keeps_twenty_and_quarters_the_others() -> None:
    """The positions of Long-CLIP for 77 to 248 tokens, one by one."""
    old = table(77)
    wanted = [old[i] for i in range(20)]
    for i in range(20, 76):
        wanted += [old[i] + (old[i + 1] - old[i]) * part / 4 for part in range(4)]
    wanted += [old[76] + (old[76] - old[75]) * part / 4 for part in range(4)]
    torch.testing.assert_close(fit_context(old, 248, "long_clip"), torch.stack(wanted))


def test_interpolation_is_open_clips() -> None:
    old = table(77)
    wanted = interpolate(old.T[None], size=128, mode="linear")[0].T
    torch.testing.assert_close(fit_context(old, 128, "interpolate"), wanted)


@pytest.mark.parametrize("stretch", ["interpolate", "long_clip"])
def test_fewer_tokens_take_the_first_positions(stretch: str) -> None:
    assert torch.equal(fit_context(table(77), 32, stretch), table(77)[:32])


def test_rows_that_are_no_positions_stay() -> None:
    old = table(34)
    fitted = fit_context(old, 66, "interpolate", special=2)
    assert torch.equal(fitted[:2], old[:2])
    torch.testing.assert_close(fitted[2:], fit_context(old[2:], 64, "interpolate"))


def test_long_clip_needs_more_than_twenty_positions() -> None:
    with pytest.raises(UserError, match="keeps the first 20 positions, but the text tower has 16"):
        fit_context(table(16), 32, "long_clip")


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_grid_is_resampled_behind_its_tokens(tokens: int) -> None:
    old = table(49 + tokens)
    fitted = fit_grid(old, 100 + tokens)
    assert torch.equal(fitted[:tokens], old[:tokens])
    torch.testing.assert_close(fitted, resample_abs_pos_embed(old[None], [10, 10], [7, 7], num_prefix_tokens=tokens)[0])
    assert fit_grid(old[None], 100 + tokens).shape == (1, 100 + tokens, 6)


def test_what_is_no_square_is_left_as_it_is() -> None:
    assert torch.equal(fit_grid(table(8), 12), table(8))


def test_only_position_embeddings_of_another_shape_change() -> None:
    tensors = {
        "visual.positional_embedding": table(17),
        "text.positional_embedding": table(16),
        "text.token_embedding.weight": table(300),
    }
    wanted = {name: torch.empty(rows, 6) for name, rows in zip(tensors, (37, 24, 301), strict=True)}
    fitted = fit_positions(tensors, wanted, "interpolate")
    assert [len(tensor) for tensor in fitted.values()] == [37, 24, 300]
