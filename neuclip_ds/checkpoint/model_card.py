"""Model card of an exported model: origin, method, data, scores and license, but no local paths."""

import math
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.config import Config
from neuclip_ds.evaluation.tasks import load_tasks
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, name_of_full_model, read_metrics, scores_among


def model_card(
    config: Config,
    checkpoint: Path,
    library: str,
    license: str | None = None,
    average: bool = False,
    mixture: str | None = None,
) -> str:
    """Return the README.md of an exported checkpoint, with the metadata that the Hugging Face Hub reads.

    Args:
        config: config of the run.
        checkpoint: checkpoint in the run's folder; the card lists the scores measured at the checkpoint's step.
        library: the library that can load the exported checkpoint: transformers, open_clip or sentence_transformers.
        license: the hub's identifier for the license, such as apache-2.0; `unknown` by default.
        average: whether the weights and scores are those of the moving average.
        mixture: description of the weights if they are a mean of several models; the card then lists no scores.
    """
    step = read_meta(checkpoint)["step"]
    pretrained = {
        "model": config.model.pretrained,
        "image tower": config.model.vision.pretrained,
        "text tower": config.model.text.pretrained,
    }
    pretrained_names = {part: public_name(name) for part, name in pretrained.items() if name}
    metrics: dict[str, float] = {}
    if mixture is None:
        metrics = _metrics_at(step, checkpoint.parent.parent / "metrics.jsonl")
    scores = {}
    for name in scores_among(metrics):
        if name.startswith(AVERAGED) == average and math.isfinite(metrics[name]):
            scores[name.removeprefix(AVERAGED)] = metrics[name]
    hub_names = [name for name in pretrained_names.values() if re.fullmatch(r"[\w-]+/[\w.-]+", name)]
    metadata = ModelCardData(
        license=license or "unknown",
        library_name=library.replace("sentence_", "sentence-"),
        pipeline_tag="zero-shot-image-classification",
        tags=["clip", "neuclip_ds", config.objective.method],
        model_name=config.run.name if scores else None,
        eval_results=[_eval_result(config, name, value) for name, value in scores.items()] or None,
        base_model=hub_names or None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("model_card.md")),
        origin=" and ".join(f"`{name}` ({part})" for part, name in pretrained_names.items()) or "random weights",
        name=config.run.name,
        library=library,
        scores=[(name, value, metrics.get(CHANCE + name)) for name, value in scores.items()],
        steps=f"{step:,}",
        weights=mixture or ("their moving average" if average else "as trained"),
        method=config.objective.method,
        prefixes=" or ".join(map(str, sorted(config.objective.prefixes))),
        data=", ".join(map(public_name, config.data.train_paths)),
    )
    return str(card)


def _metrics_at(step: int, path: Path) -> dict[str, float]:
    """Return all metrics of a step in a run's metrics.jsonl, or an empty dict if the file does not exist."""
    metrics: dict[str, float] = {}
    if path.is_file():
        for record in read_metrics(path):
            if record["step"] == step:
                metrics |= record
    return metrics


def _eval_result(config: Config, score: str, value: float) -> EvalResult:
    """Return a score and the name of its dataset as an entry of the hub's `model-index`."""
    name = name_of_full_model(score)
    kind, _, key = name.partition("/")
    task_type = "zero-shot-image-classification"
    metric = "accuracy"
    if kind == "task":
        tasks = {task.key: task for task in load_tasks().tasks}
        if key in tasks:
            dataset = tasks[key].name
            metric = tasks[key].metric
        else:  # a task of the user
            dataset = key
    elif kind == "average":
        dataset = load_tasks().averages[key]
        metric = "mean of the main metrics"
    elif name.startswith("zero_shot"):
        dataset = _evaluation_set(config, config.data.zero_shot, "zero-shot")
    else:
        dataset = _evaluation_set(config, config.data.val, "validation")
        task_type = "image-text-retrieval"
        metric = "recall"
    return EvalResult(
        task_type=task_type,
        dataset_type=re.sub(r"\W+", "-", key or dataset).strip("-").lower(),
        dataset_name=dataset,
        metric_type=metric,
        metric_name=score,
        metric_value=value,
    )


def _evaluation_set(config: Config, source: str | int, kind: str) -> str:
    """Return the name of an evaluation set; for `auto` or a number of pairs, it contains the training data's name."""
    if isinstance(source, str) and source != "auto":
        return public_name(source)
    training_set = public_name(config.data.train_paths[0])
    return f"held out of {training_set}" if isinstance(source, int) else f"{kind} set of {training_set}"


def public_name(value: str) -> str:
    """Return a hub or open_clip name unchanged, or the last component of a path or URL."""
    is_name = re.fullmatch(r"(open_clip:)?[\w-]+/[\w.-]+", value) and not Path(value).exists()
    return value if is_name else Path(value).name
