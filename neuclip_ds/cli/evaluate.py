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
    from neuclip_ds.checkpoint.saved_model import SavedModel
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.evaluation.tasks import Task

log = logging.getLogger(__name__)

_TAR = ".tar"
_SEPARATOR = "::"  # between the parts of a source of pairs, as in `data.train`


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

    is_rank_zero = read_environment().rank == 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if is_rank_zero else logging.ERROR)
    task = "\n".join(f"{name}: {value}" for name, value in vars(options).items())
    with process_group(task) as communicator:
        summary = score(options, communicator)
    if is_rank_zero:
        print(summary)


def _partition(paths: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split the paths into named sources of pairs (in a form that `data.val` accepts) and evaluation sets.

    Tar files that are listed individually form one source.
    """
    from neuclip_ds.data.manifest_file import is_manifest  # pyarrow takes a moment to import

    tars: list[str] = []
    sources: list[str] = []
    sets: list[str] = []
    for path in paths:
        is_joined = _SEPARATOR in path
        if path.endswith(_TAR) and not is_joined:
            tars.append(path)
        elif is_joined or path.startswith("demo:") or is_manifest(path) or any(Path(path).glob(f"*{_TAR}")):
            sources.append(path)
        else:
            sets.append(path)
    if tars:
        sources.insert(0, _SEPARATOR.join(tars))

    named_sources: list[tuple[str, str]] = []
    for source in sources:
        first_path = Path(source.partition(_SEPARATOR)[0]).absolute()
        name = first_path.parent.name if first_path.suffix == _TAR else first_path.name
        named_sources.append((name, source))
    return named_sources, sets


def _results_folder(out: Path | None, saved: SavedModel) -> Path:
    """Return the folder for results: --out, or by default a folder in the run."""
    if out is not None:
        return out
    if saved.checkpoint is None:
        raise UserError(f"{saved.name} is not a run of this project: name a folder for its scores with --out.")
    run = saved.checkpoint.parent.parent
    return run / "evaluation" / Path(saved.name).name


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
    device = communicator.device
    batch_size = max(1, options.batch_size)

    # the tasks, each with the path of its data: evaluation sets on disk, and sources of pairs
    task_list = load_tasks()
    sources, sets = communicator.on_rank_zero(lambda: _partition(options.data))
    tasks: list[tuple[Task, Path]] = []
    if sets:
        tasks += task_list.on_disk_of_all([Path(path) for path in sets], options.tasks, communicator)
    tasks += [(Task.own(name, "retrieval"), Path(source)) for name, source in sources]
    name, count = Counter(task.name for task, _ in tasks).most_common(1)[0]
    if count > 1:
        raise UserError(f"{count} of the sets and sources of pairs in --data are called {name}; rename all but one.")

    folder = _results_folder(options.out, saved)
    identity = {"model": saved.name, "precision": options.precision}
    captions = saved.config.data.captions if saved.config else ["txt"]
    data = validate({"data": {"workers": options.workers, "captions": captions}}).data
    manifests = {}  # of the sources of pairs, by key of the task
    for name, source in sources:
        manifests[Task.own(name, "retrieval").key] = open_data(source, data, communicator, folder)

    def contents(task: Task, path: Path) -> str | None:
        """Return a string that identifies the data of a task, or None for a DataComp task."""
        if task.key in manifests:
            return f"{path}: {manifests[task.key].content_hash}"
        return f"{path.resolve()}: {open_set(path).contents}" if task.source is None else None

    def find_unscored() -> list[str]:
        """Return the keys of tasks that need a score. A user's own set is scored again if its files have changed."""
        known = Results(folder, identity)
        keys: list[str] = []
        for task, path in tasks:
            if task.key in known.metrics and known.data.get(task.key) == contents(task, path):
                log.info("%s: has a score in %s", task.name, folder)
                continue
            keys.append(task.key)
            size = None if task.size is None else sum(1 for _ in open_shards(path).samples())
            if size != task.size:
                log.warning("%s: %s has %d samples, but the published set has %d", task.name, path, size, task.size)
        return keys

    unscored = communicator.on_rank_zero(find_unscored)
    results = Results(folder, identity) if communicator.rank == 0 else None

    # the model, and one loader for the pairs of all sources
    encode = encoder_of(saved.model.to(device, getattr(torch, options.precision)), device)
    transform = EvalTransform(saved.preprocessing.size, saved.preprocessing.squash)
    loading = loader_options(data, communicator, *manifests.values())
    datasets = {}
    for key, manifest in manifests.items():
        datasets[key] = PairDataset(manifest, transform, saved.tokenizer, 0, captions, loading.cache)
    with closing(Loader(loading, datasets)) as loader:
        prefixes = tuple(saved.config.objective.prefixes) if saved.config else ()
        encoder = BatchEncoder(encode, saved.tokenizer, communicator, batch_size, transform, loader, prefixes)
        for task, path in tasks:
            if task.key not in unscored:
                continue
            started = time.perf_counter()
            if task.key in manifests:
                jobs = eval_jobs(manifests[task.key], communicator.rank, communicator.world_size, batch_size)
                metrics = measure_pairs(loader.batches(task.key, jobs), encoder)
            else:
                metrics = measure(task, path, encoder)
            if results is not None:
                results.add(task, metrics, contents(task, path))
                seconds = time.perf_counter() - started
                log.info("%s: %s %s (%.0f s)", task.name, task.metric, metrics["main_metric"], seconds)

    if results is None:
        return ""
    summary = summary_text(task_list.with_scored(results.metrics), results.metrics)
    averages_by_name = {}
    for name, average in averages(task_list, results.metrics).items():
        averages_by_name[name] = {
            "value": average.value,
            "partial": average.partial,
            "missing": average.missing,
            "tasks": average.tasks,
        }
    (folder / "averages.json").write_text(json.dumps(averages_by_name, indent=2) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(summary + "\n", encoding="utf-8")
    return summary
