"""Run embed and filter as users do: with a pretrained model, on two ranks, and again after a kill."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from embedded_shards import members
from miniatures import save_clip, save_open_clip, small, xlm_roberta_tokenizer
from safetensors.torch import save_file
from small_runs import call, start, wait_for
from tars import write_tar
from transformers import BertConfig, BertModel

from neuclip_ds.cli.main import main
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.feature_table import FeatureTable, find_table
from neuclip_ds.data.manifest_file import load_manifest
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.embedding.select import feature_tables


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and 40 shards of 15 samples each."""
    folder = tmp_path_factory.mktemp("workspace")
    save_open_clip(folder / "model")
    (folder / "shards").mkdir()
    for shard in range(40):
        samples = {n: members(n) for n in range(15 * shard, 15 * shard + 15)}
        named = [(f"{n:05d}.{name}", data) for n, sample in samples.items() for name, data in sample.items()]
        write_tar(folder / "shards" / f"{shard:05d}.tar", named)
    return folder


def embed(workspace: Path, out: Path, *options: str, model: str = "model", run: Any = call, **how: int) -> Any:
    return run("neuclip_ds/__main__.py", "embed", model, "shards", f"--out={out}", *options, folder=workspace, **how)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


@pytest.mark.slow
def test_features_are_the_same_after_a_kill_and_on_two_ranks(workspace: Path, tmp_path: Path) -> None:
    options = ["--batch-size=8", "--workers=1"]
    uninterrupted = embed(workspace, tmp_path / "uninterrupted", *options)
    assert "600 samples from 40 shards" in uninterrupted.stdout and "samples/s" in uninterrupted.stdout
    killed = embed(workspace, tmp_path / "out", *options, ranks=2, run=start)
    wait_for(lambda: len(contents(tmp_path / "out")) >= 4, killed)
    for program in killed:
        program.kill()
        program.wait()
    assert 4 <= len(contents(tmp_path / "out")) < 40
    embed(workspace, tmp_path / "out", *options, ranks=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "uninterrupted")
    assert "choose another --out" in embed(workspace, tmp_path / "out", "--dtype=float32", code=2).stderr


@pytest.mark.slow
def test_features_select_samples_for_a_manifest(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(workspace)
    embed(workspace, tmp_path / "out")
    main(["filter", f"{tmp_path}/out", "--top=0.1", f"--out={tmp_path}/kept.npy"])
    assert "60 uids of 600 samples" in capsys.readouterr().out
    assert len(np.load(tmp_path / "kept.npy")) == 60
    main(["build-manifest", f"{tmp_path}/manifest", "shards", "--uids", f"{tmp_path}/kept.npy", "--processes=1"])
    assert load_manifest(tmp_path / "manifest").n == 60
    assert json.loads((tmp_path / "out" / "embedding.json").read_text())["model"] == "model"
    assert len(feature_tables(tmp_path / "out")) == 40


@pytest.mark.slow
def test_single_encoders_and_trunks_are_stored(workspace: Path, tmp_path: Path) -> None:
    """A table of each kind fits the data, and has the width and the description of its encoder."""
    torch.manual_seed(1)
    image_model = timm.create_model("test_vit")
    save_file(image_model.state_dict(), workspace / "image.safetensors")
    tokenizer = xlm_roberta_tokenizer()
    text_model = BertModel(BertConfig(**small(24), vocab_size=len(tokenizer), max_position_embeddings=16))
    text_model.save_pretrained(workspace / "bert")
    tokenizer.save_pretrained(workspace / "bert")
    save_clip(workspace / "clip")

    images = ["--crops=2", "--image-size=32", "--workers=1"]
    embed(workspace, tmp_path / "images", *images, model="timm:test_vit/image.safetensors", ranks=2)
    texts = ["--all-captions", "--pooling=mean", "--context-length=8", "--workers=0"]
    embed(workspace, tmp_path / "texts", *texts, model="hf:bert", ranks=2)
    embed(workspace, tmp_path / "trunks", "--output=trunk", model="clip")
    assert "set --output joint" in embed(workspace, tmp_path / "none", "--output=trunk", code=2).stderr

    manifest = open_manifest(str(workspace / "shards"), tmp_path, options=ScanOptions())
    tables = {}
    for name in ("images", "texts", "trunks"):
        tables[name] = FeatureTable(find_table(str(tmp_path / name)), manifest, ["txt"])
        assert tables[name].embedding["output"] == "trunk"
        assert tables[name].rows(torch.arange(600))[1] == {}
    assert (tables["images"].image_width, tables["images"].text_width) == (image_model.num_features, None)
    assert (tables["texts"].image_width, tables["texts"].text_width) == (None, 24)
    assert (tables["trunks"].image_width, tables["trunks"].text_width) == (32, 24)
    assert tables["images"].crops == 2
    assert tables["texts"].embedding["pooling"] == "mean"
    assert tables["texts"].embedding["context_length"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["filter", "x", "--out=y"],
            "No rule selects samples: set --min, --max, --top or --near-duplicates.",
        ),
        (["filter", "x", "--out=y", "--top=20"], "--top=20 must be above 0"),
        (["filter", "x", "--out=y", "--near-duplicates=0.9", "--uid-column=key"], "omit --uid-column"),
        (["filter", "x", "--out=y", "--min=1"], "x is neither a parquet file"),
    ],
)
def test_mistakes_of_filter_are_reported(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
