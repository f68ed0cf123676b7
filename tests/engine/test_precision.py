"""The precision of float32 towers' matrix products on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from neuclip_ds.config import Config
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import set_matmul_precision

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = MATMUL.allow_tf32
    yield
    MATMUL.allow_tf32 = before


def config(deepspeed: str, **model: str) -> Config:
    return Config.model_validate({"deepspeed": deepspeed, "model": model})


@pytest.mark.parametrize(("options", "tf32"), [({}, True), ({"matmul_precision": "float32"}, False)])
def test_it_is_set_and_logged_on_a_gpu(options: dict[str, str], tf32: bool, caplog: pytest.LogCaptureFixture) -> None:
    MATMUL.allow_tf32 = not tf32
    tried = config("zero1_fp32", **options)
    with caplog.at_level(logging.INFO):
        set_matmul_precision(tried, load_engine_config(tried, 1), torch.device("cuda"))
    assert MATMUL.allow_tf32 == tf32
    assert f"matrix products in {tried.model.matmul_precision} (model.matmul_precision)" in caplog.text


@pytest.mark.parametrize(("deepspeed", "device"), [("zero1_fp32", "cpu"), ("zero1_bf16", "cuda")])
def test_nothing_is_set_without_a_gpu_or_for_bf16(
    deepspeed: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, tried = MATMUL.allow_tf32, config(deepspeed)
    with caplog.at_level(logging.INFO):
        set_matmul_precision(tried, load_engine_config(tried, 1), torch.device(device))
    assert MATMUL.allow_tf32 == before
    assert not caplog.text
