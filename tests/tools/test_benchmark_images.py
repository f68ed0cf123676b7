"""The loaders that tools/benchmark_images.py compares yield whole batches without end."""

import itertools

import benchmark_images
import pytest
from benchmark_images import CONTENDERS, Setting
from tars import write_pairs


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("benchmark")
    data = write_pairs(folder / "data", [12])
    (folder / "photographs").mkdir()
    setting = Setting(data=data, samples=16, batch=4, workers=1, repeats=1)
    setting.tars = benchmark_images.write_photographs(setting, folder / "photographs")
    setting.evaluation = benchmark_images.link_evaluation_set(setting.tars, folder / "set")
    setting.tokenizer = str(folder / "tokenizer")
    benchmark_images.train_bpe(benchmark_images.captions_of(setting), 300, 77).save(setting.tokenizer)
    return setting


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_yields_whole_batches_without_end(name: str, setting: Setting) -> None:
    pytest.importorskip("open_clip_train")
    sizes = CONTENDERS[name](setting)
    assert list(itertools.islice(sizes, 6)) == [4] * 6
    del sizes
