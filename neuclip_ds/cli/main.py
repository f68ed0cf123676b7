"""The `neuclip-ds COMMAND` program, which imports and runs only that command."""

import atexit
import importlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.distributed.environment import let_idle_threads_sleep
from neuclip_ds.distributed.stop_signals import ignore_stop_signals
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import nearest

COMMANDS = {
    "train": "train a model from a recipe",
    "recipes": "list the recipes",
    "evaluate": "score a model on DataComp's evaluation sets or your own",
    "report": "write the report of a run, or compare runs",
    "export": "write a trained model for transformers, open_clip or sentence-transformers",
    "embed": "write the features of all samples of a dataset",
    "explore": "search and classify images on a local page",
    "filter": "select samples by similarity or another column",
    "inspect": "print statistics of a dataset, and show some of its pairs",
    "pack": "pack tables or folders of image-caption pairs into shards",
    "build-manifest": "index the shards of a dataset",
    "make-demo-data": "render the demo dataset",
}


def main(argv: Sequence[str] | None = None, command: str = "") -> None:
    """Run the command named by `command` or by the first argument.

    The exit code is 0 (success), 1 (training diverged, an unexpected error, or a rank that was killed or lost), 2 (a
    mistake in the input, or another problem that the user can fix), or 128 plus the number of the signal that stopped
    the command. `--local_rank=N`, which launchers add, is ignored: the rank comes from the environment.
    """
    if argv is None:
        argv = sys.argv[1:]
    arguments = [argument for argument in argv if not re.match(r"--local[-_]rank=", argument)]
    if command:
        arguments = [command, *arguments]
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_help()
        return
    if arguments[0] == "--version":
        print(f"neuclip_ds {version('neuclip_ds')}")
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch logs a stack trace when a store's server stops
    let_idle_threads_sleep()
    atexit.register(ignore_stop_signals)
    with exit_on_mistake():
        name = arguments[0]
        if name not in COMMANDS:
            raise UserError(f"Unknown command {name}{nearest(name, COMMANDS) or '.'} Commands: {', '.join(COMMANDS)}.")
        module = importlib.import_module(f"neuclip_ds.cli.{name.replace('-', '_')}")
        module.main(arguments[1:])


def _print_help() -> None:
    print("usage: neuclip-ds COMMAND [arguments]")
    print("\nTrain, evaluate and export CLIP models on DeepSpeed.")
    print("\nCommands:")
    for name, meaning in COMMANDS.items():
        print(f"  {name:<18}{meaning}")
    print(
        "\n`neuclip-ds COMMAND --help` lists the options of a command, and `neuclip-ds --version` prints the version."
    )
