"""Check `undo`, which reverts the last training call."""

from collections.abc import Iterable
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from test_begin import local_features
from test_contrastive_loss import features, loss_of, state_of

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import Position
from neuclip_ds.losses.methods import METHODS

# every method, and the other kinds of networks and optimizers that have state
LOSSES = [*METHODS, "amorlip_seldom", "neuclip_adagrad", "neuclip_joint", "neuclip_mlp"]


def position(step: int) -> Position:
    return Position(step=step, epoch=step // 2, progress=step / 10, lr=1e-3, peak_lr=1e-3)


def undo_calls(communicator: Communicator, names: Iterable[str]) -> list[str]:
    """Undo a call of each loss, check that nothing of it is left, and return the names of the losses."""
    checked: list[str] = []
    for name in names:
        loss_fn = loss_of(name, undo=True)
        for step in range(3):
            loss_fn(*local_features(communicator, step), position=position(step))
        before = state_of(loss_fn)
        undone = loss_fn(*local_features(communicator, 2), position=position(3))
        assert not same_state(state_of(loss_fn), before), name
        with torch.no_grad():
            loss_fn(*local_features(communicator, 5))  # an evaluation does not count
        loss_fn.undo()
        assert same_state(state_of(loss_fn), before), name
        repeated = loss_fn(*local_features(communicator, 2), position=position(3))
        assert torch.equal(repeated, undone), name
        checked.append(name)
    return checked


def same_state(state: dict[str, object], other: dict[str, object]) -> bool:
    """Return whether two states are equal bit for bit, except for the count of calls, which undo does not change."""
    state = {**state, "calls": 0}
    other = {**other, "calls": 0}
    try:
        torch.testing.assert_close(state, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def test_undo_restores_all_state_of_every_loss() -> None:
    """The state includes prototypes, networks, queues, and statistics of samples that an earlier call contained."""
    assert undo_calls(Communicator(), LOSSES) == LOSSES
    assert run_ranks(2, undo_calls, LOSSES) == [LOSSES, LOSSES]


def test_undo_reverts_the_last_training_call_once() -> None:
    loss_fn = loss_of("fastclip_v3", undo=True)
    with pytest.raises(RuntimeError, match=r"build ContrastiveLoss with undo=True"):
        loss_fn.undo()
    loss_fn(*features(0))
    loss_fn.undo()
    with pytest.raises(RuntimeError, match="only once after each training call"):
        loss_fn.undo()


def test_a_call_that_was_not_completed_leaves_nothing_to_undo() -> None:
    loss_fn = loss_of("fastclip_v3", undo=True, dtype=torch.float64)
    image, text, index = features(0)
    loss_fn(image, text, index)
    before = state_of(loss_fn)
    loss_fn.begin(index)
    loss_fn.abandon()
    with pytest.raises(RuntimeError):
        loss_fn.undo()
    with patch.object(loss_fn, "function", wraps=loss_fn.function) as function:
        function.side_effect = MemoryError
        with pytest.raises(MemoryError):
            loss_fn(image, text, index)
    with pytest.raises(RuntimeError):
        loss_fn.undo()
    assert same_state(state_of(loss_fn), before)


def test_a_loss_without_undo_copies_nothing() -> None:
    loss_fn = loss_of("neuclip", dtype=torch.float64)
    with patch.object(loss_fn.function, "restore_point", side_effect=AssertionError):
        loss_fn(*features(0))
    with pytest.raises(RuntimeError, match=r"build ContrastiveLoss with undo=True"):
        loss_fn.undo()
