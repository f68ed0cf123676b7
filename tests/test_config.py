"""How a global batch is cut over ranks and micro-batches, and how many options there are."""

from pathlib import Path

import pytest

from neuclip_ds import cli
from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import option_fields


def config(batch_size: int, micro_batch: int | None = None) -> Config:
    return Config.model_validate({"data": {"batch_size": batch_size, "micro_batch": micro_batch}})


def test_shares() -> None:
    assert config(96).rank_batch(4) == 24
    assert config(96).micro_batch(4) == 24
    assert config(96, 8).micro_batch(4) == 8


@pytest.mark.parametrize(
    ("batch_size", "world_size", "fix"), [(255, 2, "use 254 or 256"), (3, 4, "use 4 or 4"), (10, 4, "use 8 or 12")]
)
def test_batch_that_ranks_do_not_divide(batch_size: int, world_size: int, fix: str) -> None:
    with pytest.raises(UserError, match=f"not divisible by the {world_size} ranks; {fix}"):
        config(batch_size).rank_batch(world_size)


@pytest.mark.parametrize(("micro_batch", "fix"), [(10, 8), (25, 24), (1000, 24)])
def test_micro_batch_that_does_not_divide(micro_batch: int, fix: int) -> None:
    with pytest.raises(UserError, match=rf"does not divide the rank's batch of 24 .*; use {fix}\."):
        config(96, micro_batch).micro_batch(4)


def test_options_stay_few() -> None:
    """Each option is one more thing to know: a new one should replace another."""
    assert len(dict(option_fields(Config))) <= 140
    assert sum(file.read_text().count(".add_argument(") for file in Path(cli.__file__).parent.glob("*.py")) <= 80
