"""TF32 products of features that have travelled in bf16 add little to what bf16 has rounded away already."""

from __future__ import annotations

import pytest
from benchmark_products import errors
from benchmarking import random_features

from neuclip_ds.distributed.communicator import Communicator


@pytest.mark.parametrize("tau", [0.07, 0.01])
@pytest.mark.parametrize("kind", ["random", "matched", "collapsed", "opposed"])
@pytest.mark.parametrize("method", ["openclip", "fastclip_v3"])
def test_error_of_tf32(method: str, kind: str, tau: float) -> None:
    found = errors(random_features(128, 64, Communicator(), kind), method, tau)
    of_features, _ = found["bfloat16", "float32 | float32"]
    for rounding in ("nearest", "towards zero"):
        error, added = found["bfloat16", f"TF32, {rounding} | TF32, {rounding}"]
        assert added < 0.3 * of_features
        assert error < 1.1 * of_features
    assert found["float32", "float32 | float32"][0] < 1e-4 < of_features
