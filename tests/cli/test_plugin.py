"""`--plugin`: losses of plugins on the command line, in recipes and in runs; a run's model works without the plugin."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_runs import SMALL, call, records, tensors
from test_api import SMALL as SMALL_RUN
from test_custom_loss import restored_registry, write_plugins

import neuclip_ds
from neuclip_ds.cli import export
from neuclip_ds.cli.train import main
from neuclip_ds.errors import UserError
from neuclip_ds.losses.methods import METHODS
from neuclip_ds.recipe import parse
from neuclip_ds.reporting.report import write_report

OPTIONS = [
    "demo",
    *SMALL,
    "--data.batch_size=8",
    "--data.workers=0",
    "--data.val=",
    "--data.zero_shot=",
    "--optimizer.schedule=constant",
    "--optimizer.warmup_steps=0",
    "--run.log_every=1",
    "--deepspeed=zero1_fp32",
    "--max_steps=4",
]


@pytest.fixture
def registry() -> Iterator[None]:
    with restored_registry():
        yield


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the page's plugins and two runs of the first: `one` on one rank and `two` on two ranks."""
    folder = write_plugins(tmp_path_factory.mktemp("plugins"))
    loss = ["--plugin", "margin_loss.py", "--objective.method=margin", "--objective.margin.margin=0.2"]
    for name, ranks in (("one", 1), ("two", 2)):
        call("train.py", *OPTIONS, *loss, f"--data.train={shards}", f"--run.name={name}", folder=folder, ranks=ranks)
    return folder


def checkpoint_of(runs: Path, name: str) -> Path:
    return runs / "runs" / name / "checkpoints" / "step_000000004"


def losses(runs: Path, name: str) -> list[float]:
    return [line["loss"] for line in records(runs / "runs" / name / "metrics.jsonl")]


def test_two_ranks_train_with_a_plugin_as_one_rank_does(runs: Path) -> None:
    assert len(losses(runs, "one")) == 4
    assert losses(runs, "two") == pytest.approx(losses(runs, "one"), rel=1e-5)


def test_a_run_is_used_without_its_plugin(
    runs: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs / "runs" / "one"
    assert "margin" not in METHODS
    monkeypatch.chdir(tmp_path)  # a folder without the plugin
    assert neuclip_ds.load(run, "cpu").encode_texts(["a red circle"]).shape == (1, 16)
    export.main([str(run), "--out=exported"])
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert ": margin</title>" in write_report(run).read_text()
    evaluate = [str(run), f"--data={shards.parent / 'val'}", "--workers=0", "--out=scores"]
    assert "retrieval" in call("tools/evaluate.py", *evaluate, folder=tmp_path).stdout


def test_training_without_the_plugin_of_a_run_names_it_on_all_ranks(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = str(runs / "runs" / "one" / "config.yaml")
    result = call("train.py", config, folder=tmp_path, ranks=2, code=2)
    assert result.stderr.count("error: The plugin margin_loss.py cannot be imported: FileNotFoundError") == 1
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"The plugin margin_loss\.py cannot be imported"):
        main([config, "--dry-run"])
    with pytest.raises(UserError, match=r"objective\.method=margin is unknown.*add --plugin=MODULE"):
        main(["demo", "--objective.method=margin", "--dry-run"])


def test_a_run_resumes_from_its_config_with_the_state_of_a_custom_loss(runs: Path, shards: Path) -> None:
    options = [*OPTIONS, "--plugin=centered_loss.py", "--objective.method=centered", f"--data.train={shards}"]
    call("train.py", *options, "--run.name=straight", folder=runs)
    call("train.py", *options, "--run.name=resumed", "--max_steps=2", folder=runs)
    call("train.py", "runs/resumed/config.yaml", "--max_steps=4", folder=runs)
    straight = tensors(checkpoint_of(runs, "straight"))
    assert any("means" in name for name in straight)
    assert tensors(checkpoint_of(runs, "resumed")) == straight
    assert losses(runs, "resumed") == losses(runs, "straight")


def test_normalizers_of_a_custom_loss_are_not_measured(runs: Path) -> None:
    result = call("train.py", "runs/one/config.yaml", "--run.normalizer_anchors=8", folder=runs, code=2)
    assert "run.normalizer_anchors=8 measures normalizers, but objective.method=margin estimates none" in result.stderr


def test_plugins_are_named_by_options_and_recipes(
    tmp_path: Path,
    registry: None,
) -> None:
    write_plugins(tmp_path)
    margin = str(tmp_path / "margin_loss.py")
    centered = str(tmp_path / "centered_loss.py")
    config = parse([f"--plugin={margin}", "--plugin", centered, "--objective.method=centered"]).config
    assert config.run.plugins == [margin, centered]
    assert config.objective.method == "centered"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"include: [demo]\nrun: {{plugins: [{margin}]}}\nobjective: {{method: margin}}\n")
    command = parse([str(recipe), f"--plugin={margin}", "--plugin", centered])
    assert command.config.run.plugins == [margin, centered]


def test_a_recipes_plugin_defines_options_of_the_command_line(
    tmp_path: Path,
    registry: None,
) -> None:
    margin = write_plugins(tmp_path) / "margin_loss.py"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"include: [demo]\nrun: {{plugins: [{margin}]}}\nobjective: {{method: margin}}\n")
    config = parse([str(recipe), "--objective.margin.margin=0.3"]).config
    assert config.objective.margin.margin == 0.3  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"--objective\.margin\.margn; did you mean --objective\.margin\.margin"):
        parse([str(recipe), "--objective.margin.margn=0.3"])


def test_help_lists_the_options_of_a_plugin(
    tmp_path: Path,
    registry: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plugin = write_plugins(tmp_path) / "margin_loss.py"
    for arguments in ([f"--plugin={plugin}", "--help"], ["--help", "all", "--plugin", str(plugin)]):
        main(arguments)
        text = capsys.readouterr().out
        assert re.search(r"--objective\.margin\.margin=FLOAT  \(0\.1\)\n +Margin subtracted", text)


def test_a_plugin_that_cannot_be_imported_is_one_clear_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("\nundefined\n")
    location = rf"NameError: name 'undefined' is not defined \({broken}, line 2\)"
    for name, message in ((str(broken), location), ("no_such_module", "ModuleNotFoundError: No module named")):
        with pytest.raises(UserError, match=rf"The plugin {name} cannot be imported: {message}"):
            parse([f"--plugin={name}"])


def test_a_loss_that_is_registered_in_a_notebook_trains(
    shards: Path,
    tmp_path: Path,
    registry: None,
) -> None:
    def distance(image: torch.Tensor, text: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (image - text).square().sum(dim=1).mean()

    neuclip_ds.register_loss("distance", neuclip_ds.autograd_loss(distance))
    data = {**SMALL_RUN["data"], "train": str(shards), "val": ""}
    options = {**SMALL_RUN, "data": data, "run": {"output_dir": str(tmp_path)}}
    run = neuclip_ds.train("demo", **options, **{"objective.method": "distance"})
    assert 0 < run.results["loss"] < 4
