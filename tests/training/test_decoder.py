"""A run keeps the decoder that it was started with."""

from __future__ import annotations

import pytest

from neuclip_ds.config import Config
from neuclip_ds.data.decoders import DECODERS, DEFAULT
from neuclip_ds.training.data_order import SavedOrder
from neuclip_ds.training.decoder import with_decoder
from neuclip_ds.training.trainer import fingerprint


def config(decoder: str | None = None) -> Config:
    return Config.model_validate({"data": {"decoder": decoder}})


def test_a_new_run_takes_the_default_and_keeps_it_in_its_fingerprint() -> None:
    chosen = with_decoder(config(), None)
    assert chosen.data.decoder == DEFAULT == "simplejpeg"
    facts = fingerprint(chosen)
    assert facts["decoder"] == "simplejpeg"
    assert "decoder" not in fingerprint(config()), "what is not chosen is not compared"
    assert with_decoder(config(), SavedOrder({"decoder": "torchvision"}, 1)).data.decoder == "torchvision"


def test_a_run_of_an_earlier_version_goes_on_with_pil() -> None:
    assert with_decoder(config(), SavedOrder({}, 1)).data.decoder == "pil"


@pytest.mark.parametrize("saved", [None, SavedOrder({}, 1)])
@pytest.mark.parametrize("name", DECODERS)
def test_a_named_decoder_is_taken(name: str, saved: SavedOrder | None) -> None:
    assert with_decoder(config(name), saved).data.decoder == name
