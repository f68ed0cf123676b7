"""Score a model on DataComp's evaluation sets, on your own sets and on shards of pairs.

Examples:
  neuclip-ds evaluate runs/cc3m_neuclip --data /data/evalsets
  neuclip-ds evaluate runs/cc3m_neuclip --data /data/images_by_class /data/pairs.csv manifests/mine_val
  deepspeed --module neuclip_ds evaluate runs/cc3m_neuclip --data /data/evalsets --tasks 'imagenet*'
  mpirun -n 8 neuclip-ds evaluate openai/clip-vit-base-patch32 --data /data/evalsets --out scores/openai_b32
  neuclip-ds evaluate runs/tuned --blend 0,0.25,0.5,0.75,1 --data /data/evalsets

A set of your own is a folder with one subfolder of images per class, a file of pairs (.csv, .tsv, .jsonl, .parquet),
or a folder of any name in CLIP_benchmark's webdataset layout. Shards of pairs are tar files, a folder of tar files or
a manifest, as in `data.val`. NAME=PATH names a set; by default, its name is that of its folder or file. Tasks with a
score in the results folder are scored again only if their data has changed.

--blend scores averages of a fine-tuned run's initial weights (0) and final weights (1). For each average, it prints the
recall on the run's validation pairs, or the score of the task in --target, and the mean score of all other tasks.
docs/how-to/evaluate.md explains the tasks, their metrics and where to get the data.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.cli.early_checks import check_model, check_path
from neuclip_ds.cli.program import Parser, fraction, local_path
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.errors import UserError
from neuclip_ds.files import exists, expand_user, seen_from_here

if TYPE_CHECKING:  # torch and deepspeed take seconds to import
    from neuclip_ds.checkpoint.saved_model import SavedModel
    from neuclip_ds.config import Config, DataConfig
    from neuclip_ds.data.manifest import Manifest
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.evaluation.results import Results
    from neuclip_ds.evaluation.suite import Metrics
    from neuclip_ds.evaluation.tasks import Task, TaskList

log = logging.getLogger(__name__)

_TAR = ".tar"
_NAMED = re.compile(r"([\w .-]+)=(.+)")  # NAME=PATH
_SEPARATOR = "::"  # between the parts of a source of pairs, as in `data.train`
_LAYOUT = ", layout "  # before the hash of the samples' layout, in the string that identifies pairs
_VALIDATION = "validation"  # name of the task of a run's validation pairs


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line; the names in NAME=PATH are separated from the paths."""

    model: str
    data: list[str]  # paths of evaluation sets, of folders of sets, and of shards of pairs
    names: dict[str, str]  # path in `data` -> name, for the paths that were given a name
    tasks: list[str]
    out: Path | None
    batch_size: int
    workers: int
    precision: str
    best: bool
    ema: bool
    blend: list[float]  # empty without --blend
    target: str | None


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds evaluate", description=__doc__)
    parser.add_argument(
        "model", type=expand_user, help="a run's folder (its newest checkpoint), a checkpoint, or a pretrained model"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        help="evaluation sets, folders of sets, or shards of pairs; NAME=PATH gives a set or the shards a name",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        help="names, keys or patterns of evaluation sets to score (default: all); shards of pairs are always scored",
    )
    parser.add_argument(
        "--out",
        type=local_path,
        help="folder for results (default for a run: RUN/evaluation/CHECKPOINT; other models need --out)",
    )
    parser.add_argument("--batch-size", type=int, default=256, help="images or captions that each rank encodes at once")
    parser.add_argument("--workers", type=int, default=4, help="loader processes per rank; 0 loads in the main process")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="dtype of the towers")
    parser.add_argument("--best", action="store_true", help="score a run's best checkpoint (run.best_metric)")
    parser.add_argument("--ema", action="store_true", help="score the moving average of a run's weights (ema.decay)")
    blend_help = "blends to score, such as 0,0.5,1: averages of a run's initial weights (0) and final weights (1)"
    parser.add_argument("--blend", type=_fractions, default=[], metavar="FRACTIONS", help=blend_help)
    target_help = "with --blend: task to compare with all others (default: the run's validation pairs)"
    parser.add_argument("--target", metavar="TASK", help=target_help)
    parsed = parser.parse(arguments)
    if parsed.target is not None and not parsed.blend:
        raise UserError("--target has no effect without --blend: add --blend, or omit --target.")
    check_model("MODEL", parsed.model)
    paths = []
    names = {}
    for text in parsed.data:
        name, path = _named(text)
        paths.append(path)
        if name:
            names[path] = name
        check_path("--data", path)
    options = Options(**{**vars(parsed), "data": paths, "names": names})
    from neuclip_ds.distributed.launch import process_group

    is_rank_zero = read_environment().rank == 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if is_rank_zero else logging.ERROR)
    task = "\n".join(f"{name}: {value}" for name, value in vars(parsed).items())
    with process_group(task) as communicator:
        summary = score_blends(options, communicator) if options.blend else score(options, communicator)
    if is_rank_zero:
        print(summary)


def _fractions(text: str) -> list[float]:
    """Parse comma-separated numbers from 0 to 1, and return them sorted, without duplicates."""
    return sorted({fraction(part) for part in text.split(",")})


def _named(text: str) -> tuple[str, str]:
    """Split NAME=PATH; the name is empty if the text is an existing path or does not have this form."""
    match = _NAMED.fullmatch(text)
    if match is None or exists(text):
        return "", expand_user(text)
    return match[1], expand_user(match[2])


def _partition(paths: Sequence[str], names: Mapping[str, str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split the paths into named sources of pairs (in a form that `data.val` accepts) and evaluation sets.

    Tar files that are listed individually form one source, unless `names`, which maps paths to names, contains them.
    """
    from neuclip_ds.data.listing import is_visible
    from neuclip_ds.data.manifest_file import is_manifest  # pyarrow takes a moment to import

    tars: list[str] = []
    sources: list[str] = []
    sets: list[str] = []
    for path in paths:
        is_joined = _SEPARATOR in path
        if path.endswith(_TAR) and not is_joined and path not in names:
            tars.append(path)
        elif (
            is_joined
            or path.endswith(_TAR)
            or path.startswith("demo:")
            or is_manifest(path)
            or any(is_visible(tar.name) for tar in Path(path).glob(f"*{_TAR}"))
        ):
            sources.append(path)
        else:
            sets.append(path)
    if tars:
        sources.insert(0, _SEPARATOR.join(tars))

    named_sources: list[tuple[str, str]] = []
    for source in sources:
        first_path = Path(source.partition(_SEPARATOR)[0]).absolute()
        name = first_path.parent.name if first_path.suffix == _TAR else first_path.name
        named_sources.append((names.get(source, name), source))
    return named_sources, sets


def _results_folder(out: Path | None, name: str, checkpoint: Path | None) -> Path:
    """Return the folder for results: --out, or by default RUN/evaluation/CHECKPOINT.

    Raises UserError if the model is not a run's and --out is not set.
    """
    if out is not None:
        return out
    if checkpoint is None:
        raise UserError(f"{name} is not a run of neuclip_ds: set --out to a folder for its scores.")
    return checkpoint.parent.parent / "evaluation" / Path(name).name


def _name_for(saved: SavedModel, folder: Path) -> str:
    """Return the name under which a folder of scores stores its model.

    In a run's own folder, the name is relative to the run, so that scores stay valid if the run is moved.
    """
    if saved.checkpoint is not None:
        run = saved.checkpoint.parent.parent
        if run.resolve() in folder.resolve().parents:
            return saved.name.removeprefix(f"{run}/")
    return saved.name


@dataclass(frozen=True, kw_only=True)
class _TaskData:
    """The tasks to score, and the pairs of those tasks that are not evaluation sets on disk."""

    task_list: TaskList
    tasks: list[tuple[Task, Path]]  # each with the path of its data
    manifests: dict[str, Manifest]  # of the sources of pairs, by key of the task
    options: DataConfig  # how to read the pairs

    def contents(self, task: Task, path: Path) -> str:
        """Return a string that identifies a task's data; for a set on disk, it depends on modification times."""
        from neuclip_ds.evaluation.suite import open_task_set

        if task.key in self.manifests:
            manifest = self.manifests[task.key]
            layout = manifest.layout_of_first(manifest.n_shards)
            contents = f"{path}: {manifest.content_hash}"
            return contents if layout is None else f"{contents}{_LAYOUT}{layout}"
        fingerprint = open_task_set(task, path).fingerprint()
        return fingerprint if task.source is not None else f"{path.resolve()}: {fingerprint}"


def _open_tasks(options: Options, config: Config | None, folder: Path, communicator: Communicator) -> _TaskData:
    """Open the tasks in --data on all ranks.

    Raises UserError if a task cannot be used, if two tasks have the same name, or if a name in --tasks matches no
    evaluation set in --data.

    Args:
        options: what to score.
        config: config of the run that trained the model, or None if there is no such run.
        folder: folder for the manifests that have to be built.
        communicator: communicator between the ranks.
    """
    from neuclip_ds.data.open_data import open_data
    from neuclip_ds.evaluation.tasks import Task, load_tasks
    from neuclip_ds.recipe import validate

    task_list = load_tasks()
    sources, sets = communicator.value_from_rank_zero(
        tuple[list[tuple[str, str]], list[str]], lambda: _partition(options.data, options.names)
    )
    if options.tasks and not sets:
        raise UserError(
            "--tasks has no effect, because --data contains only shards of pairs, which are always scored: omit "
            "--tasks, or add evaluation sets to --data."
        )
    tasks: list[tuple[Task, Path]] = []
    if sets:
        own_names = {Path(path): options.names[path] for path in sets if path in options.names}
        tasks += task_list.on_disk_of_all([Path(path) for path in sets], options.tasks, communicator, own_names)
    tasks += [(Task.own(name, "retrieval"), Path(source)) for name, source in sources]
    name, count = Counter(task.name for task, _ in tasks).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{count} of the sets and sources of pairs in --data are called {name}; pass them as NAME=PATH, with "
            "different names."
        )

    captions = config.data.captions if config else ["txt"]
    data = validate({"data": {"workers": options.workers, "captions": captions}}).data
    manifests = {}
    for name, source in sources:
        manifests[Task.own(name, "retrieval").key] = open_data(source, data, communicator, folder)
    return _TaskData(task_list=task_list, tasks=tasks, manifests=manifests, options=data)


def score(options: Options, communicator: Communicator) -> str:
    """Score a model on all tasks without an up-to-date score.

    Returns the summary of all scores in the results folder on rank 0, and an empty string on the other ranks.

    Raises UserError if an input is unusable.
    """
    from neuclip_ds.checkpoint.saved_model import open_model
    from neuclip_ds.evaluation.results import summary_text

    saved = open_model(_name_of_model(options, communicator), communicator, options.ema)
    folder = _results_folder(options.out, saved.name, saved.checkpoint)
    data = _open_tasks(options, saved.config, folder, communicator)
    metrics = _score_model(saved, data, folder, options, communicator)
    return summary_text(data.task_list.with_scored(metrics), metrics) if communicator.rank == 0 else ""


def _name_of_model(options: Options, communicator: Communicator) -> str:
    """Return the name of the model to open: MODEL or, with --best, the best checkpoint of that run."""
    from neuclip_ds.checkpoint.saved_model import find_best_checkpoint

    if not options.best:
        return options.model
    return communicator.on_rank_zero(lambda: str(find_best_checkpoint(Path(options.model))))


def _score_model(
    saved: SavedModel, data: _TaskData, folder: Path, options: Options, communicator: Communicator
) -> dict[str, Metrics]:
    """Score a model on all tasks without an up-to-date score in a folder, and write the scores there.

    Returns the metrics of all tasks in the folder, by key, on rank 0, and an empty dict on the other ranks.
    """
    import torch

    from neuclip_ds.data.dataset import PairDataset
    from neuclip_ds.data.images import EvalTransform
    from neuclip_ds.data.loader import Loader, eval_jobs
    from neuclip_ds.data.open_data import loader_options
    from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
    from neuclip_ds.evaluation.results import Results
    from neuclip_ds.evaluation.suite import measure, measure_pairs
    from neuclip_ds.models.weights_hash import weights_hash
    from neuclip_ds.reporting.metrics import percent

    device = communicator.device
    batch_size = max(1, options.batch_size)

    def identify() -> dict[str, str]:
        # a run that was trained again, or an export to the same folder, has the same name but other weights
        weights = weights_hash(saved.model, with_adapters=True)
        return {"model": _name_for(saved, folder), "precision": options.precision, "weights": weights}

    identity = communicator.on_rank_zero(identify)

    def find_unscored() -> dict[str, str]:
        known = Results(folder, identity, saved.name)  # version 0.1 stored the absolute path of a checkpoint
        return _find_unscored(data, known, folder)

    unscored = communicator.on_rank_zero(find_unscored)
    results = Results(folder, identity) if communicator.rank == 0 else None

    # the model, and one loader for the pairs of all sources
    encode = encoder_of(saved.model.to(device, getattr(torch, options.precision)), device)
    transform = EvalTransform.of(saved.preprocessing)
    loading = loader_options(data.options, communicator, *data.manifests.values())
    datasets = {}
    for key, manifest in data.manifests.items():
        datasets[key] = PairDataset(manifest, transform, saved.tokenizer, 0, data.options.captions, loading.cache)
    with closing(Loader(loading, datasets)) as loader:
        prefixes = tuple(saved.config.objective.prefixes) if saved.config else ()
        encoder = BatchEncoder(encode, saved.tokenizer, communicator, batch_size, transform, loader, prefixes)
        for task, path in data.tasks:
            if task.key not in unscored:
                continue
            started = time.perf_counter()
            if task.key in data.manifests:
                jobs = eval_jobs(data.manifests[task.key], communicator.rank, communicator.world_size, batch_size)
                metrics = measure_pairs(loader.batches(task.key, jobs), encoder)
            else:
                metrics = measure(task, path, encoder)
            if results is not None:
                results.add(task, metrics, unscored[task.key])
                seconds = time.perf_counter() - started
                score_in_percent = percent(metrics["main_metric"])
                log.info("%s: %s %s%% (%.0f s)", task.name, task.metric, score_in_percent, seconds)

    if results is None:
        return {}
    _write_summary(folder, data.task_list, results.metrics)
    return results.metrics


def _find_unscored(data: _TaskData, known: Results, folder: Path) -> dict[str, str]:
    """Return, by key, the string that identifies the data of each task that needs a score.

    These are the tasks without a score in `known`, the scores in the folder, and those whose data has changed since.
    """
    from neuclip_ds.evaluation.sets import open_shards

    unscored: dict[str, str] = {}
    for task, path in data.tasks:
        contents = data.contents(task, path)
        known_contents = known.data.get(task.key)
        # score files of DataComp do not identify the data of their tasks, and those of earlier versions may omit the
        # layout, or the data too
        without_layout = contents.partition(_LAYOUT)[0]
        is_identified = known_contents is not None or task.source is None
        is_current = known_contents in (contents, without_layout) or not is_identified
        if task.key in known.metrics and is_current:
            log.info("%s: already scored in %s", task.name, folder)
            continue
        unscored[task.key] = contents
        size = None if task.size is None else sum(1 for _ in open_shards(path).samples())
        if size != task.size:
            message = (
                "%s: %s contains %d samples, but the published set contains %d; do not compare its score with "
                "published scores"
            )
            log.warning(message, task.name, path, size, task.size)
    return unscored


def _write_summary(folder: Path, task_list: TaskList, metrics: Mapping[str, Metrics]) -> None:
    """Write averages.json and summary.md."""
    from neuclip_ds.evaluation.results import averages, summary_text
    from neuclip_ds.files import explain_disk

    averages_by_name = {}
    for name, average in averages(task_list, metrics).items():
        averages_by_name[name] = {
            "value": average.value,
            "partial": average.partial,
            "missing": average.missing,
            "tasks": average.tasks,
        }
    summary = summary_text(task_list.with_scored(metrics), metrics)
    with explain_disk(folder, "choose another --out"):
        (folder / "averages.json").write_text(json.dumps(averages_by_name, indent=2) + "\n", encoding="utf-8")
        (folder / "summary.md").write_text(summary + "\n", encoding="utf-8")


def score_blends(options: Options, communicator: Communicator) -> str:
    """Score the blends in --blend and, without --out, update the run's report.

    Returns a table on rank 0, and an empty string on the other ranks.

    Raises UserError if an input is unusable, or if the run's initial and final weights cannot be blended.
    """
    from neuclip_ds.checkpoint.blend import blend
    from neuclip_ds.checkpoint.saved_model import SavedModel, open_model, read_result, read_start
    from neuclip_ds.files import explain_disk
    from neuclip_ds.reporting.blends import Blends, BlendScores, ScoredTask
    from neuclip_ds.reporting.report import write_report

    saved = open_model(_name_of_model(options, communicator), communicator, options.ema)
    if saved.checkpoint is None or saved.config is None:
        raise UserError(
            f"{saved.name} is not a run of neuclip_ds, so it has no initial weights to blend with: omit --blend."
        )
    folder = _results_folder(options.out, saved.name, saved.checkpoint)
    data = _open_tasks(options, saved.config, folder, communicator)
    data, target = _with_target(data, options.target, saved.config, saved.checkpoint, communicator)
    start = read_start(saved.checkpoint, communicator)
    result = read_result(saved.checkpoint, options.ema)

    scores = []
    for weight in options.blend:
        model = saved
        if weight != 1:  # the result itself keeps its LoRA adapters, which are merged in the other blends
            blended = blend(start, result, weight)
            model = SavedModel(
                name=f"{saved.name}, blend {weight:g} with {start.name}",
                model=blended.build(),
                tokenizer=saved.tokenizer,
                preprocessing=saved.preprocessing,
                logits=blended.logits,
                config=saved.config,
                checkpoint=saved.checkpoint,
            )
        log.info("scoring blend %g", weight)
        metrics = _score_model(model, data, folder / f"blend_{weight:g}", options, communicator)
        if communicator.rank == 0:
            scores_by_key = {task.key: metrics[task.key]["main_metric"] for task, _ in data.tasks}
            scores.append(BlendScores.of(weight, target.key, scores_by_key))

    if communicator.rank > 0:
        return ""
    blends = Blends(
        start=start.name,
        result=saved.name,
        target=target.key,
        tasks={task.key: ScoredTask(name=task.name, metric=task.metric) for task, _ in data.tasks},
        blends=scores,
    )
    with explain_disk(folder, "choose another --out"):
        blends.write(folder)
    run = saved.checkpoint.parent.parent
    if options.out is None and (run / "metrics.jsonl").is_file():
        with explain_disk(run, "choose a folder for the scores with --out"):
            report = write_report(run)
        log.info("report: %s", seen_from_here(report))
    return blends.markdown()


def _with_target(
    data: _TaskData, name: str | None, config: Config, checkpoint: Path, communicator: Communicator
) -> tuple[_TaskData, Task]:
    """Return the tasks, and the one that is the target: the task `name` or, by default, the run's validation pairs.

    The validation pairs are added to the tasks if they are not among them.

    Raises UserError if `name` does not match exactly one task or, without `name`, if the run has no validation pairs or
    another set has their name.
    """
    from neuclip_ds.data.training_set import find_validation
    from neuclip_ds.evaluation.tasks import Task

    if name is not None:
        matches = [task for task, _ in data.tasks if task.matches(name)]
        if len(matches) != 1:
            names = ", ".join(task.name for task, _ in data.tasks)
            raise UserError(f"--target={name} matches {len(matches)} tasks; set it to one of {names}.")
        return data, matches[0]

    validation = str(find_validation(config.data, None))
    for task, path in data.tasks:
        if validation and path.resolve() == Path(validation).resolve():
            return data, task
    target = Task.own(_VALIDATION, "retrieval")
    if any(task.key == target.key for task, _ in data.tasks):
        raise UserError(
            f"A set in --data is called {_VALIDATION}, which is also the name of the run's validation pairs: pass the "
            "set as NAME=PATH with another NAME."
        )
    manifest = _open_validation(config, checkpoint, communicator)
    path = Path(validation or "held out of data.train")
    tasks = [(target, path), *data.tasks]
    return replace(data, tasks=tasks, manifests={target.key: manifest, **data.manifests}), target


def _open_validation(config: Config, checkpoint: Path, communicator: Communicator) -> Manifest:
    """Open a run's validation pairs: those in `data.val`, or those held out of its training data.

    Raises UserError if the run has none, or if they cannot be opened.
    """
    from neuclip_ds.checkpoint.integrity import read_meta
    from neuclip_ds.data.open_data import open_data
    from neuclip_ds.data.training_set import TrainingSet

    data = config.data
    run = checkpoint.parent.parent
    if data.val == "":
        raise UserError(f"{run} was trained without validation pairs: set --target to one of the tasks in --data.")
    if isinstance(data.val, str):
        return open_data(data.val, data, communicator, run)
    held_out = dict(communicator.on_rank_zero(lambda: read_meta(checkpoint))["data"]["held_out"])
    training_set = TrainingSet(data, lambda source: open_data(source, data, communicator, run), held_out)
    return training_set.manifest.validation()
