"""Score a saved model on the tasks that are on disk; tasks that have a score are not scored again."""

import json
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from neuclip_ds.checkpoint.saved_model import SavedModel, open_model
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import connected
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.evaluation.folder import EvaluationFolder
from neuclip_ds.evaluation.loading import EvaluationLoader
from neuclip_ds.evaluation.nearest_captions import nearest_captions, records
from neuclip_ds.evaluation.results import Results
from neuclip_ds.evaluation.sets import open_captioned, open_set
from neuclip_ds.evaluation.suite import Suite
from neuclip_ds.evaluation.summary import setting_of, settings, summary_text, summary_tree
from neuclip_ds.evaluation.tasks import Task, load_tasks
from neuclip_ds.reporting.gallery import gallery
from neuclip_ds.reporting.page import html_page

log = logging.getLogger(__name__)


class Scoring(NamedTuple):
    """Options of `neuclip-ds evaluate`, whose help explains them."""

    data: Sequence[Path]
    tasks: Sequence[str] = ()
    out: Path | None = None
    batch_size: int = 256
    workers: int = 4
    precision: str = "float32"
    setting: str | None = None
    ema: bool = False


def score(name: str, scoring: Scoring) -> str:
    """Score a model, as `open_model` takes it, on all ranks of the launch; return the summary on rank 0.

    Raises:
        UserError: the model, the data or the results folder cannot be used.
    """
    if scoring.setting not in (None, *settings()):
        raise UserError(
            f"--setting={scoring.setting} is not a setting of the papers: choose one of {', '.join(settings())}."
        )
    task = "\n".join(f"{key}: {value}" for key, value in {"model": name, **scoring._asdict()}.items())
    with connected(task, scoring.out or Path()) as communicator:
        return _score(open_model(name, communicator, scoring.ema), scoring, communicator)


def _score(saved: SavedModel, scoring: Scoring, communicator: Communicator) -> str:
    tasks = load_tasks()
    found = communicator.on_rank_zero(lambda: tasks.on_disk(scoring.data, scoring.tasks))
    folder = scoring.out or _results_folder(saved)
    identity = {"model": saved.name, "precision": scoring.precision}
    done = communicator.on_rank_zero(lambda: _scored(Results(folder, identity), found))
    results = Results(folder, identity) if communicator.rank == 0 else None
    encoder, transform = _encoder(saved, communicator, max(1, scoring.batch_size), getattr(torch, scoring.precision))
    options = LoaderOptions(scoring.workers, pin_memory=communicator.device.type == "cuda")
    with closing(EvaluationLoader(options)) as loader:
        suite = Suite(encoder, transform, loader)
        for task, place in found:
            if task.key in done:
                log.info("%s: has a score in %s", task.name, folder)
                continue
            communicator.on_rank_zero(partial(_compare_size, task, place))
            began = time.perf_counter()
            metrics = suite.measure(task, place)
            if results is not None:
                results.add(task, metrics, _data(task, place))
                seconds = time.perf_counter() - began
                log.info("%s: %s %s (%.0f s)", task.name, task.metric, metrics["main_metric"], seconds)
    if results is None:
        return ""
    setting = scoring.setting or (setting_of(str(saved.config.run.name)) if saved.config else None)
    text = summary_text(tasks.with_scored(results.metrics), results.metrics, setting)
    tree = summary_tree(tasks, results.metrics)
    (folder / "averages.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(text + "\n", encoding="utf-8")
    return text


def _encoder(
    saved: SavedModel, communicator: Communicator, rows: int, dtype: torch.dtype = torch.float32
) -> tuple[BatchEncoder, EvalTransform]:
    """Return the model's encoder of so many rows at once, and its transform of images."""
    encode = encoder_of(saved.model.to(communicator.device, dtype), communicator.device)
    transform = EvalTransform(saved.preprocessing.size, saved.preprocessing.squash)
    return BatchEncoder(encode, saved.tokenizer, communicator, rows), transform


def _scored(results: Results, found: Sequence[tuple[Task, Path]]) -> set[str]:
    """Return the keys of the tasks that have a score; of a set of one's own, only one of the same files."""
    return {
        task.key
        for task, place in found
        if task.key in results.metrics and results.data.get(task.key) == _data(task, place)
    }


def _data(task: Task, place: Path) -> str | None:
    return f"{place.resolve()}: {open_set(place).contents}" if task.source is None else None


def _compare_size(task: Task, folder: Path) -> None:
    """Warn where a set of DataComp differs in size from the published one."""
    if task.size is None:
        return
    found = sum(1 for _ in EvaluationFolder.read(folder).samples())
    if found != task.size:
        log.warning("%s: %s has %d samples, the published set %d", task.name, folder, found, task.size)


def write_caption_page(name: str, folder: Path, out: Path, images: int, captions: int) -> None:
    """Write the captions of a retrieval set that a model finds nearest to its first images; runs on one rank.

    Raises:
        UserError: the model or the set cannot be used.
    """
    communicator = Communicator("cuda" if torch.cuda.is_available() else "cpu")
    saved, captioned = open_model(name, communicator), open_captioned(folder)
    encoder, transform = _encoder(saved, communicator, 64)
    shown = nearest_captions(encoder, captioned, transform, images, captions)
    out.parent.mkdir(parents=True, exist_ok=True)
    page = html_page(f"{saved.name} on {folder.name}", [gallery({saved.name: records(shown)})])
    out.write_text(page, encoding="utf-8")


def _results_folder(saved: SavedModel) -> Path:
    if saved.checkpoint is None:
        raise UserError(f"{saved.name} is not a run of this project: name a folder for its scores with --out.")
    return saved.checkpoint.parent.parent / "evaluation" / Path(saved.name).name
