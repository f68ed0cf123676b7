"""The model card of an export: origin, method, data, scores and license; no paths of the machine."""

import math
import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.config import Config
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, read_metrics, scores_among


def model_card(config: Config, checkpoint: Path, form: str, license: str | None = None, average: bool = False) -> str:
    """Return README.md of an exported checkpoint, with the metadata that the hub reads.

    Args:
        config: config of the run.
        checkpoint: checkpoint in the run's folder; the card has the scores of its step.
        form: the export's format.
        license: the hub's identifier of a license, such as apache-2.0; `unknown` by default.
        average: whether weights and scores are those of the moving average.
    """
    step, model = read_meta(checkpoint)["step"], config.model
    starts = {"model": model.pretrained, "image tower": model.vision.pretrained, "text tower": model.text.pretrained}
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
        library_name="timm" if form == "towers" else form,
        pipeline_tag="zero-shot-image-classification",
        tags=["clip", "neuclip_ds", config.objective.method],
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


def public_name(value: str) -> str:
    """Return a hub or open_clip name unchanged, and the last part of a path or URL."""
    is_name = re.fullmatch(r"(open_clip:)?[\w-]+/[\w.-]+", value) and not Path(value).exists()
    return value if is_name else Path(value).name
