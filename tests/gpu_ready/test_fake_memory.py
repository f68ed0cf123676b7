"""Compare the estimated peak memory with that of real steps on the simulated GPU: engine, towers and objective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from benchmarking.run_loss import build_loss
from fake_cuda import DEVICE, GpuRank, fake_cuda, fake_ranks

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.losses import pairs
from neuclip_ds.losses.base import Position
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.activations import Activations, LiveBytes
from neuclip_ds.planning.memory import MemoryQuery, Towers, account, count_towers
from neuclip_ds.recipe import parse
from neuclip_ds.training.step import train_step

pytestmark = pytest.mark.usefixtures("quick_meta_models")
SAMPLES = 10**6
BATCH = 65_536
DIM = 768
METHODS = ("openclip", "fastclip_v3", "isogclr", "neuclip", "siglip", "amorlip", "neuclip_queue")


def peak_of_steps(query: MemoryQuery) -> int:
    """Return rank 0's peak GPU memory, in bytes, during the second of two steps."""
    config = query.config
    rows = query.rank_batch
    engine_config = load_engine_config(config, query.world_size)
    meta_model = query.build()
    with fake_cuda(), fake_ranks(0, query.world_size), LiveBytes("cuda") as live:
        model: Any = meta_model.to_empty(device=DEVICE)
        model.to = lambda *_: model  # has references, so must not move again
        communicator = Communicator(DEVICE)
        engine = start_engine(model, config.optimizer, engine_config, communicator)
        comm_dtype = resolve_comm_dtype(config, engine_config)
        loss = build_loss(config, query.source.embed_dim, SAMPLES, communicator, comm_dtype)
        batches = DeviceBatches(communicator.device, query.micro_batch)
        image = torch.zeros(rows, 3, query.image_size, query.image_size, dtype=torch.uint8)
        tokens = torch.zeros(rows, query.tokenizer.context_length, dtype=torch.int64)
        for number in range(2):
            live.peak = live.now
            batch = Batch(image, tokens, torch.arange(rows), torch.ones(rows, dtype=torch.bool))
            batches.start(iter([RankBatch([batch])]))
            position = Position(step=number, lr=1e-3, peak_lr=1e-3)
            assert train_step(engine, loss, batches, next(batches), position).applied
    return live.peak


B32 = ["models/vitb32", "--objective.method=openclip", "--deepspeed=zero1_bf16"]
FEWER_LAYERS = ['--model.vision.options={"depth":1}', "--model.text.layers=1"]
LEAN = "--optimizer.lean_zero1=true"
OTHER_STAGES = ("zero0_fp32", "zero1_fp32", "zero2_bf16", "zero3_bf16")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([*B32, "--data.batch_size=1024"], marks=pytest.mark.slow),
        [*B32, *FEWER_LAYERS, "--data.batch_size=128"],  # gradients take more memory than activations
        pytest.param([*B32, "--data.batch_size=1024", "--data.micro_batch=64"], marks=pytest.mark.slow),
        pytest.param(
            [*B32, *FEWER_LAYERS, "--data.batch_size=128", "--data.micro_batch=8", LEAN], marks=pytest.mark.slow
        ),
        pytest.param([*B32, "--data.batch_size=1024", LEAN], marks=pytest.mark.slow),
        [*B32, *FEWER_LAYERS, "--data.batch_size=128", LEAN],
        *(
            pytest.param(
                [*B32, *FEWER_LAYERS, "--data.batch_size=128", LEAN, f"--optimizer.name={name}"],
                marks=pytest.mark.slow,
            )
            for name in ("lamb", "lion", "sgd")
        ),
        *(
            pytest.param([*B32[:2], f"--deepspeed={file}", "--data.batch_size=1024"], marks=pytest.mark.slow)
            for file in OTHER_STAGES
        ),
        pytest.param(["vith14_tuneclip", "--model.activation_checkpointing=true"], marks=pytest.mark.slow),
        pytest.param(["vith14_openclip"], marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options),
)
def test_a_step_on_eight_gpus_takes_the_estimated_memory(options: list[str]) -> None:
    query = MemoryQuery(parse(options).config, 8, SAMPLES)
    planned = account(query, count_towers(query))
    assert planned.peak == pytest.approx(peak_of_steps(query), rel=0.05), planned.moments


def as_compiled(live: LiveBytes, function: Callable[..., Any]) -> Callable[..., Any]:
    """Count only the results, and one intermediate block if blocks are returned, as in code that inductor compiles."""

    def call(pair_loss: Any, similarity: torch.Tensor, *others: Any) -> Any:
        peak_before = live.peak
        results = function(pair_loss, similarity, *others)
        intermediate = similarity.nbytes if isinstance(results, tuple) else 0
        live.peak = max(peak_before, live.now + intermediate)
        return results

    return call


@pytest.mark.parametrize(
    ("method", "ranks"),
    [("neuclip", 8), ("siglip", 8), *(pytest.param(method, 64, marks=pytest.mark.slow) for method in METHODS)],
)
def test_the_objective_of_a_large_batch_takes_the_estimated_memory(
    method: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [f"--objective.method={method}", f"--data.batch_size={BATCH}", f"--model.embed_dim={DIM}"]
    query = MemoryQuery(parse(["models/vitb16", *options, "--deepspeed=zero1_bf16"]).config, ranks, SAMPLES)
    estimate = account(query, Towers(Parameters((), 0), Activations(0, 0))).device
    planned = sum(estimate[part] for part in ("features", "similarities", "u, NPN, nets"))
    rows = query.rank_batch
    index = torch.arange(rows)
    valid = torch.ones(rows, dtype=torch.bool)
    with fake_cuda(), LiveBytes("cuda") as live:
        monkeypatch.setattr(pairs, "compiled", partial(as_compiled, live))
        loss = build_loss(query.config, DIM, SAMPLES, GpuRank(ranks), torch.bfloat16, undo=False)
        for number in range(3):
            live.peak = live.now
            pending = loss.begin(index, valid, Position(step=number, lr=1e-3, peak_lr=1e-3))
            image = torch.empty(rows, DIM, device=DEVICE, requires_grad=True)
            text = torch.empty(rows, DIM, device=DEVICE, requires_grad=True)
            pending.add_text(text)
            pending.add_image(image)
            pending.begin_reads()
            loss(image, text, pending=pending)
            del pending, image, text
    assert planned == pytest.approx(live.peak, rel=0.05)
