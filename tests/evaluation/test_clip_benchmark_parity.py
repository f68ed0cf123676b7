"""Compare our scores with clip-benchmark's on the same data and weights (`pip install '.[clip_benchmark]'`)."""

import random
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from evaluation_sets import write_shards
from miniatures import save_open_clip
from tars import jpeg

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.suite import measure
from neuclip_ds.evaluation.tasks import load_tasks

builder = pytest.importorskip("clip_benchmark.datasets.builder", reason="the extra clip_benchmark is not installed")
classification = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")
retrieval = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")

NAMES = ["dog", "cat", "old car", "tree", "two red boats", "night sky", "bread"]
TEMPLATES = ["a photo of a {c}.", "{c}", "art of the {c}"]
WORDS = ["a", "dog", "cat", "runs", "over", "red", "green", "grass", "in", "the", "old", "town", "with", "two", "boats"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_open_clip(folder)
    return folder


def ours(model: Path, key: str, data: Path) -> dict[str, float | None]:
    communicator = Communicator()
    saved = open_model(str(model), communicator)

    def encode(image: Any, tokens: Any) -> Any:
        with torch.no_grad():
            return saved.model.eval()(image, tokens)

    transform = EvalTransform.of(saved.preprocessing)
    encoder = BatchEncoder(encode, saved.tokenizer, communicator, 16, transform)
    (task,) = load_tasks().choose([key])
    return measure(task, data, encoder)


def theirs(model: Path, data: Path, collate: Any = None) -> tuple[Any, Any, Any, Any]:
    """Return the model, tokenizer, dataset and loader, built as in clip_benchmark's command line."""
    network, transform = open_clip.create_model_from_pretrained(f"local-dir:{model}")
    dataset = builder.build_wds_dataset("test", transform=transform, split="test", data_dir=str(data))
    loader = torch.utils.data.DataLoader(dataset.batched(16, collation_fn=collate or builder.default_collate), None)
    loader.dataset.classes = dataset.classes
    return network.eval(), open_clip.get_tokenizer(f"local-dir:{model}"), dataset, loader


def test_zero_shot_accuracy_equals_clip_benchmarks(model: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    (tmp_path / "classnames.txt").write_text("\n".join(NAMES))
    (tmp_path / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    samples = [
        {"jpg": jpeg(number, 40 + number % 30, 50), "cls": str(draw.randrange(len(NAMES))).encode()}
        for number in range(90)
    ]
    write_shards(tmp_path, samples)
    network, tokenizer, dataset, loader = theirs(model, tmp_path)
    # clip-benchmark 1.6.2's `accuracy` fails with numpy 2.4, so top-k is computed here from its logits
    prompts = classification.zero_shot_classifier(network, tokenizer, dataset.classes, dataset.templates, "cpu", False)
    logits, target = classification.run_classification(network, prompts, loader, "cpu", amp=False)
    expected = {"mean_per_class_recall": classification.balanced_accuracy_score(target, logits.argmax(1))}
    for k in (1, 5):
        is_hit = (logits.topk(k).indices == target[:, None]).any(1)
        expected[f"acc{k}"] = float(is_hit.double().mean())
    metrics = ours(model, "cifar10", tmp_path)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 3) for value in expected.values()}) == 3


def test_retrieval_recall_equals_clip_benchmarks(model: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    samples = []
    for number in range(60):
        captions = [" ".join(draw.sample(WORDS, 7)) for _ in range(1 + number % 5)]
        samples.append({"jpg": jpeg(number), "txt": "\n".join(captions).encode()})
    (tmp_path / "dataset_type.txt").write_text("retrieval")
    write_shards(tmp_path, samples)
    network, tokenizer, _, loader = theirs(model, tmp_path, builder.image_captions_collate_fn)
    expected = retrieval.evaluate(network, loader, tokenizer, device="cpu", amp=False, recall_k_list=[1, 5, 10])
    metrics = ours(model, "MSCOCO", tmp_path)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert max(expected.values()) > 0
