import os
import sys
from collections.abc import Iterator
from pathlib import Path

# before torch, DeepSpeed and others are imported, which read them then; processes that tests start inherit them
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for the network

HERE = Path(__file__).parent
# tests share helpers such as `ranks` and `oracle`
_SHARED = (
    "evaluation",
    "models/pretrained",
    "data",
    "distributed",
    "engine",
    "objectives",
    "loss",
    "training",
    "faults",
    "gpu_ready",
    "embedding",
    ".",
)
sys.path[:0] = [str(HERE / folder) for folder in _SHARED]
sys.path.append(str(HERE.parent / "tools"))

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("unhurried", deadline=None)  # a busy machine is not a fault of the code
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where tests run, and the processes that they start; `-m gpu --device=cuda` is `make test-gpu`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device for DeepSpeed, torch and all processes of the tests, before any test is imported."""
    os.environ["DS_ACCELERATOR"] = config.getoption("--device")
    if config.getoption("--device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a machine with GPUs tests what one without does
    elif not torch.cuda.is_available():
        raise pytest.UsageError("--device=cuda: torch finds no GPU.")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Return where a test marked `gpu` runs: on `cuda`, or without --device=cuda as a trial on `cpu`."""
    return str(pytestconfig.getoption("--device"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the training shards of 100 demo pairs, next to the other splits; no test changes them."""
    from small_runs import demo_shards

    return demo_shards(tmp_path_factory.mktemp("demo") / "data", 100)


@pytest.fixture(scope="module")
def quick_meta_models() -> Iterator[None]:
    """Draws no weights on the meta device, which has no room for them: that takes a second a model."""
    import timm.layers.weight_init as init

    draw = init._trunc_normal_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "_trunc_normal_", lambda weight, *args: weight if weight.is_meta else draw(weight, *args))
        yield
