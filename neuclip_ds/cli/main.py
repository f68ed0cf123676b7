"""`neuclip-ds COMMAND`: import the command that is named, and no other, and run it."""

import importlib
import re
import sys
from collections.abc import Sequence
from types import ModuleType

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.distributed.environment import has_gpu_devices, refuse_missing_gpus
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import nearest

COMMANDS = {
    "train": "train a model from a recipe",
    "evaluate": "score a model on DataComp's evaluation sets or your own",
    "export": "write a trained model for transformers, open_clip or ONNX",
    "push": "upload an exported model to the hub",
    "compare": "overlay the curves of several runs on one page",
    "watch": "serve the page of runs while they train",
    "nearest-captions": "write a page of images with the captions nearest to them",
    "embed": "write the features of all samples of a data set",
    "filter": "select samples by similarity or another column",
    "nearest": "find the samples nearest to a text or an image",
    "pack": "pack tables of pairs or Hugging Face datasets into shards",
    "build-manifest": "index the shards of a data set",
    "make-demo-data": "render the demo data set",
    "doctor": "examine machines before a run: what is wrong, and the fix",
    "plan": "predict step time, memory and cost of a run on more nodes",
    "simulate-data": "simulate how nodes are supplied with shards",
    "profile": "measure computation, communication and overlap of a training step",
    "tune-deepspeed": "measure DeepSpeed settings on this machine and choose the best",
    "reproduce": "repeat the papers' comparisons in miniature",
}


def main(argv: Sequence[str] | None = None, command: str = "") -> None:
    """Run a command, named or the first argument.

    The exit code is 0, 1 (training failed), 2 (a mistake in the input) or 128 + the signal that stopped it. The rank
    that launchers add as an argument (`--local_rank=0`) is dropped: the environment holds it, too.
    """
    given = [*filter(None, [command]), *(sys.argv[1:] if argv is None else argv)]
    arguments = [argument for argument in given if not re.match(r"--local[-_]rank=", argument)]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    with exit_on_mistake():
        if not has_gpu_devices():  # a second before torch could tell
            refuse_missing_gpus()
        _command(arguments[0]).main(arguments[1:])


def _command(name: str) -> ModuleType:
    if name not in COMMANDS:
        raise UserError(f"Unknown command {name}{nearest(name, COMMANDS) or '.'} Commands: {', '.join(COMMANDS)}.")
    return importlib.import_module(f"neuclip_ds.cli.{name.replace('-', '_')}")


def _help() -> str:
    lines = [f"  {name:<18}{meaning}" for name, meaning in COMMANDS.items()]
    usage = "usage: neuclip-ds COMMAND [arguments]\n\nTrain, evaluate and export CLIP models on DeepSpeed."
    return "\n".join(
        [usage, "", "Commands:", *lines, "", "`neuclip-ds COMMAND --help` lists the options of a command."]
    )
