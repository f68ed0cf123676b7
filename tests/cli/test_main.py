"""Test which command each entry point runs, and that help and early errors are printed without importing torch."""

import json
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from small_runs import ROOT, environment

from neuclip_ds.cli.main import COMMANDS, main
from neuclip_ds.recipe import recipe_names

# the scripts that run a command
SCRIPTS = [
    path for path in (ROOT / "train.py", *sorted((ROOT / "tools").glob("*.py"))) if "main(command=" in path.read_text()
]
# option of `train` -> expected part of the message
TRAIN_MISTAKES = {
    "--data.train=/nope": "data.train=/nope does not exist",
    "--data.val=/nope::/tmp": "data.val=/nope::/tmp: /nope does not exist",
    "--data.evaluation_sets=/nope": "/nope does not exist",
    "--data.train=nope://bucket/{0..9}.tar": "Protocol not known: nope",
    "--run.remote=nope://bucket": "Protocol not known: nope); run pip install 'neuclip_ds[remote]'",
    "--run.wandb=project": "wandb, which is not installed: run pip install 'neuclip_ds[wandb]'",
    "--model.lora.rank=4": "peft, which is not installed: run pip install 'neuclip_ds[lora]'",
    "--model.pretrained=open_clip:ViT-B-32/openai": "run pip install 'neuclip_ds[open_clip]'",
    "--model.pretrained=/nope": "model.pretrained=/nope does not exist",
    "--model.pretrained=nope": "model.pretrained=nope does not exist",
    "--model.vision.pretrained=./nope": "./nope does not exist",
}
MISTAKES = {("train", "demo", option): message for option, message in TRAIN_MISTAKES.items()}
for option in ("--run.wandb=project", "--model.lora.rank=4", "--run.remote=nope://bucket"):
    MISTAKES["train", "demo", option, "--dry-run"] = TRAIN_MISTAKES[option]
MISTAKES |= {
    ("evaluate", "nope", "--data=."): "MODEL=nope does not exist",
    ("evaluate", ".", "--data", ".", "/nope"): "--data=/nope does not exist",
    ("export", "runs/nope", "--out=out"): "RUN=runs/nope does not exist",
    ("explore", "nope", "--images=."): "MODEL=nope does not exist",
    ("explore", "a/b", "--images=/nope"): "--images=/nope does not exist",
    ("explore", "a/b", "--images=.", "--features", "/nope"): "--features=/nope does not exist",
    ("explore", "a/b", "--images=."): "gradio, which is not installed: run pip install 'neuclip_ds[explore]'",
    ("embed", "a/b/c", ".", "--out=out"): "MODEL=a/b/c does not exist",
    ("embed", "openai/clip", "/nope", "--out=out"): "SHARDS=/nope does not exist",
    ("embed", "timm:a", ".", "--out=out", "--output=joint"): "timm:a has no joint space of images and texts",
    ("embed", "timm:a", ".", "--out=out", "--all-captions"): "timm:a encodes no captions: omit --captions",
    ("embed", "timm:a", ".", "--out=out", "--pooling=cls"): "--pooling applies only to text encoders",
    ("embed", "timm:a", ".", "--out=out", "--image-size=4"): "--image-size=4 must be from 8",
    ("embed", "hf:a/b", ".", "--out=out", "--ema"): "hf:a/b is not a run",
    ("embed", "hf:a/b", ".", "--out=out", "--crops=2"): "hf:a/b encodes no images: omit --crops",
    ("embed", "a/b", ".", "--out=out", "--image-size=96"): "--image-size applies only to image encoders",
    ("embed", "a/b", ".", "--out=out", "--crop-scale=0.5"): "--crop-scale has no effect without --crops",
    ("embed", "timm:a", ".", "--out=out", "--seed=1"): "--seed has no effect without --crops",
    ("embed", "a/b", ".", "--out=out", "--all-captions", "--seed=1"): "--seed has no effect without --crops",
    ("embed", "hf:a", ".", "--out=out", "--all-captions", "--seed=1"): "--seed has no effect with --all-captions",
    ("embed", "a/b", ".", "--out=out", "--seed=-1"): "--seed=-1 must be 0 or more",
    ("embed", "a/b", ".", "--out=out", "--crops=2", "--crop-scale=1"): "--crop-scale=1 must be above 0 and below 1",
}
# print the help of all commands; make all mistakes; print the heavy libraries that were imported on the way
WITHOUT_TORCH = """
import contextlib, importlib.util, json, sys
import neuclip_ds, neuclip_ds.losses
from neuclip_ds.cli.main import COMMANDS, main

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("wandb", "peft", "open_clip", "gradio") else find_spec(name)
neuclip_ds.UserError
for command in ["", *COMMANDS]:
    with contextlib.suppress(SystemExit):
        main([command, "--help"] if command else ["--help"])
    print("=" * 20)
*mistakes, last = json.loads(sys.argv[1])
for arguments in mistakes:
    with contextlib.suppress(SystemExit):
        main(arguments)
print(*{"torch", "deepspeed", "transformers", "timm"} & sys.modules.keys(), flush=True)
main(last)
"""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Return the result of a process that prints the help of all commands and makes all mistakes."""
    program = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(list(MISTAKES))]
    folder = tmp_path_factory.mktemp("folder")
    return subprocess.run(program, env=environment(), cwd=folder, capture_output=True, text=True, timeout=60)


def test_help_has_an_example_and_is_printed_without_torch(without_torch: subprocess.CompletedProcess[str]) -> None:
    commands, *texts, heavy_libraries = without_torch.stdout.split(f"{'=' * 20}\n")
    assert heavy_libraries.split() == []
    assert all(f"  {name:<18}{meaning}\n" in commands for name, meaning in COMMANDS.items())
    for command, text in zip(COMMANDS, texts, strict=True):
        assert text.startswith("usage: neuclip-ds ")
        assert f"\n  neuclip-ds {command} " in text.split("Example")[1]


def test_missing_packages_and_paths_are_reported_without_torch(without_torch: subprocess.CompletedProcess[str]) -> None:
    assert without_torch.returncode == 2
    lines = without_torch.stderr.splitlines()
    assert len(lines) == len(MISTAKES), without_torch.stderr
    for line, message in zip(lines, MISTAKES.values(), strict=True):
        assert line.startswith("error: ") and message in line


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs_its_command(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--no-such-option"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        assert ended.code in (0, None)
    command = script.read_text().split("`")[1]
    assert capsys.readouterr().out.startswith(f"usage: {command}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Unknown command trian; did you mean train?"),
        (
            ["evaluate", "runs/a", "--data=x", "--batchsize=3"],
            "Unknown option --batchsize=3; did you mean --batch-size?",
        ),
        (["export", "runs/a"], "The following arguments are required: --out"),
        (["export", "runs/a", "--out=x", "--format=jax"], "invalid choice: 'jax'"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.slow
def test_deepspeed_gives_no_advice_on_a_machine_without_gpus(tmp_path: Path) -> None:
    variables = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "neuclip_ds", "export", ".", "--out=out"]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: . is neither a run with a checkpoint nor a checkpoint")


@pytest.mark.parametrize("rank", ["--local_rank=1", "--local-rank=0"])
def test_the_rank_that_launchers_add_is_ignored(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`deepspeed --module neuclip_ds train` puts the rank before the command; `deepspeed train.py` puts it after."""
    main(["train", "demo", "--print-config"])
    expected = capsys.readouterr().out
    for arguments in ([rank, "train", "demo", "--print-config"], ["train", rank, "demo", "--print_config"]):
        main(arguments)
        assert capsys.readouterr().out == expected


def test_without_a_recipe_the_demo_runs(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    main(["train", "--print-config"])
    assert "name: demo\n" in capsys.readouterr().out
    assert caplog.text.count("No recipe is named, so the demo recipe is used") == 1


def test_the_version_and_the_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"neuclip_ds {version('neuclip_ds')}\n"
    main(["recipes", "demo"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        name for name in recipe_names() if "demo" in name
    ]
