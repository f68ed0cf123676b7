import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# set before torch, DeepSpeed and other libraries are imported, which read these variables; child processes inherit them
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests must not use the network

HERE = Path(__file__).parent
# tests import shared helper modules, such as `ranks` and `oracle`, from these folders
_SHARED = (
    "evaluation",
    "models",
    "models/pretrained",
    "data",
    "distributed",
    "engine",
    "losses",
    "training",
    "faults",
    "gpu_ready",
    "embedding",
    ".",
)
sys.path[:0] = [str(HERE / folder) for folder in _SHARED]
sys.path.append(str(HERE.parent / "tools"))

import pytest  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="device of the tests and of the processes that they start (default: cpu); see `make test-gpu`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Select the device for DeepSpeed, torch and all child processes before any test module is imported."""
    os.environ["DS_ACCELERATOR"] = config.getoption("--device")
    if config.getoption("--device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a machine with GPUs runs the same tests as a machine without
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("--device=cuda: torch finds no GPU.")


def pytest_collection(session: pytest.Session) -> None:
    """Prepare a process that runs tests; pytest-xdist's main process runs none, so it need not import torch."""
    import torch
    from hypothesis import settings

    gc.disable()  # until all test modules are imported: collections would take seconds and free nothing
    torch.set_num_threads(1)
    settings.register_profile("unhurried", deadline=None)  # a slow example on a loaded machine is not a failure
    settings.load_profile("unhurried")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def frozen_modules() -> Iterator[None]:
    """Disable the trainer's `CollectGarbage` in runs in this process, because it unfreezes all objects after a run.

    Each later collection, such as the one at the start of the next run, would then take up to a second.
    """
    trainer = sys.modules.get("neuclip_ds.training.trainer")
    with pytest.MonkeyPatch.context() as patch:
        if trainer is not None:
            from neuclip_ds.training.hooks import Hook

            patch.setattr(trainer, "CollectGarbage", Hook)
        yield


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Return the device for tests marked `gpu`: `cuda` if --device=cuda is given, else `cpu` for a trial run."""
    return str(pytestconfig.getoption("--device"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of training shards with 100 demo pairs, next to the other splits; tests must not modify it."""
    from small_runs import demo_shards

    return demo_shards(tmp_path_factory.mktemp("demo") / "data", 100)


@pytest.fixture(scope="module")
def quick_meta_models() -> Iterator[None]:
    """Skip timm's random initialization of meta tensors, which has no effect but takes a second per model."""
    import timm.layers.weight_init as init

    draw = init._trunc_normal_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "_trunc_normal_", lambda weight, *args: weight if weight.is_meta else draw(weight, *args))
        yield
