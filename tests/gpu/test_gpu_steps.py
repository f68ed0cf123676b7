"""Compare steps on GPUs with steps on the CPU: all methods, DeepSpeed files and optimizers, and compiled towers.

The tests also check that a step waits for the GPU once and that its peak memory is as estimated. `make test-gpu` runs
the tests on GPUs, or on the CPU if there are none.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import test_loss_ranks
import test_optimizers
import torch
from benchmarking.synthetic_profile import SyntheticSteps
from build import STILL, VARIANTS, build_loss, call, pairs, position, relative_error
from ranks import run_ranks
from test_non_finite import check, gradient
from test_packing import built, captions_of, clip_tower, features_and_gradients
from test_step import ROWS, plain, under_deepspeed

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import FOLDER
from neuclip_ds.planning.memory import MemoryQuery, account, count_towers
from neuclip_ds.recipe import parse
from neuclip_ds.section import merge

pytestmark = pytest.mark.gpu
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))
FLOAT32 = [name for name in FILES if "fp32" in name]
# after five AdamW steps of size 1e-3; bf16 has 8 bits of precision
TOLERANCE = {
    "fp32": {"rtol": 0, "atol": 1e-4},
    "bf16": {"rtol": 2**-7, "atol": 1.2e-2},
}


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_on_the_device_is_float64_on_the_cpu(name: str, device: str) -> None:
    """Compare the loss and the gradients of two steps, with options that avoid inner optimizers."""
    method, options = VARIANTS[name]
    options = merge(options, STILL.get(method, {}))
    float32_loss = build_loss(method, Communicator(device), 6, torch.float32, **options)
    float64_loss = build_loss(method, Communicator(), 6, torch.float64, **options)
    for number in range(2):
        image, text = pairs(48, 6, seed=number)
        at = position(number, lr=0.0)
        float32_result = call(float32_loss, image.to(device, torch.float32), text.to(device, torch.float32), at=at)
        float64_result = call(float64_loss, image, text, at=at)
        for name in ("loss", "image", "text"):
            value = getattr(float32_result, name).cpu().double()
            assert relative_error(value, getattr(float64_result, name)) < 1e-4, name


def test_every_loss_on_ranks_equals_one_rank_on_the_cpu(ranks: int, device: str) -> None:
    """Compare gradients, losses, temperatures and per-sample statistics of five float64 steps."""
    test_loss_ranks.check_ranks(run_ranks(ranks, test_loss_ranks.train, 5, device=device))


def check_weights(method: str, files: list[str], passes: int, ranks: int, device: str, **options: Any) -> None:
    """Check that the weights after five steps match those of plain PyTorch on the CPU."""
    wanted, tau = plain(method, clip=0.5)
    for rank in run_ranks(ranks, under_deepspeed, method, files, ROWS // ranks // passes, options, device=device):
        for name, (weights, rank_tau) in zip(files, rank, strict=True):
            precision = name.split("_")[1]
            assert rank_tau == pytest.approx(tau, rel=1e-4 if precision == "fp32" else 1e-2), name
            for key, value in weights.items():
                torch.testing.assert_close(value, wanted[key], **TOLERANCE[precision], msg=f"{name} {key}")


@pytest.mark.parametrize("passes", [1, 2])
def test_every_deepspeed_file_trains_the_weights_of_plain_pytorch(passes: int, ranks: int, device: str) -> None:
    check_weights("openclip", FILES, passes, ranks, device)


@pytest.mark.parametrize("passes", [1, 2])
def test_every_deepspeed_file_trains_on_packed_captions(passes: int, device: str) -> None:
    check_weights("openclip", FILES, passes, 1, device, model={"text": {"packed": True}})


def test_packed_captions_in_bf16_are_padded_captions(device: str) -> None:
    """On a GPU, attention to packed captions uses a different kernel from attention to padded captions."""
    tower = built(clip_tower).to(device, torch.bfloat16)
    tokens = captions_of([1, 3, 14, 6, 20, 20, 0]).to(device)
    tower.packed = False
    features, *gradients = features_and_gradients(tower, tokens).values()
    tower.packed = True
    packed_features, *packed_gradients = features_and_gradients(tower, tokens).values()
    assert relative_error(packed_features.double(), features.double()) < 0.02
    expected = torch.cat([gradient.double().flatten() for gradient in gradients])
    packed = torch.cat([gradient.double().flatten() for gradient in packed_gradients])
    assert relative_error(packed, expected) < 0.05


@pytest.mark.parametrize("method", ["fastclip_v3", "neuclip"])
def test_losses_with_state_train_the_weights_of_plain_pytorch(method: str, ranks: int, device: str) -> None:
    check_weights(method, FLOAT32, 2, ranks, device)


def test_compiled_towers_have_the_weights_of_plain_pytorch(device: str) -> None:
    check_weights("openclip", ["zero1_fp32"], 1, 1, device, model={"compile": True})


@pytest.mark.parametrize(("precision", "atol"), [("fp32", 1e-4), ("bf16", 0.03)])
def test_every_optimizer_takes_the_steps_of_plain_pytorch(precision: str, atol: float, ranks: int, device: str) -> None:
    stages = [f"zero{stage}_{precision}" for stage in range(4)]
    for results in run_ranks(ranks, test_optimizers.under_zero, stages, device=device):
        for (name, engine), (weights, _) in results.items():
            for value, wanted in zip(weights, test_optimizers.plain(name), strict=True):
                torch.testing.assert_close(value, wanted, rtol=0, atol=atol, msg=f"{name} {engine}")


def test_a_gradient_that_overflows_is_skipped(device: str) -> None:
    files = [f"zero{stage}_{precision}" for stage in range(3) for precision in ("bf16", "fp32")]
    check([("openclip", name, ROWS, gradient) for name in files], ranks=1, device=device)


def needs_gpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("measured on a GPU alone; tests/gpu_ready has a simulated one")


def waits(communicator: Communicator, options: list[str]) -> list[str]:
    """Return the name of the file that causes each wait for the GPU in the fourth step."""
    steps = SyntheticSteps(parse(options).config, communicator)
    for number in range(3):
        steps.run(number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        steps.run(3)
        torch.cuda.set_sync_debug_mode("default")
    return [warning.filename for warning in caught if "synchronizing" in str(warning.message)]


@pytest.mark.parametrize("method", ["openclip", "isogclr", "neuclip"])
def test_a_step_waits_once(method: str, device: str) -> None:
    needs_gpu(device)
    options = ["demo", f"--objective.method={method}", "--data.batch_size=256", "--data.micro_batch=128"]
    (files,) = run_ranks(1, waits, [*options, "--deepspeed=zero1_bf16"], device=device)
    assert [Path(name).name for name in files if "neuclip_ds" in name] == ["engine.py"], files


def peak(communicator: Communicator, options: list[str]) -> tuple[int, int]:
    """Return the measured peak memory of two steps and the estimated peak, in bytes."""
    query = MemoryQuery(parse(options).config, communicator.world_size, samples=10**6)
    steps = SyntheticSteps(query.config, communicator)
    torch.cuda.reset_peak_memory_stats()
    for number in range(2):
        steps.run(number)
    return torch.cuda.max_memory_allocated(), account(query, count_towers(query)).peak


@pytest.mark.parametrize("passes", [1, 2])
def test_the_peak_memory_is_as_estimated(passes: int, device: str) -> None:
    needs_gpu(device)
    options = ["models/vitb32", "--objective.method=openclip", "--data.batch_size=512", "--deepspeed=zero1_bf16"]
    ((measured, planned),) = run_ranks(1, peak, [*options, f"--data.micro_batch={512 // passes}"], device=device)
    assert measured == pytest.approx(planned, rel=0.1)
