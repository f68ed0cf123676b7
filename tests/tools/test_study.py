"""The study trains heads on cached features, scores them, and can be interrupted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_study
import torch
from safetensors.torch import save_file
from study import fine_tuning
from study.features import load_splits, with_copies
from study.figures import draw
from study.guides import guide_path, load_guide, save_guide
from study.loop import Heads, Run, train
from study.measures import normalizers, scores
from study.pixels import cache_pixels
from study.tables import difference, end_last_line, read_results, tables

from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.errors import UserError


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write features of images and of two captions per image; an image and its captions share a latent vector."""
    folder, generator = tmp_path_factory.mktemp("features"), torch.Generator().manual_seed(0)
    for split, images, crops in [("train", 500, 4), ("test", 50, 1)]:
        latent = torch.randn(images, 16, generator=generator)
        seen = torch.stack([latent + 0.3 * torch.randn(latent.shape, generator=generator) for _ in range(crops)])
        image_of = torch.arange(images).repeat_interleave(2)
        text = latent[image_of].flip(1) + torch.randn(2 * images, 16, generator=generator)
        save_file({"image": seen.half(), "text": text.half(), "image_of": image_of}, folder / f"{split}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("openclip", {}),
        ("fastclip_v3", {"moving_average": {"gamma_min": 0.6}}),
        ("siglip", {"temperature": {"initial": 0.1}}),
        ("oracle", {"kappa": None}),
        ("oracle", {"kappa": 1.0, "tau": 0.05, "learned": False, "bound": 5.0}),
    ],
)
def test_a_loss_raises_the_recall(features: Path, loss: str, options: dict[str, object]) -> None:
    splits = load_splits(features, validation=250)
    run = Run(loss, batch=10, seed=1, epochs=4, lr=3e-3, width=16, options=options, effective=40)
    results = train(splits.train, splits.test, run).results
    assert [record["step"] for record in results["curve"]] == [20, 60, 120, 200]
    assert ("error_std" in results) == (loss in ("openclip", "fastclip_v3"))
    assert results["recall"] > results["curve"][0]["recall"]
    assert results["recall"] > 2 * scores(Heads(splits.train, run), splits.test)["recall"]


def test_a_reference_and_a_teacher_of_other_pairs_raise_the_recall(features: Path, tmp_path: Path) -> None:
    splits = load_splits(features, validation=250)
    few = {"temperature": {"initial": 0.05}}
    guide_run = Run("openclip", batch=20, seed=0, epochs=8, lr=3e-3, width=24, last=0.8, options=few)
    guide = train(splits.train, splits.test, guide_run)
    save_guide(guide_path(tmp_path, "guide"), guide, guide_run)
    run = Run("openclip", batch=10, seed=1, epochs=6, lr=3e-3, width=16, first=0.8, options=few)
    recalls = {}
    for arguments in ({}, {"reference": "guide", "temperature_rate": 0.0}, {"teacher": "guide"}):
        guided_run = replace(run, **arguments)
        results = train(splits.train, splits.test, guided_run, guides=tmp_path).results
        assert results["step"] == 60  # a fifth of the 250 images, each with two captions
        recalls[" ".join(arguments)] = results["recall"]
    assert recalls["teacher"] > recalls[""]
    assert recalls["reference temperature_rate"] > recalls[""]
    with pytest.raises(UserError, match="first run the stage that saves it"):
        train(splits.train, splits.test, replace(run, teacher="other"), guides=tmp_path)


def test_a_guide_computes_the_features_of_the_heads_that_were_saved(features: Path, tmp_path: Path) -> None:
    splits = load_splits(features, validation=250)
    run = Run("openclip", batch=50, seed=0, epochs=1, width=24)
    trained = train(splits.train, splits.test, run)
    save_guide(tmp_path / "guide.safetensors", trained, run)
    guide = load_guide(tmp_path / "guide.safetensors", splits.train)
    image, text = trained.heads.encode(splits.train)
    index = torch.tensor([3, 40])
    rows = guide.rows(torch.zeros(2, dtype=torch.int64), index)
    torch.testing.assert_close(rows, (image[splits.train.image_of[index]], text[index]))
    assert guide.tau == trained.results["tau"]


def test_towers_learn_from_the_pixels_and_words_of_scenes(tmp_path: Path) -> None:
    make_demo_data(tmp_path / "scenes", pairs=600, held_out=60, zero_shot=80, size=32, processes=1)
    cache_pixels(str(tmp_path / "scenes"), tmp_path / "features")
    splits = load_splits(tmp_path / "features", validation=100)
    assert splits.test.text.shape[1] == splits.train.text.shape[1]
    run = Run("openclip", batch=25, seed=1, epochs=4, width=32, trains_towers=True)
    results = train(splits.train, splits.test, run).results
    untrained = scores(Heads(splits.train, run), splits.test)
    assert results["recall"] > 1.5 * untrained["recall"]


def test_recovery_leaves_the_weights_as_they_are(features: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery leaves the weights unchanged, but fine-tuning gives different results after it."""
    splits = load_splits(features, validation=250)
    run = Run("tuneclip", batch=10, seed=1, epochs=2, lr=0.0, width=16, fine_tunes=True, recovery=1)
    monkeypatch.setattr(fine_tuning, "CHECKPOINT", replace(run, loss="openclip", epochs=8, lr=3e-3, recovery=0))
    frozen = fine_tuning.fine_tune(splits.train, splits.test, run)
    assert frozen["recall"] == frozen["start"]
    recovered = fine_tuning.fine_tune(splits.train, splits.test, replace(run, lr=3e-3))
    cold = fine_tuning.fine_tune(splits.train, splits.test, replace(run, lr=3e-3, recovery=0))
    assert recovered["curve"][-1]["recall"] == recovered["recall_second"]
    assert recovered["log_g"] != cold["log_g"]
    assert recovered["recall"] == (recovered["recall_first"] + recovered["recall_second"]) / 2


def test_copies_replace_a_share_of_the_pairs(features: Path) -> None:
    pairs = load_splits(features, validation=250).train
    copied = pairs.at(with_copies(len(pairs.text), 0.8))
    assert copied.text.shape == pairs.text.shape
    texts, counts = copied.text.unique(dim=0, return_counts=True)
    assert len(texts) == len(pairs.text) // 5
    assert set(counts.tolist()) == {5}
    image_by_text = {}
    for text, image in zip(pairs.text, pairs.image_of, strict=True):
        image_by_text[tuple(text.tolist())] = int(image)
    for text, image in zip(copied.text, copied.image_of, strict=True):
        assert image_by_text[tuple(text.tolist())] == int(image)


def test_an_exact_normalizer_has_ratios_of_mean_one(features: Path) -> None:
    pairs = load_splits(features, validation=250).train
    run = Run("openclip", batch=10, seed=1, width=16)
    measured = normalizers(Heads(pairs, run), pairs, run, tau=1.0)
    assert measured["ratio_mean"] == pytest.approx(1.0, abs=0.05)
    assert measured["kl"] > 0


def test_a_study_resumes_where_it_was_interrupted(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = {"loss": "openclip", "width": 8, "grid": {"lr": [1e-3, 3e-3], "options.temperature.initial": [0.07]}}
    search = {
        "arms": ["openclip"],
        "batch": [10],
        "seeds": 2,
        "shortlist": 1,
        "split": "validation",
        "set": {"epochs": 1},
        "grid": True,
    }
    final = {"arms": ["openclip", "fixed"], "batch": [10], "seeds": 1, "set": {"epochs": 1}, "best_of": "search"}
    arms = {"openclip": arm, "fixed": {"loss": "openclip", "lr": 2e-3}}  # `fixed` has no settings to search
    monkeypatch.setattr(run_study, "PLAN", {"arms": arms, "stages": {"search": search, "final": final}})
    with pytest.raises(UserError, match="lacks runs of the stage search"):
        list(run_study.jobs("final", {}, features))
    records: dict[str, Any] = {}
    for new in (2, 1):  # both settings with the first seed, then the better one with the second
        todo = run_study.missing("search", records, features)
        assert len(todo) == new
        records |= {job.name: run_study.do(job) for job in todo}
    assert not run_study.missing("search", records, features)
    recalls = {record["run"]["lr"]: record["results"]["recall"] for record in list(records.values())[:2]}
    best = max(recalls, key=recalls.__getitem__)
    assert todo[0].run.lr == best
    assert [job.run.lr for job in run_study.jobs("final", records, features)] == [best, 2e-3]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records.values()))
    known = run_study.read_results(path)
    assert all(run_study.is_known(job, known) for job in run_study.jobs("search", known, features))
    search["set"] = {"epochs": 2}
    with pytest.raises(UserError, match="other settings"):
        [run_study.is_known(job, known) for job in run_study.jobs("search", known, features)]
    assert "## search, B = 10" in tables(known)
    record = next(iter(known.values()))
    drawn_records = {f"final/{arm}/B10/seed{seed}": record for arm in ("openclip", "siglip") for seed in (1, 2)}
    drawn = draw(drawn_records, "final", tmp_path)
    assert drawn and all(path.read_text(encoding="utf-8").endswith("</svg>\n") for path in drawn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo:many"], "number of scenes"),
        (["demo:900", "--processes=0"], "positive integer"),
        (["demo:900", "--stages", "gaet"], "did you mean gate"),
        (["demo:900", "--stages", "gate", "--arms", "openclp"], "did you mean openclip"),
        (["demo:900", "--stages", "gate", "--batch", "7"], "2048"),
        (["demo:900", "--stages", "towers_guide"], "--pixels"),
        (["demo:900", "--larger"], "--stages"),
        (["demo:900", "--out", __file__], "cannot be created"),
        (["no_folder"], "no tar files"),
        (["--tables", "no_file.jsonl"], "not a file"),
        (["--tables", __file__, "--arms", "openclip"], "omit"),
        (["--tables", __file__, "--stages", "gate", "--figures", __file__], "cannot be created"),
    ],
)
def test_wrong_arguments_are_reported_before_data_are_prepared(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_study.py", *arguments])
    with pytest.raises(SystemExit):
        run_study.main()
    assert message in capsys.readouterr().err
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_stages_and_batch_sizes_select_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    names = [f"{stage}/openclip/B{batch}/seed1" for stage in ("old", "new") for batch in (8, 16)]
    path.write_text("".join(json.dumps({"name": name, "results": {"recall": 1.0}}) + "\n" for name in names))
    arguments = ["run_study.py", "--tables", str(path), "--stages", "new", "--batch"]
    monkeypatch.setattr(sys, "argv", [*arguments, "8"])
    run_study.main()
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")] == ["## new, B = 8"]
    monkeypatch.setattr(sys, "argv", [*arguments, "9"])
    with pytest.raises(SystemExit):
        run_study.main()
    assert "8, 16" in capsys.readouterr().err


def test_data_of_another_source_or_kind_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    run_study.record_origin(folder, "demo:900", "pixels")
    run_study.record_origin(folder, "demo:9000", "pixels")  # no data were written in between
    folder.mkdir()
    (folder / "train.safetensors").touch()
    run_study.record_origin(folder, "demo:9000", "pixels")
    for source, kind in [("demo:900", "pixels"), ("demo:9000", "features, grid 1")]:
        with pytest.raises(UserError, match="pass another --out"):
            run_study.record_origin(folder, source, kind)
    (tmp_path / "features_origin.json").unlink()
    run_study.record_origin(folder, "demo:900", "pixels")  # data of an earlier version, which wrote no record


def test_incomplete_lines_of_results_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    line = json.dumps({"name": "gate/openclip/B16/seed1"})
    path.write_text(f'{line}\n\n{{"name": "gate')
    with pytest.raises(UserError, match="Line 3"):
        read_results(path)
    end_last_line(path)
    assert path.read_text() == f"{line}\n\n"
    assert "incomplete" in capsys.readouterr().out
    path.write_text(line)
    end_last_line(path)
    assert path.read_text() == f"{line}\n"
    assert list(read_results(path)) == ["gate/openclip/B16/seed1"]
    path.write_text('{"name": "gate"}\n')
    with pytest.raises(UserError, match="Line 1"):
        read_results(path)


def test_damaged_features_and_too_few_pairs_are_reported(features: Path, tmp_path: Path) -> None:
    splits = load_splits(features, validation=499)
    with pytest.raises(UserError, match="2 training pairs"):
        train(splits.train, splits.test, Run("openclip", batch=10, seed=1))
    (tmp_path / "train.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match=r"train.safetensors cannot be read"):
        load_splits(tmp_path)


def test_stages_with_and_without_openclip_are_drawn(tmp_path: Path) -> None:
    result = {"recall": 50.0, "curve": [{"step": 1, "tau": 0.07}, {"step": 2, "tau": 0.06}]}

    def records(*arms: str) -> dict[str, Any]:
        return {f"map/{arm}/B9/epochs=1/seed{seed}": {"results": result} for arm in arms for seed in (1, 2)}

    assert {path.name for path in draw(records("openclip", "siglip"), "map", tmp_path)} == {
        "map_curves.svg",
        "map_gains.svg",
    }
    assert [path.name for path in draw(records("neuclip"), "map", tmp_path)] == ["map_curves.svg"]
    with pytest.raises(UserError, match="no records"):
        draw(records("neuclip"), "other", tmp_path)
    with pytest.raises(UserError, match="21 settings"):
        draw(records(*(f"arm {number}" for number in range(21))), "map", tmp_path)


def test_arms_are_compared_with_openclip_in_the_same_setting() -> None:
    recalls = {"openclip/B9/epochs=1": 1.0, "openclip/B9/epochs=3": 4.0, "siglip/B9/epochs=1": 3.0, "sogclr/B9": 5.0}
    records = {
        f"map/{name}/seed{seed}": {"results": {"recall": recall}} for name, recall in recalls.items() for seed in (1, 2)
    }
    rows = [line.split(" | ") for line in tables(records).splitlines() if line.startswith("| ")]
    gains = {row[0].removeprefix("| "): row[2] for row in rows[2:]}
    assert gains == {
        "sogclr": "+1.00 ± 0.00",  # there is no OpenCLIP in its setting, so the best one
        "openclip, epochs=3": "-",
        "siglip, epochs=1": "+2.00 ± 0.00",
        "openclip, epochs=1": "-3.00 ± 0.00",
    }


def test_intervals_are_those_of_paired_seeds() -> None:
    mean, half_width = difference([2.0, 3.0, 4.0], [1.0, 1.0, 3.0])
    assert mean == pytest.approx(4 / 3)
    assert half_width == pytest.approx(4.303 * (1 / 3) ** 0.5 / 3**0.5, rel=1e-3)


def test_guided_arms_are_also_compared_with_their_loss_alone() -> None:
    recalls = {"openclip, few": 1.0, "sogclr, few": 3.0, "sogclr + teacher, few": 5.0}
    records = {f"map/{arm}/B9/seed1": {"results": {"recall": recall}} for arm, recall in recalls.items()}
    rows = [line.split(" | ") for line in tables(records).splitlines() if line.startswith("| ")]
    gains = {row[0].removeprefix("| "): (row[2], row[3]) for row in rows[2:]}
    assert gains["sogclr + teacher, few"] == ("+4.00 ± inf", "+2.00 ± inf")
    assert gains["sogclr, few"] == ("+2.00 ± inf", "-")
