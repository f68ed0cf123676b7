"""Test the trainer as a library: `neuclip_ds.train`, its results, and the trained model."""

import copy
import gc
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import neuclip_ds
from neuclip_ds.checkpoint.saved_model import open_model, read_result
from neuclip_ds.data.manifest import from_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.stop_signals import STOP_SIGNALS
from neuclip_ds.evaluation.evaluator import HeldOut, metric_names
from neuclip_ds.recipe import recipe_config

SMALL = {
    "model.vision.image_size": 16,
    "model.vision.options": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "model.text": {"width": 16, "layers": 1, "heads": 2, "vocab_size": 300},
    "model.embed_dim": 16,
    "data": {"batch_size": 8, "workers": 0, "zero_shot": ""},
    "max_steps": 3,
}
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def process_state() -> dict[str, object]:
    """Return settings of the process that a run changes while it trains."""
    root = logging.getLogger()
    return {
        "signal handlers": [signal.getsignal(number) for number in STOP_SIGNALS],
        "launcher's variables": LAUNCHER_VARIABLES & os.environ.keys(),  # later commands take them for a launcher's
        "algorithms of libraries": [os.environ.get(name) for name in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG")],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "log": (root.level, list(root.handlers), logging.getLogger("neuclip_ds").level, logging.raiseExceptions),
        "excepthook": sys.excepthook,
        "random state": torch.get_rng_state().tolist(),
        "linear": torch.nn.functional.linear,
    }


class CountSteps(neuclip_ds.Hook):
    steps = 0

    def after_step(self, loop, result) -> None:
        assert torch.are_deterministic_algorithms_enabled()  # as the config requests
        with socket.socket() as server:  # a command that the hook starts listens at the port of the environment
            server.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        self.steps += 1

    def after_run(self, loop) -> None:
        assert not torch.distributed.is_initialized()  # so that no rank waits while rank 0 runs this hook


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> neuclip_ds.Run:
    hook = CountSteps()
    before = process_state()
    options = {
        **SMALL,
        "run": {"output_dir": tmp_path_factory.mktemp("runs"), "name": "library"},
        "run.log_every": 1,
        "run.deterministic": True,
        "data.train": str(shards),
    }
    run = neuclip_ds.train("demo", hooks=[hook], **options)
    assert hook.steps == 3
    assert process_state() == before
    return run


def call_in_thread(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_a_run_works_outside_the_main_thread(shards: Path, tmp_path: Path) -> None:
    """Python allows signal handlers only in the main thread."""
    where = {"run": {"output_dir": tmp_path, "name": "run"}, "data.train": str(shards), "data.val": ""}
    raised: list[neuclip_ds.UserError] = []

    class TrainsToo(neuclip_ds.Hook):
        def start(self, loop) -> None:  # in a different thread from this one
            with pytest.raises(neuclip_ds.UserError, match="Another thread of this process is training") as caught:
                call_in_thread(lambda: neuclip_ds.train("demo"))
            raised.append(caught.value)

    call_in_thread(lambda: neuclip_ds.train("demo", hooks=[TrainsToo()], **{**SMALL, **where}))
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert len(raised) == 1


def test_a_run_does_not_depend_on_the_callers_settings(
    run: neuclip_ds.Run, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = {"run.output_dir": "runs", "run.log_every": 1, "data.train": str(shards)}
    config = recipe_config("demo", {**SMALL, **where})
    config.run.name = None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            other = neuclip_ds.train(config)
        assert dist.is_initialized()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()
    monkeypatch.chdir("/")
    assert other.folder == tmp_path / "runs" / "run"
    assert other.results["loss"] == run.results["loss"]


def models_in_memory() -> list[object]:
    return [thing for thing in gc.get_objects() if type(thing).__name__ in ("DualEncoder", "DeepSpeedEngine")]


@pytest.mark.parametrize("deepspeed", ["zero2_bf16", "zero3_bf16"])
def test_nothing_of_an_earlier_run_stays_in_memory(deepspeed: str, shards: Path, tmp_path: Path) -> None:
    where = {"run": {"output_dir": tmp_path, "name": "run"}, "data.train": str(shards), "data.val": ""}
    before = process_state()
    threads = psutil.Process().num_threads()
    kept_by_other_tests = [id(thing) for thing in models_in_memory()]
    neuclip_ds.train("demo", deepspeed=deepspeed, **{**SMALL, **where})
    assert process_state() == before
    # a forked process, such as a DataLoader's, would wait for the threads of a process group that it collects
    assert psutil.Process().num_threads() <= threads
    assert [thing for thing in models_in_memory() if id(thing) not in kept_by_other_tests] == []


def test_a_copied_model_encodes_with_its_own_weights(run: neuclip_ds.Run) -> None:
    model = run.model("cpu")
    features = model.encode_texts("a red cat")
    copied = copy.deepcopy(model)
    sent = pickle.loads(pickle.dumps(model))  # to a process of multiprocessing
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.add_(1)
    assert not torch.equal(model.encode_texts("a red cat"), features)
    assert torch.equal(copied.encode_texts("a red cat"), features)
    assert torch.equal(sent.encode_texts("a red cat"), features)


def encode_on_rank_zero(communicator: Communicator, folder: str) -> list[int]:
    if communicator.rank != 0:
        return []
    return list(neuclip_ds.load(folder, "cpu").encode_texts("a red cat").shape)


def test_one_rank_alone_may_load_a_model(run: neuclip_ds.Run) -> None:
    assert run_ranks(2, encode_on_rank_zero, str(run.folder)) == [[1, 16], []]


def test_results_include_metrics_of_training_and_evaluation(run: neuclip_ds.Run) -> None:
    assert run.folder.name == "library"
    assert {"loss", "tau", "image_to_text_recall@1"} <= run.results.keys()
    assert run.results["lr"] < 1e-3  # the learning rate of the last step
    held_out = HeldOut(pairs=from_shards([]), origin_of_pairs="", zero_shot=None, task_sets=[])
    names = metric_names(recipe_config("demo", SMALL), held_out)
    evaluated = {name for name in run.results if "recall@" in name or name == "retrieval_pairs"}
    assert {name for name in evaluated if not name.startswith("chance/")} == set(names)


def test_the_model_encodes_images_and_texts(run: neuclip_ds.Run, tmp_path: Path) -> None:
    model = neuclip_ds.load(run.folder, "cpu")
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    images, texts = model.encode_images(pixels), model.encode_texts(["a red cat", "a blue house"])
    assert images.shape == (3, 16) and texts.shape == (2, 16)
    assert torch.allclose(torch.cat([images, texts]).norm(dim=1), torch.ones(5), atol=1e-5)
    torch.testing.assert_close(run.model("cpu").encode_texts("a red cat"), texts[:1])
    with pytest.raises(ValueError, match=r"must have dtype torch.uint8 and shape \(3, 16, 16\)"):
        model.encode_images(pixels.float())


def test_no_rows_are_encoded_in_vain(run: neuclip_ds.Run) -> None:
    model = run.model("cpu")
    sizes: list[int] = []
    model.module.text.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    texts = [f"cat {number}" for number in range(65)]
    features = model.encode_texts(texts)
    model.encode_texts(texts[0])
    assert sizes == [33, 33, 1]
    torch.testing.assert_close(features[64:], model.encode_texts(texts[64]))
    for encode in (model.encode_images, model.encode_texts):
        with pytest.raises(ValueError, match="nothing to encode"):
            encode([])


def test_an_opened_run_has_the_temperature_that_it_exports(run: neuclip_ds.Run) -> None:
    saved = open_model(str(run.folder), Communicator())
    assert saved.checkpoint is not None and saved.config is not None
    assert saved.logits == read_result(saved.checkpoint).logits
    assert saved.logits.temperature != saved.config.objective.temperature.initial


def test_images_are_read_from_files_and_bytes(run: neuclip_ds.Run, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "image.png"
    Image.new("RGB", (40, 30), (200, 30, 30)).save(path)
    model = run.model("cpu")
    picture = Image.open(path)
    forms = model.encode_images([path, path.read_bytes(), picture, np.asarray(picture), picture.convert("RGBA")])
    assert all(torch.equal(features, forms[0]) for features in forms)
    for one in (path, str(path), path.read_bytes(), picture, np.asarray(picture), np.asarray(picture)[None]):
        torch.testing.assert_close(model.encode_images(one), forms[:1])
    with pytest.raises(ValueError, match=r"must have dtype uint8 and shape \(H, W, 3\)"):
        model.encode_images(np.zeros((30, 40, 3)))


def test_logits_are_scaled_similarities(run: neuclip_ds.Run) -> None:
    model = run.model("cpu")
    assert model.temperature == pytest.approx(run.results["tau"], rel=1e-2) and model.bias is None
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    texts = ["a red cat", "a blue house", "a dog"]
    cosines = model.encode_images(pixels) @ model.encode_texts(texts).T
    assert torch.allclose(model.logits(pixels, texts), cosines / model.temperature)
    model.bias = -10.0
    assert torch.allclose(model.logits(pixels, texts), cosines / model.temperature - 10)


def test_the_package_lists_its_public_names() -> None:
    assert {*neuclip_ds.__all__, "__version__"} <= set(dir(neuclip_ds))
    assert neuclip_ds.__version__ == version("neuclip_ds")


def test_mistakes_raise_user_errors(tmp_path: Path) -> None:
    with pytest.raises(neuclip_ds.UserError, match=r"unknown key data\.batchsize; did you mean data\.batch_size"):
        neuclip_ds.train("demo", data={"batchsize": 3})
    with pytest.raises(neuclip_ds.UserError, match="did you mean demo"):
        neuclip_ds.train("dem")
    with pytest.raises(neuclip_ds.UserError, match="not a local folder"):
        neuclip_ds.load(tmp_path / "absent")


def test_importing_the_api_logs_nothing() -> None:
    command = [sys.executable, "-c", "import neuclip_ds; neuclip_ds.load"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
