"""Run one rank of open_clip's training program on a config of this project, for tools/benchmark_step.py.

`open_clip_train.main` runs with four changes. Its model combines this project's timm trunk with open_clip's text tower
of the same size. Random pairs can replace its loader. On CPUs, DistributedDataParallel receives no device, because it
accepts only GPUs. webdataset 1.0 omits its marks at the ends of shards, which open_clip, written for version 0.2,
cannot read.

The program supports open_clip version 3 and the main branch of June 2026, in which batches are dictionaries. On the
main branch, the option --length-bucketing sorts captions by length. If --flags contains this option, random captions
are prepared as in its best case: all of them are sorted, and each batch is cut after its longest caption.
"""

import argparse
import functools
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from benchmarking import initial_logit_scale, program_parser
from benchmarking.random_pairs import EOS, float_batches
from open_clip_train import data as loading
from open_clip_train import main as program
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel
from webdataset.tariterators import tar_file_expander

from neuclip_ds.config import Config
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.distributed.environment import RankEnvironment, read_environment
from neuclip_ds.models.image_models import new_vision_tower
from neuclip_ds.recipe import load_recipe, validate

FACTS = "facts.json"
_NAME = "benchmark_dual_encoder"
_BUCKETING = "--length-bucketing"


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--flags", default="", help="more options of open_clip, as one string")
    arguments = parser.parse_args()
    config = validate(load_recipe(str(arguments.config)))
    environment = read_environment()
    if arguments.random:
        program.get_data = lambda *_, **__: {"train": random_pairs(config, arguments, environment)}
        program.get_tokenizer = lambda *_, **__: None  # its default tokenizer's special ids differ from random tokens'
    if not torch.cuda.is_available():
        torch.nn.parallel.DistributedDataParallel = _without_device  # type: ignore[misc,assignment]
    loading.tar_file_expander = functools.partial(tar_file_expander, eof_value=None)
    facts = arguments.out / FACTS if environment.rank == 0 else None
    make = program.create_model_and_transforms
    program.create_model_and_transforms = lambda *args, **options: _with_size_written(make(*args, **options), facts)
    with tempfile.TemporaryDirectory() as folder:
        add_model(config, Path(folder), variable_text=buckets_by_length(arguments))
        program.main(command_line(config, arguments, environment.world_size))


def buckets_by_length(arguments: argparse.Namespace) -> bool:
    return _BUCKETING in shlex.split(arguments.flags)


def add_model(config: Config, folder: Path, variable_text: bool = False) -> None:
    """Register the model with open_clip under the name `benchmark_dual_encoder`.

    Args:
        config: the config of the run.
        folder: folder for the description of the model.
        variable_text: whether batches may have captions shorter than the context; only in open_clip's main branch.
    """
    tower = new_vision_tower(config.model.vision, config.model.embed_dim)

    def benchmark_vision(pretrained: bool = False, **_: Any) -> nn.Module:
        torch.manual_seed(config.run.seed)
        return new_vision_tower(config.model.vision, config.model.embed_dim).trunk

    timm.models.register_model(benchmark_vision)
    vision = config.model.vision
    text = config.model.text
    description: dict[str, Any] = {
        "embed_dim": config.model.embed_dim,
        "quick_gelu": "quickgelu" in vision.name,
        "init_logit_scale": initial_logit_scale(config),
        "vision_cfg": {
            "timm_model_name": benchmark_vision.__name__,
            "timm_pool": "",
            "timm_proj": "linear" if isinstance(tower.projection, nn.Linear) else "",
            "image_size": vision.resolved_image_size(),
        },
        "text_cfg": {
            "context_length": text.resolved_context_length(),
            "vocab_size": text.vocab_size,
            "width": text.width,
            "heads": text.heads,
            "layers": text.layers,
            "hf_tokenizer_name": text.tokenizer,
            "pool_type": "eos",
            "eos_id": EOS,
        },
    }
    if variable_text:
        description["text_cfg"]["variable_text"] = True
    path = folder / f"{_NAME}.json"
    path.write_text(json.dumps(description), encoding="utf-8")
    open_clip.add_model_config(path)


def command_line(config: Config, arguments: argparse.Namespace, world_size: int) -> list[str]:
    """Return open_clip's options for the config; one epoch in open_clip is as long as the run."""
    data = config.data
    optimizer = config.optimizer
    steps = config.max_steps or 0
    options: dict[str, Any] = {
        "model": _NAME,
        "name": arguments.out.name,
        "logs": arguments.out.parent,
        "dataset-type": "webdataset",
        "train-data": "synthetic" if arguments.random else "::".join(resolve_shards("::".join(data.train_paths))),
        "train-num-samples": steps * data.batch_size,
        "batch-size": config.rank_batch(world_size),
        "workers": data.workers,
        "epochs": 1,
        "lr": optimizer.lr,
        "wd": optimizer.weight_decay,
        "beta1": optimizer.betas[0],
        "beta2": optimizer.betas[1],
        "eps": optimizer.eps,
        "warmup": optimizer.warmup_steps,
        "precision": "amp_bf16" if arguments.bf16 else "fp32",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "seed": config.run.seed,
        "log-every-n-steps": config.run.log_every,
        "report-to": "tensorboard",
        "aug-cfg": f"scale=({data.crop_scale},1.0)",
    }
    if optimizer.max_grad_norm:
        options["grad-clip-norm"] = optimizer.max_grad_norm
    flags = ["--local-loss", "--gather-with-grad", "--dataset-resampled"]
    arguments_of_options = []
    for name, value in options.items():
        arguments_of_options += [f"--{name}", str(value)]
    return [*flags, *arguments_of_options, *shlex.split(arguments.flags)]


class _Repeated(list[Any]):
    """A list of batches with the attributes that open_clip expects of a loader."""

    num_batches = num_samples = 0


def random_pairs(config: Config, arguments: argparse.Namespace, environment: RankEnvironment) -> loading.DataInfo:
    """Return a loader that repeats random batches for every step of the run."""
    ranks = environment.world_size
    pairs = float_batches(config, config.rank_batch(ranks), arguments.caption_tokens, environment.rank, ranks)
    if buckets_by_length(arguments):
        pairs = sorted_by_length(pairs)
    batches: list[Any] = list(pairs)
    if hasattr(open_clip, "create_task"):  # the main branch
        batches = [{"image": image, "text": tokens} for image, tokens in pairs]
    steps = config.max_steps or 0
    loader = _Repeated(batches[number % len(batches)] for number in range(steps))
    loader.num_batches = steps
    loader.num_samples = steps * config.data.batch_size
    return loading.DataInfo(loader)


def sorted_by_length(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Sort the captions of all batches by length, and cut each batch after its longest caption."""
    tokens = torch.cat([tokens for _, tokens in pairs])
    lengths = tokens.eq(EOS).int().argmax(dim=1) + 1
    sorted_lengths, order = lengths.sort()
    result = []
    start = 0
    for image, _ in pairs:
        stop = start + len(image)
        longest = int(sorted_lengths[stop - 1])
        cut = tokens[order[start:stop], :longest].contiguous()
        result.append((image, cut.pin_memory() if image.is_pinned() else cut))
        start = stop
    return result


def _without_device(model: nn.Module, device_ids: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def _with_size_written(made: tuple[Any, ...], facts: Path | None) -> tuple[Any, ...]:
    """Write the number of parameters of open_clip's model to `facts`, if it is not None; return `made` unchanged."""
    if facts is not None:
        count = sum(parameter.numel() for parameter in made[0].parameters())
        facts.write_text(json.dumps({"parameters": count}), encoding="utf-8")
    return made


if __name__ == "__main__":
    main()
