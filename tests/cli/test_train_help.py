"""Test which options `neuclip-ds train --help` and `--help all` list."""

import re

import pytest

from neuclip_ds.cli.train import EVERYDAY, main
from neuclip_ds.config import Config
from neuclip_ds.recipe import option_fields, with_dashes

ALL = {f"--{with_dashes(name)}" for name, _ in option_fields(Config)}
SWITCHES = {"--plugin", "--dry-run", "--measured", "--print-config", "--hostfile", "--gpu-memory", "--profile"}


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[set[str], str]:
    main(list(arguments))
    text = capsys.readouterr().out
    return set(re.findall(r"^  (--[\w.-]+)", text, re.MULTILINE)), text


def test_help_lists_the_everyday_options(capsys: pytest.CaptureFixture[str]) -> None:
    options, text = listed(capsys, "--help")
    assert options == SWITCHES | {f"--{with_dashes(name)}" for name in EVERYDAY}
    assert options - SWITCHES < ALL
    assert "--data.batch-size=INT  (256)\n" in text
    assert "pairs that are contrasted with each other" in " ".join(text.split())
    assert "--optimizer.name=adamw|lamb|lion|sgd  (adamw)\n" in text
    assert "--help all" in text


def test_help_all_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help", "all"], ["--help=all"], ["demo", "--help", "all"]):
        options, text = listed(capsys, *arguments)
        assert options == SWITCHES | ALL
        named = set(re.findall(r"--[\w.-]*_[\w.-]*", text))
        assert named <= {"--num_gpus"}  # DeepSpeed's option; all others use dashes
