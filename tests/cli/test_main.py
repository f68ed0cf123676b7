"""Test which command each entry point runs, and that help and early errors are printed without importing torch."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import ROOT, environment

from neuclip_ds.cli.main import COMMANDS, main

# the scripts that run a command
DOORS = [
    path for path in (ROOT / "train.py", *sorted((ROOT / "tools").glob("*.py"))) if "main(command=" in path.read_text()
]
# print the help of all commands, each of which exits, and then the heavy libraries that were imported
HELP = """
import contextlib, sys
from neuclip_ds.cli.main import COMMANDS, main
for command in ["", *COMMANDS]:
    with contextlib.suppress(SystemExit):
        main([command, "--help"] if command else ["--help"])
    print("=" * 20)
print(*{"torch", "deepspeed", "transformers", "timm"} & sys.modules.keys())
"""


def test_help_has_an_example_and_comes_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    listed, *texts, heavy = done.stdout.split(f"{'=' * 20}\n")
    assert heavy.split() == []
    assert all(f"  {name:<18}{meaning}\n" in listed for name, meaning in COMMANDS.items())
    for command, text in zip(COMMANDS, texts, strict=True):
        assert text.startswith("usage: neuclip-ds ")
        assert f"\n  neuclip-ds {command} " in text.split("Example")[1]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.stem)
def test_a_file_stands_for_its_command(
    door: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(door), "--no-such-option"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(door), run_name="__main__")
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setattr(sys, "argv", [str(door), "--help"])
    try:
        runpy.run_path(str(door), run_name="__main__")
    except SystemExit as ended:
        assert ended.code in (0, None)
    command = door.read_text().split("`")[1]
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
def test_a_mistake_is_one_sentence(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


# option -> expected part of the message
EARLY = {
    "--data.train=/nope": "data.train=/nope: /nope does not exist",
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
COMMANDS_EARLY = {
    ("evaluate", "nope", "--data=."): "MODEL=nope does not exist",
    ("evaluate", ".", "--data", ".", "/nope"): "--data=/nope: /nope does not exist",
    ("export", "runs/nope", "--out=out"): "RUN=runs/nope: runs/nope does not exist",
    ("embed", "a/b/c", ".", "--out=out"): "MODEL=a/b/c does not exist",
    ("embed", "openai/clip", "/nope", "--out=out"): "SHARDS=/nope: /nope does not exist",
}
# errors are reported without importing the libraries that take seconds to import
WITHOUT_TORCH = """
import contextlib, json, sys
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("wandb", "peft", "open_clip") else find(name)
from neuclip_ds.cli.main import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit):
        main(arguments)
print(*{"torch", "deepspeed", "transformers", "timm"} & sys.modules.keys())
"""


def test_missing_packages_and_paths_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    wanted = {**{("train", "demo", option): words for option, words in EARLY.items()}, **COMMANDS_EARLY}
    program = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(list(wanted))]
    options = {"env": environment(), "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(program, check=True, **options)
    lines = done.stderr.splitlines()
    assert len(lines) == len(wanted), done.stderr
    for line, words in zip(lines, wanted.values(), strict=True):
        assert line.startswith("error: ") and words in line
    assert done.stdout.split() == []


@pytest.mark.slow
def test_deepspeed_gives_no_advice_where_there_is_no_gpu(tmp_path: Path) -> None:
    variables = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "neuclip_ds", "export", ".", "--out=out"]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: . is neither a run with a checkpoint nor a checkpoint")


@pytest.mark.parametrize("rank", ["--local_rank=1", "--local-rank=0"])
def test_the_rank_that_launchers_add_is_dropped(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`deepspeed --module neuclip_ds train` puts the rank before the command; `deepspeed train.py` puts it after."""
    main(["train", "demo", "--print-config"])
    expected = capsys.readouterr().out
    for arguments in ([rank, "train", "demo", "--print-config"], ["train", rank, "demo", "--print_config"]):
        main(arguments)
        assert capsys.readouterr().out == expected


def test_without_a_recipe_it_is_the_demo(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    main(["train", "--print-config"])
    assert "name: demo\n" in capsys.readouterr().out
    assert caplog.text.count("No recipe is named, so this runs the demo recipe") == 1
