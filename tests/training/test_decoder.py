"""A run keeps the decoder that it was started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import train
from tars import write_pairs

from neuclip_ds.checkpoint.integrity import read_meta
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


@pytest.mark.slow
def test_a_run_resumes_with_its_decoder_and_refuses_another(tmp_path: Path) -> None:
    data = str(write_pairs(tmp_path / "shards", [13, 13]))
    assert train(tmp_path, data, 1, "--data.decoder=torchvision").returncode == 0
    refused = train(tmp_path, data, 2, "--data.decoder=pil")
    assert refused.returncode == 2
    assert "was written with decoder=torchvision, but this run has decoder=pil: set it back" in refused.stderr
    assert train(tmp_path, data, 2).returncode == 0
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*2")
    assert read_meta(checkpoint)["facts"]["decoder"] == "torchvision"
    assert "decoder: torchvision" in (tmp_path / "run" / "config.yaml").read_text()
