"""Model card of an exported model: origin, method, data, scores and license, but no local paths."""

import math
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.config import Config
from neuclip_ds.evaluation.tasks import load_tasks
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, read_metrics, scores_among


def model_card(config: Config, checkpoint: Path, form: str, license: str | None = None, average: bool = False) -> str:
    """Return the README.md of an exported checkpoint, with the metadata that the Hugging Face Hub reads.

    Args:
        config: config of the run.
        checkpoint: checkpoint in the run's folder; the card lists the scores measured at the checkpoint's step.
        form: format of the export.
        license: the hub's identifier for the license, such as apache-2.0; `unknown` by default.
        average: whether the weights and scores are those of the moving average.
    """
    step, model = read_meta(checkpoint)["step"], config.model
    starts = {"model": model.pretrained, "image tower": model.vision.pretrained}
    names = {part: public_name(name) for part, name in starts.items() if name}
    measured: dict[str, float] = {}
    metrics = checkpoint.parent.parent / "metrics.jsonl"
    for record in read_metrics(metrics) if metrics.is_file() else ():
        measured |= record if record["step"] == step else {}
    scores = {
        name.removeprefix(AVERAGED): measured[name]
        for name in scores_among(measured)
        if name.startswith(AVERAGED) == average and math.isfinite(measured[name])
    }
    metadata = ModelCardData(
        license=license or "unknown",
        library_name=form,
        pipeline_tag="zero-shot-image-classification",
        tags=["clip", "neuclip_ds", config.objective.method],
        model_name=config.run.name if scores else None,
        eval_results=[_eval_result(config, name, value) for name, value in scores.items()] or None,
        base_model=[name for name in names.values() if re.fullmatch(r"[\w-]+/[\w.-]+", name)] or None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("model_card.md")),
        origin=" and ".join(f"`{name}` ({part})" for part, name in names.items()) or "random weights",
        name=config.run.name,
        form=form,
        scores=[(name, value, measured.get(CHANCE + name)) for name, value in scores.items()],
        steps=f"{step:,}",
        average=average,
        method=config.objective.method,
        data=", ".join(map(public_name, config.data.train_paths)),
    )
    return str(card)


def _eval_result(config: Config, score: str, value: float) -> EvalResult:
    """Return a score and the name of its dataset as an entry of the hub's `model-index`."""
    kind, _, key = score.partition("/")
    task, metric = "zero-shot-image-classification", "accuracy"
    if kind == "task":
        found = next((one for one in load_tasks().tasks if one.key == key), None)
        name, metric = (key, metric) if found is None else (found.name, found.metric)
    elif kind == "average":
        name, metric = load_tasks().averages[key], "mean of the main metrics"
    elif score.startswith("zero_shot"):
        name = _held_out(config, config.data.zero_shot)
    else:
        name, task, metric = _held_out(config, config.data.val), "image-text-retrieval", "recall"
    return EvalResult(
        task_type=task,
        dataset_type=re.sub(r"\W+", "-", key or name).strip("-").lower(),
        dataset_name=name,
        metric_type=metric,
        metric_name=score,
        metric_value=value,
    )


def _held_out(config: Config, source: str | int) -> str:
    """Return the name of an evaluation set; for `auto` or a number, name the training data that it was split from."""
    named = isinstance(source, str) and source != "auto"
    return public_name(str(source)) if named else f"held out of {public_name(config.data.train_paths[0])}"


def public_name(value: str) -> str:
    """Return a hub or open_clip name unchanged, or the last component of a path or URL."""
    is_name = re.fullmatch(r"(open_clip:)?[\w-]+/[\w.-]+", value) and not Path(value).exists()
    return value if is_name else Path(value).name
