"""Score a model on DataComp's evaluation sets, on your own sets and on shards of pairs.

Examples:
  neuclip-ds evaluate runs/cc3m_neuclip --data /data/evalsets
  neuclip-ds evaluate runs/cc3m_neuclip --data /data/images_by_class /data/pairs.csv manifests/mine_val
  deepspeed --module neuclip_ds evaluate runs/cc3m_neuclip --data /data/evalsets --tasks 'imagenet*'
  mpirun -n 8 neuclip-ds evaluate openai/clip-vit-base-patch32 --data /data/evalsets --out scores/openai_b32

A set of your own is a folder with one subfolder of images per class, a file of pairs (.csv, .tsv, .jsonl, .parquet),
or a folder of any name in CLIP_benchmark's webdataset layout. Shards of pairs are tar files, a folder of tar files or
a manifest, as in `data.val`. Tasks with a score in the results folder are not scored again.
docs/how-to/evaluate.md explains the tasks, their metrics and where to get the data.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.cli.early_checks import check_model, check_path
from neuclip_ds.cli.program import Parser
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.errors import UserError

if TYPE_CHECKING:  # torch and deepspeed take seconds to import
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.evaluation.tasks import Task

log = logging.getLogger(__name__)

_TAR, _BETWEEN = ".tar", "::"


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds evaluate", description=__doc__)
    parser.add_argument("model", help="a run's folder (its newest checkpoint), a checkpoint, or a pretrained model")
    parser.add_argument("--data", nargs="+", required=True, help="evaluation sets, folders of sets, or shards of pairs")
    parser.add_argument("--tasks", nargs="+", default=[], help="names, keys or patterns of tasks (default: all found)")
    parser.add_argument("--out", type=Path, help="folder for results (default: RUN/evaluation/STEP)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows that each rank encodes at once")
    parser.add_argument("--workers", type=int, default=4, help="loader processes per rank; 0 loads in the main process")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="dtype of the towers")
    parser.add_argument("--ema", action="store_true", help="score the moving average of a run's weights (ema.decay)")
    options = parser.parse(arguments)
    check_model("MODEL", options.model)
    for path in options.data:
        check_path("--data", path)
    from neuclip_ds.distributed.launch import process_group

    first = read_environment().rank == 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if first else logging.ERROR)
    with process_group("\n".join(f"{name}: {value}" for name, value in vars(options).items())) as communicator:
        text = score(options, communicator)
    if first:
        print(text)


def _partition(places: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split the paths into named sources of pairs (in a form that `data.val` accepts) and evaluation sets.

    Tar files that are listed individually form one source.
    """
    from neuclip_ds.data.manifest_file import is_manifest  # pyarrow takes a moment to import

    tars = [place for place in places if place.endswith(_TAR) and _BETWEEN not in place]
    sources, sets = [_BETWEEN.join(tars)] if tars else [], list[str]()
    for place in (place for place in places if place not in tars):
        is_joined = _BETWEEN in place or place.startswith("demo:")
        has_pairs = is_joined or is_manifest(place) or next(Path(place).glob(f"*{_TAR}"), None)
        (sources if has_pairs else sets).append(place)
    firsts = [Path(source.partition(_BETWEEN)[0]).absolute() for source in sources]
    names = [first.parent.name if first.suffix == _TAR else first.name for first in firsts]
    return list(zip(names, sources, strict=True)), sets


def score(options: argparse.Namespace, communicator: Communicator) -> str:
    """Score a model on all unscored tasks; return the summary on rank 0. Raise UserError if an input is unusable."""
    import torch

    from neuclip_ds.checkpoint.saved_model import open_model
    from neuclip_ds.data.dataset import PairDataset
    from neuclip_ds.data.images import EvalTransform
    from neuclip_ds.data.loader import Loader, eval_jobs
    from neuclip_ds.data.open_data import loader_options, open_data
    from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
    from neuclip_ds.evaluation.results import Results, averages, summary_text
    from neuclip_ds.evaluation.sets import open_set, open_shards
    from neuclip_ds.evaluation.suite import measure, measure_pairs
    from neuclip_ds.evaluation.tasks import Task, load_tasks
    from neuclip_ds.recipe import validate

    saved = open_model(options.model, communicator, options.ema)
    tasks, device = load_tasks(), communicator.device
    sources, sets = communicator.on_rank_zero(lambda: _partition(options.data))
    found = tasks.on_disk_of_all([*map(Path, sets)], options.tasks, communicator) if sets else []
    found += [(Task.own(name, "retrieval"), Path(source)) for name, source in sources]
    name, count = Counter(task.name for task, _ in found).most_common(1)[0]
    if count > 1:
        raise UserError(f"{count} of the sets and sources of pairs in --data are called {name}; rename all but one.")
    folder = options.out
    if folder is None:
        if saved.checkpoint is None:
            raise UserError(f"{saved.name} is not a run of this project: name a folder for its scores with --out.")
        folder = saved.checkpoint.parent.parent / "evaluation" / Path(saved.name).name
    identity = {"model": saved.name, "precision": options.precision}
    captions = saved.config.data.captions if saved.config else ["txt"]
    data = validate({"data": {"workers": options.workers, "captions": captions}}).data
    shards = {
        Task.own(name, "retrieval").key: open_data(source, data, communicator, folder) for name, source in sources
    }

    def contents(task: Task, place: Path) -> str | None:
        """Return a string that identifies the data of a task, or None for a DataComp task."""
        if task.key in shards:
            return f"{place}: {shards[task.key].content_hash}"
        return f"{place.resolve()}: {open_set(place).contents}" if task.source is None else None

    def unscored() -> list[str]:
        """Return the keys of tasks that need a score. A user's own set is scored again if its files have changed."""
        known, keys = Results(folder, identity), []
        for task, place in found:
            if task.key in known.metrics and known.data.get(task.key) == contents(task, place):
                log.info("%s: has a score in %s", task.name, folder)
                continue
            keys.append(task.key)
            size = None if task.size is None else sum(1 for _ in open_shards(place).samples())
            if size != task.size:
                log.warning("%s: %s has %d samples, but the published set has %d", task.name, place, size, task.size)
        return keys

    wanted = communicator.on_rank_zero(unscored)
    results = Results(folder, identity) if communicator.rank == 0 else None
    encode = encoder_of(saved.model.to(device, getattr(torch, options.precision)), device)
    transform = EvalTransform(saved.preprocessing.size, saved.preprocessing.squash)
    loading, size = loader_options(data, communicator, *shards.values()), max(1, options.batch_size)
    pairs = {
        key: PairDataset(manifest, transform, saved.tokenizer, 0, captions, loading.cache)
        for key, manifest in shards.items()
    }
    with closing(Loader(loading, pairs)) as loader:
        encoder = BatchEncoder(encode, saved.tokenizer, communicator, size, transform, loader)
        for task, place in found:
            if task.key not in wanted:
                continue
            began = time.perf_counter()
            if task.key in shards:
                jobs = eval_jobs(shards[task.key], communicator.rank, communicator.world_size, size)
                metrics = measure_pairs(loader.batches(task.key, jobs), encoder)
            else:
                metrics = measure(task, place, encoder)
            if results is not None:
                results.add(task, metrics, contents(task, place))
                seconds = time.perf_counter() - began
                log.info("%s: %s %s (%.0f s)", task.name, task.metric, metrics["main_metric"], seconds)
    if results is None:
        return ""
    text = summary_text(tasks.with_scored(results.metrics), results.metrics)
    tree = {name: average._asdict() for name, average in averages(tasks, results.metrics).items()}
    (folder / "averages.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(text + "\n", encoding="utf-8")
    return text
