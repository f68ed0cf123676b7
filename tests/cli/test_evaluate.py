"""Run tools/evaluate.py as users do: on a pretrained model, on a run, and on two ranks."""

import json
from pathlib import Path

import pytest
from evaluation_sets import write_shards
from miniatures import save_open_clip
from safetensors.torch import load_file, save_file
from small_runs import call, demo_shards, records, train
from tars import jpeg, write_pairs

CLASSES = ["red dog", "blue cat", "green tree", "old car", "night sky", "bread"]


def write_sets(root: Path, images: int = 23) -> Path:
    """Write noise images in the layout of the CIFAR-10 and Flickr sets."""
    labeled, captioned = root / "wds_cifar10_test", root / "wds_flickr30k"
    write_shards(labeled, [{"jpg": jpeg(n), "cls": str(n * 5 % 6).encode()} for n in range(images)])
    (labeled / "classnames.txt").write_text("\n".join(CLASSES))
    (labeled / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n{c}\n")
    lines = [f"{CLASSES[n % 6]} {n}\n{CLASSES[n // 6]}" for n in range(images)]
    write_shards(captioned, [{"jpg": jpeg(n), "txt": line.encode()} for n, line in enumerate(lines)])
    (captioned / "dataset_type.txt").write_text("retrieval\n")
    return root


def write_own(root: Path) -> None:
    """Write images of two classes and a table of their captions."""
    lines = ["image\tcaption\n"]
    for number in range(6):
        image = root / "pets" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(jpeg(number))
        lines += [f"{image.relative_to(root)}\tpicture {number} {of}\n" for of in ("one", "two")]
    (root / "pairs.tsv").write_text("".join(lines))


def lines_of(folder: Path) -> dict[str, dict[str, float]]:
    rows = records(folder / "eval_results.jsonl")
    return {row["dataset"]: row["metrics"] for row in rows}


def test_only_tasks_without_a_score_are_scored(tmp_path: Path) -> None:
    save_open_clip(tmp_path / "model")
    out = tmp_path / "scores"
    out.mkdir()
    (out / "model.json").write_text(json.dumps({"model": "model", "precision": "float32"}))
    done = {"key": "cifar10", "dataset": "CIFAR-10", "metrics": {"acc1": 0.125, "main_metric": 0.125}}
    other = {"key": "own/pets", "dataset": "pets", "metrics": {"acc1": 9.0}, "data": "/elsewhere/pets: 1"}
    (out / "eval_results.jsonl").write_text(f"{json.dumps(done)}\n{json.dumps(other)}\n")
    joined = "held/00000.tar::held/00001.tar"
    options = [
        "--data",
        "data",
        "pets",
        joined,
        "other=more",
        "pairs.tsv",
        "--out=scores",
        "--batch-size=8",
        "--workers=2",
    ]
    write_sets(tmp_path / "data")
    write_own(tmp_path)
    for name in ("held", "more", "elsewhere/more"):
        write_pairs(tmp_path / name, [3, 2])
    twice = ["--data", "more", "elsewhere/more"]
    assert "are called more" in call("tools/evaluate.py", "model", *options, *twice, folder=tmp_path, code=2).stderr
    only_pairs = ["--data", "more", "--out=scores", "--tasks", "cifar10"]
    assert "--tasks has no effect" in call("tools/evaluate.py", "model", *only_pairs, folder=tmp_path, code=2).stderr
    run = call("tools/evaluate.py", "model", *options, folder=tmp_path)
    scores = lines_of(out)
    assert sorted(scores) == ["CIFAR-10", "Flickr", "held", "other", "pairs", "pets"]
    assert scores["held"] == scores["other"], "of the same pairs"
    assert scores["pets"]["acc1"] <= 1, "that of another set of this name does not count"
    assert scores["pets"]["main_metric"] == scores["pets"]["acc1"] and scores["pets"]["acc5"] is None
    assert scores["pairs"]["main_metric"] == scores["pairs"]["mean_recall@1"]
    assert scores["CIFAR-10"] == done["metrics"]
    assert 0 < scores["Flickr"]["image_retrieval_recall@10"] < 1
    assert "CIFAR-10: already scored" in run.stderr
    assert "Flickr: data/wds_flickr30k contains 23 samples, but the published set contains 1000" in run.stderr
    assert "not found in data, pets, pairs.tsv: Caltech-101, CIFAR-100" in run.stderr
    assert (
        "| retrieval | Flickr and MSCOCO (NeuCLIP, AmorLIP, TuneCLIP) | none: scores exist for only 1 of 2 tasks"
        in run.stdout
    )
    assert "Missing from retrieval: MSCOCO." in run.stdout
    assert "| pets | acc1 | " in run.stdout and "| pairs | mean_recall@1 | " in run.stdout
    averages = json.loads((out / "averages.json").read_text())
    assert averages["datacomp"]["value"] is None
    assert len(averages["datacomp"]["missing"]) == 36

    # a set is scored again if its files have changed, even if their sizes have not
    shard = tmp_path / "data/wds_flickr30k/test/0.tar"
    shard.write_bytes(shard.read_bytes().replace(b"red dog 0", b"red dog 9"))
    again = call("tools/evaluate.py", "model", "--data", "data", "pets", *options[-3:], folder=tmp_path)
    assert "pets: already scored" in again.stderr and "CIFAR-10: already scored" in again.stderr
    assert "Flickr: mean_recall@1" in again.stderr

    # the scores of a model that was replaced by one of the same name do not count
    weights = load_file(tmp_path / "model/open_clip_model.safetensors")
    weights["text_projection"] += 1
    save_file(weights, tmp_path / "model/open_clip_model.safetensors")
    replaced = call("tools/evaluate.py", "model", "--data", "pets", "--out=scores", folder=tmp_path, code=2)
    assert "scores contains scores of another model, of other weights" in replaced.stderr


@pytest.mark.slow
def test_scores_are_the_same_during_a_run_and_on_one_or_two_ranks(tmp_path: Path) -> None:
    data, sets = demo_shards(tmp_path / "demo", 64), write_sets(tmp_path / "sets")
    write_own(sets)
    options = [f"--data.evaluation_sets={sets}", "--run.evaluate_every=3", "--data.workers=1", "--data.val=auto"]
    train(tmp_path / "runs", str(data), 6, *options)
    metrics = records(tmp_path / "runs/run/metrics.jsonl")
    during = [line for line in metrics if "task/cifar10" in line]
    assert [line["step"] for line in during] == [3, 6]
    assert "average/retrieval" not in during[-1]
    options = ["--data", "sets", "demo/val", "--batch-size=8", "--workers=2"]
    alone = call("tools/evaluate.py", "runs/run", *options, folder=tmp_path)
    assert "| retrieval | image to text R@1 | R@5 | R@10 |" in alone.stdout and "| val | " in alone.stdout
    scores = lines_of(tmp_path / "runs/run/evaluation/step_000000006")
    assert scores["CIFAR-10"]["main_metric"] == during[-1]["task/cifar10"]
    flickr = "task/retrieval/flickr_1k_test_image_text_retrieval"
    assert scores["pets"]["main_metric"] == during[-1]["task/own/pets"]
    assert scores["pairs"]["main_metric"] == pytest.approx(during[-1]["task/own/pairs"], abs=1e-12)
    assert scores["Flickr"]["main_metric"] == pytest.approx(during[-1][flickr], abs=1e-12)
    directions = {"text_retrieval": "image_to_text", "image_retrieval": "text_to_image"}
    for name, way in directions.items():
        for k in (1, 5, 10):
            assert scores["val"][f"{name}_recall@{k}"] == pytest.approx(during[-1][f"{way}_recall@{k}"], abs=1e-12)
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = call("tools/evaluate.py", "moved/run", *options, folder=tmp_path)
    assert moved.stderr.count("already scored in") == len(scores)
    (tmp_path / "moved").rename(tmp_path / "runs")
    call("tools/evaluate.py", "runs/run", *options, "--out=two", folder=tmp_path, ranks=2)
    on_two_ranks = lines_of(tmp_path / "two")
    assert on_two_ranks.keys() == scores.keys()
    for name, metrics in scores.items():  # means over ranks are rounded differently
        assert on_two_ranks[name] == pytest.approx(metrics, abs=1e-12)
