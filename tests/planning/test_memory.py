"""Check the memory estimate against the bytes that real engines and real passes allocate."""

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import Layers
from torch import nn
from torch.profiler import ProfilerActivity, profile

from neuclip_ds.config import Config, OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.start import start_engine
from neuclip_ds.models.source import TowerRefs, model_source
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.activations import Activations, count_activations
from neuclip_ds.planning.memory import (
    EngineMemory,
    MemoryQuery,
    StandInTokenizer,
    Towers,
    account,
    engine_memory,
)
from neuclip_ds.recipe import parse

pytestmark = pytest.mark.usefixtures("quick_meta_models")
WIDTH = 256
LAYERS = 6
ENGINES = [f"zero{stage}_{precision}" for precision in ("fp32", "bf16") for stage in range(4)]
OFFLOADS = ["zero2_bf16_offload", "zero3_bf16_offload"]
QUICK = ["zero1_bf16", "zero2_bf16", "zero3_bf16"]
BUCKET = 50_000_000  # elements, as in ds_configs/
SMALL = [
    "--model.vision.image_size=32",
    '--model.vision.options={"patch_size":8,"embed_dim":128,"depth":2,"num_heads":4}',
    "--model.text.width=128",
    "--model.text.layers=2",
    "--model.text.heads=4",
    "--model.text.vocab_size=400",
    "--model.text.context_length=32",
    "--model.embed_dim=64",
]


def small_engine(
    name: str, communicator: Communicator, optimizer: str = "adamw", frozen: int = 0
) -> tuple[Any, EngineMemory]:
    """Build an engine with sizes divisible by two and `frozen` frozen layers; return it and its memory estimate."""
    net = Layers(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    net[:frozen].requires_grad_(False)
    ranks = communicator.world_size
    config = Config.model_validate({"data": {"batch_size": 8}, "deepspeed": name})
    engine_config = load_engine_config(config, ranks)
    expected = engine_memory(engine_config, optimizer, Parameters.of(net), ranks)
    return start_engine(net, OptimizerConfig(name=optimizer, lr=0.1), engine_config, communicator), expected


def test_a_moving_average_takes_as_much_as_the_masters() -> None:
    parameters = Parameters((100, 20), 120)
    for name in ENGINES + OFFLOADS:
        config = Config.model_validate({"data": {"batch_size": 8}, "deepspeed": name})
        engine = load_engine_config(config, 2)
        without = engine_memory(engine, "adamw", parameters, 2)
        averaged = engine_memory(engine, "adamw", parameters, 2, averages=True)
        share = 120 if name.startswith("zero0") else 60
        assert (averaged.optimizer + averaged.host) - (without.optimizer + without.host) == 4 * share, name


@pytest.mark.parametrize(
    ("name", "weights", "gradients", "state", "update"),
    [
        ("zero0_fp32", 4, 4, 8, 4),
        ("zero0_bf16", 2, 2, 12, 4),
        ("zero1_fp32", 4, 4, 6, 4),
        ("zero1_bf16", 2, 6, 6, 4),
        ("zero1_bf16, lean", 2, 4, 6, 0),
        ("zero2_fp32", 4, 2, 6, 2),
        ("zero2_bf16", 2, 2, 6, 2),
        ("zero3_fp32", 2, 2, 6, 2),
        ("zero3_bf16", 1, 2, 6, 2),
        ("zero3_bf16_offload", 1, 0, 0, 0),
    ],
)
def test_the_terms_of_two_ranks_are_those_of_the_table(
    name: str, weights: int, gradients: int, state: int, update: int
) -> None:
    """The table is in the docstring of `engine_memory`; its terms are bytes per parameter."""
    file, _, lean = name.partition(", ")
    optimizer = {"lean_zero1": bool(lean)}
    config = Config.model_validate({"data": {"batch_size": 8}, "deepspeed": file, "optimizer": optimizer})
    size = 2_000_000
    parameters = Parameters((size,), 0)
    memory = engine_memory(load_engine_config(config, 2), "adamw", parameters, 2, lean_zero1=bool(lean))
    terms = (memory.weights, memory.gradients, memory.optimizer, memory.step)
    assert terms == tuple(size * term for term in (weights, gradients, state, update))


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors that Python references, by address."""
    time.sleep(0.3)  # gloo's threads keep the last reduced bucket until they next run
    gc.collect()
    by_address: dict[int, torch.UntypedStorage] = {}
    for candidate in gc.get_objects():
        if type(candidate) in (torch.Tensor, nn.Parameter) and candidate.device.type != "meta":
            storage = candidate.untyped_storage()
            by_address[storage.data_ptr()] = storage
    return by_address


def new_bytes(name: str, before: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes of storages not in `before`, which keeps its storages alive so that no address is reused."""
    size = sum(storage.nbytes() for address, storage in storages().items() if address not in before)
    # ZeRO 3 allocates one bucket, but on a CPU, the unused part of the bucket takes no memory
    return size - 4 * BUCKET * name.startswith("zero3")


def census(communicator: Communicator, names: list[str], frozen: int = 0) -> list[tuple[int, int, EngineMemory]]:
    """Return the bytes that each engine uses after a backward pass and after a step, and the estimate for it."""
    records = []
    for name in names:
        before = storages()
        engine, expected = small_engine(name, communicator, frozen=frozen)
        for _ in range(2):
            rows = torch.ones(2, WIDTH, dtype=torch.bfloat16 if "bf16" in name else torch.float32)
            engine.backward(engine(rows, None).float().square().mean())
            after_backward = new_bytes(name, before)
            engine.step(lr=0.0)
        records.append((after_backward, new_bytes(name, before), expected))
        for parameter in engine.module.parameters():
            parameter.grad = None
        del engine, parameter, rows
    return records


@pytest.mark.parametrize(
    ("names", "frozen"),
    [
        (QUICK, 0),
        pytest.param([name for name in ENGINES + OFFLOADS if name not in QUICK], 0, marks=pytest.mark.slow),
        pytest.param(ENGINES + OFFLOADS, LAYERS // 3, marks=pytest.mark.slow),
    ],
)
def test_engines_on_two_ranks_use_the_estimated_memory(names: list[str], frozen: int) -> None:
    for ranks in run_ranks(2, census, names, frozen):
        for name, (after_backward, after_step, expected) in zip(names, ranks, strict=True):
            wanted = expected.weights + expected.optimizer + expected.host
            if not name.startswith(("zero1", "zero3")):  # these keep gradients between steps
                assert after_step == pytest.approx(wanted, rel=0.05), name
            if name != "zero1_fp32":  # it keeps only a rank's part once all gradients have arrived
                assert after_backward == pytest.approx(wanted + expected.gradients, rel=0.05), name


def allocated_peak(work: Callable[[], object]) -> int:
    """Return the peak of the bytes that torch's CPU allocator allocates during `work`, relative to the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    results = recorded.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


PARTS = ["--model.vision.trainable=all", "--model.vision.trainable=1", "--model.lora.rank=4"]
# (checkpointing, packed captions, trained part); for any two of these options, all combinations of their values occur
QUICK_PASSES = [
    ("false", "false", PARTS[0]),
    ("true", "true", PARTS[0]),
    ("false", "true", PARTS[1]),
    ("true", "false", PARTS[1]),
    ("false", "false", PARTS[2]),
    ("true", "true", PARTS[2]),
]
PASSES = list(itertools.product(["false", "true"], ["false", "true"], PARTS))


@pytest.mark.parametrize(
    ("checkpointing", "packed", "part"),
    [*QUICK_PASSES, *(pytest.param(*one, marks=pytest.mark.slow) for one in PASSES if one not in QUICK_PASSES)],
)
def test_a_real_pass_allocates_the_counted_activations(checkpointing: str, packed: str, part: str) -> None:
    """Packed captions need no more: even if they fill the context, the last block computes one token of each."""
    options = [f"--model.activation_checkpointing={checkpointing}", f"--model.text.packed={packed}", part]
    config = parse(["demo", *SMALL, *options]).config
    source = model_source(config.model, TowerRefs())
    tokenizer: Any = StandInTokenizer(config.model.text)
    with torch.device("meta"):
        weightless = source.build(tokenizer)
    counted = count_activations(weightless, 16, 32, 32, torch.float32)
    model = source.build(tokenizer).train()
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    image = torch.zeros(16, 3, 32, 32, dtype=torch.uint8)
    tokens = torch.zeros(16, 32, dtype=torch.int64)
    tokens[:, -1] = tokenizer.eos_id  # captions fill the context

    def work() -> None:
        features = model(image, tokens)
        (features[0].sum() + features[1].sum()).backward()

    work()
    peak = allocated_peak(work)
    if packed == "true":
        assert 0.7 * counted.alone < peak < 1.05 * counted.alone
    else:
        assert peak == pytest.approx(counted.alone, rel=0.05)


def test_statistics_of_many_samples_are_in_host_memory() -> None:
    towers = Towers(Parameters((), 0), Activations(0, 0))
    config = parse(["demo", *SMALL, "--objective.method=fastclip_v3"]).config
    few = account(MemoryQuery(config, 2, samples=1000), towers)
    many = account(MemoryQuery(config, 2, samples=10**9), towers)
    assert few.device["u, NPN, nets"] == pytest.approx(8 * 1000 / 2, abs=100)  # log u for two directions
    assert many.device["u, NPN, nets"] < 1000
    assert many.host["u, NPN, nets"] == pytest.approx(4e9, rel=0.01)
