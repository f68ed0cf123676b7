"""The model card of an export: what the model is, its scores, data, recipe and licence; no paths of the machine."""

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.config import Config
from neuclip_ds.evaluation.results import FILE
from neuclip_ds.reporting.metrics import read_metrics

_LOADING = {
    "transformers": """```python
from transformers import AutoModel, AutoProcessor, pipeline

model, processor = AutoModel.from_pretrained("."), AutoProcessor.from_pretrained(".")
classify = pipeline("zero-shot-image-classification", model=".")
classify("image.jpg", candidate_labels=["a dog", "a cat"])
```""",
    "open_clip": """```python
import open_clip

model, preprocess = open_clip.create_model_from_pretrained("local-dir:.")
tokenizer = open_clip.get_tokenizer("local-dir:.")
```""",
    "onnx": """```python
import onnxruntime
from transformers import AutoImageProcessor, AutoTokenizer

tokens = AutoTokenizer.from_pretrained(".")(["a dog"], padding="max_length", truncation=True, return_tensors="np")
text = onnxruntime.InferenceSession("text_model.onnx").run(["text_embeds"], {"input_ids": tokens["input_ids"]})[0]
pixels = AutoImageProcessor.from_pretrained(".")(image, return_tensors="np")["pixel_values"]
image = onnxruntime.InferenceSession("vision_model.onnx").run(["image_embeds"], {"pixel_values": pixels})[0]
```

Features have unit norm; `clip_config.json` holds the logit scale and bias.""",
}
_SCORES = ("*_recall@*", "zero_shot_top*", "task/*", "average/*")  # names of evaluation metrics
_PATH = re.compile(r"[/~.]|[a-z0-9]+://")
_WEIGHTS = (".bin", ".pt", ".pth", ".safetensors")
_AVERAGE = "ema/"  # before names of metrics of the moving average
_UNKNOWN = "unknown"
_ZERO_SHOT, _RETRIEVAL = "zero-shot-image-classification", "image-text-retrieval"  # tasks


def model_card(config: Config, checkpoint: Path, form: str, licence: str | None = None, average: bool = False) -> str:
    """Return README.md of an exported checkpoint, with the metadata that the hub reads.

    Args:
        config: of the run.
        checkpoint: in the run's folder, from which its scores come.
        form: the export's format.
        licence: the hub's identifier of a licence, such as apache-2.0; `unknown` by default.
        average: whether the weights are their moving average.
    """
    name, step = str(config.run.name), read_meta(checkpoint)["step"]
    bases = _hub_names(config)
    scores = evaluation_scores(checkpoint, step, average)
    metadata = ModelCardData(
        license=licence or _UNKNOWN,
        library_name=form,
        pipeline_tag=_ZERO_SHOT,
        tags=["clip", "neuclip_ds", config.objective.method],
        base_model=bases or None,
        model_name=name,
        eval_results=[
            EvalResult(
                _RETRIEVAL if "recall" in score else _ZERO_SHOT, *_dataset(config, score), score, round(value, 4)
            )
            for score, value in scores.items()
        ]
        or None,
    )
    data, optimizer = config.data, config.optimizer
    rows = {
        "trained with": f"neuclip_ds, `objective.method={config.objective.method}`",
        "data": ", ".join(f"`{public_name(path)}`" for path in data.train_paths),
        "weights": f"moving average, decay {config.ema.decay:g}" if average else "as trained",
        "steps": f"{step:,} of {data.batch_size:,} pairs, {step * data.batch_size:,} pairs in all",
        "learning rate": f"{optimizer.lr:g} ({optimizer.name}, weight decay {optimizer.weight_decay:g})",
    }
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {name}",
        f"A dual encoder of images and texts, {_origin(config)}.",
        _LOADING[form],
        "## Scores",
        _table(("metric", "value"), {metric: f"{value:.4f}" for metric, value in scores.items()})
        if scores
        else "None were measured at this step.",
        "## Training",
        _table(("", ""), rows),
        f"Options that differ from the defaults:\n\n```yaml\n{_recipe(config)}```",
        "## Licence",
        _licence_text(licence, bases),
    ]
    return "\n\n".join(parts) + "\n"


def evaluation_scores(checkpoint: Path, step: int, average: bool) -> dict[str, float]:
    """Return what the run's evaluations at a step, and `neuclip-ds evaluate` of its checkpoint, have measured.

    With `average`, those of the moving average of the weights.
    """
    run = checkpoint.parent.parent
    scores: dict[str, float] = {}
    if (run / "metrics.jsonl").is_file():
        for record in read_metrics(run / "metrics.jsonl"):
            if record["step"] == step:
                own = {name: value for name, value in record.items() if name.startswith(_AVERAGE) == average}
                named = {name.removeprefix(_AVERAGE): value for name, value in own.items()}
                scores |= {name: value for name, value in named.items() if any(fnmatch(name, p) for p in _SCORES)}
    measured = run / "evaluation" / f"{checkpoint.name}{' (ema)' if average else ''}" / FILE
    if measured.is_file():
        for line in measured.read_text(encoding="utf-8").splitlines():
            task = json.loads(line)
            scores[f"task/{task['key']}"] = task["metrics"]["main_metric"]
    return scores


def _dataset(config: Config, score: str) -> tuple[str, str]:
    """Return the type and the name, for the hub, of the data set that a score was measured on."""
    kind, _, name = score.partition("/")
    if name:  # task/KEY, average/GROUP
        return name, name if kind == "task" else f"average of {name}"
    kind, source = (
        ("held-out pairs", config.data.val) if "recall" in score else ("zero-shot images", config.data.zero_shot)
    )
    return kind, kind if source == "auto" else public_name(source)


def public_name(value: str) -> str:
    """Return the last part of a path or URL, other text as it is."""
    library, mark, name = value.rpartition("open_clip:")
    architecture, _, file = name.partition("/")
    if mark and file.endswith(_WEIGHTS):
        return f"open_clip:{architecture}/{Path(file).name}"
    is_path = _PATH.match(name) is not None or Path(name).exists()
    return library + mark + (Path(name).name if is_path else name)


def _origin(config: Config) -> str:
    model = config.model
    if model.pretrained:
        return f"fine-tuned from `{public_name(model.pretrained)}`"
    towers = {
        "image tower": model.vision.pretrained and f"{model.vision.name} ({public_name(model.vision.pretrained)})",
        "text tower": public_name(model.text.pretrained),
    }
    started = [f"its {tower} from `{weights}`" for tower, weights in towers.items() if weights]
    return f"started with {' and '.join(started)}" if started else "trained from random weights"


def _hub_names(config: Config) -> list[str]:
    """Return the hub names among what the model starts from."""
    model = config.model
    named = (model.pretrained, model.vision.pretrained, model.text.pretrained)
    return [name for name in named if re.fullmatch(r"[\w-]+/[\w.-]+", name) and public_name(name) == name]


def _recipe(config: Config) -> str:
    """Return the method and the options that differ from their defaults, except those of the machine."""
    parts = {"data", "model", "objective", "optimizer", "ema", "recovery", "phases", "budget"}
    defaults = Config.model_validate({"objective": {"method": config.objective.method}})
    trees = [tree.model_dump(mode="json", include=parts) for tree in (config, defaults)]
    trees[1]["objective"].pop("method")
    return yaml.safe_dump(_different(*trees), sort_keys=False)


def _different(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = _different(value, default)
            default = {}
        if value != default:
            found[key] = _public(value)
    return found


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _public(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_public(part) for part in value]
    return public_name(value) if isinstance(value, str) and value else value


def _table(header: tuple[str, str], rows: Mapping[str, str]) -> str:
    def lines() -> Iterator[str]:
        yield f"| {header[0]} | {header[1]} |"
        yield "|---|---|"
        yield from (f"| {name} | {value} |" for name, value in rows.items())

    return "\n".join(lines())


def _licence_text(licence: str | None, bases: list[str]) -> str:
    stated = f"`{licence}`." if licence else "Its author has stated none."
    return f"{stated} The licence of {', '.join(f'`{base}`' for base in bases)} applies too." if bases else stated
