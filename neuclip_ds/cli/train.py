"""Train a CLIP model from a recipe: a name in neuclip_ds/recipes/, or the path of a YAML file; by default the demo.

Examples:
  neuclip-ds train demo --optimizer.lr=1e-3
  neuclip-ds train vitb32_tuneclip --model.pretrained=/weights/clip-vit-base-patch32 --data.train=/data/dfn12m
  neuclip-ds train cc12m_neuclip --data.train=manifests/cc12m --dry-run --hostfile=hostfiles/8node
  deepspeed --num_gpus 8 --module neuclip_ds train cc12m_neuclip --data.train=manifests/cc12m
  torchrun --nproc-per-node 8 -m neuclip_ds train cc12m_neuclip --data.train=manifests/cc12m

The same command resumes a run that was stopped. In a checkout, `train.py` does the same as `neuclip-ds train`.
"""

import logging
from collections.abc import Sequence
from typing import Any

from neuclip_ds.cli.early_checks import check_run
from neuclip_ds.cli.train_help import requested_help
from neuclip_ds.config import dump
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.recipe import parse

log = logging.getLogger(__name__)


def main(arguments: Sequence[str], hooks: Sequence[Any] = ()) -> None:
    """Run the command; `hooks` (`neuclip_ds.Hook`) are added to those of the config."""
    text = requested_help(arguments, __doc__ or "")
    if text is not None:
        print(text)
        return
    asked, config = parse(arguments)
    environment = read_environment()
    if asked.recipe is None and environment.rank == 0:
        log.warning("No recipe is named, so this runs the recipe demo, a smoke test of the machine or the cluster.")
    if asked.print_config:
        print(dump(config), end="")
        return
    if asked.dry_run:
        from neuclip_ds.planning.dry_run import print_dry_run

        print_dry_run(config, environment, asked.hostfile, asked.gpu_memory)
        return
    check_run(config)
    # torch and deepspeed take seconds to import, so the config is checked first
    from neuclip_ds.api import train

    train(config, hooks=hooks)
