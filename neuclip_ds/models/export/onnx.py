"""Write both towers as ONNX, and compare them with torch in onnxruntime."""

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import DualEncoder
from neuclip_ds.models.pretrained.base import LogitParameters, Preprocessing
from neuclip_ds.models.pretrained.transformers_models import MODEL_TYPES
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.models.towers import Encoder

VISION, TEXT = "vision_model.onnx", "text_model.onnx"
_TOLERANCE = 1e-4  # of a feature of unit norm
_LARGEST_FILE = 1.5e9  # bytes of weights; ONNX files end at 2 GiB, more go to a file next to it
_CAPTIONS = ["a photo of a dog", "", "two cats"]  # compared with torch; a number of rows that is not traced

log = logging.getLogger(__name__)


def write_onnx(
    model: DualEncoder, tokenizer: ModelTokenizer, preprocessing: Preprocessing, logits: LogitParameters, folder: Path
) -> None:
    """Write vision_model.onnx, text_model.onnx, the image processor, the tokenizer and clip_config.json.

    `pixel_values` (b, 3, H, H) float32, normalised, become `image_embeds` (b, d); `input_ids` (b, T) int64 become
    `text_embeds` (b, d); both of unit norm.

    Raises:
        UserError: the packages for ONNX are not installed, or a tower cannot be expressed.
    """
    _require_packages()
    model = model.float().eval()
    pixels = torch.randint(0, 256, (3, 3, preprocessing.size, preprocessing.size), dtype=torch.uint8)
    image = model.vision.normalize(pixels)
    _write_tower(model.vision, image, "pixel_values", "image_embeds", folder / VISION)
    _write_tower(model.text, tokenizer(_CAPTIONS), "input_ids", "text_embeds", folder / TEXT)
    MODEL_TYPES["clip"].processor(preprocessing, None).save_pretrained(folder)
    tokenizer.save(folder)
    config = {
        "image_size": preprocessing.size,
        "context_length": tokenizer.context_length,
        "logit_scale": None if logits.temperature is None else 1 / logits.temperature,
        "logit_bias": logits.bias,
    }
    (folder / "clip_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


class _UnitFeatures(nn.Module):
    """A tower from normalised pixels or ids to features of unit norm."""

    def __init__(self, tower: Encoder) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.tower.encode(x), dim=-1)


@torch.no_grad()
def _write_tower(tower: Encoder, inputs: Tensor, taken: str, given: str, path: Path) -> None:
    module = _UnitFeatures(tower).eval()
    size = sum(parameter.nbytes for parameter in tower.parameters())
    try:
        torch.onnx.export(
            module,
            (inputs[:2],),
            str(path),
            input_names=[taken],
            output_names=[given],
            dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}},
            external_data=size > _LARGEST_FILE,
            verbose=False,
        )
    except Exception as error:  # of torch's exporter, which has many
        raise UserError(
            f"torch cannot express the tower of {path.name} as ONNX ({str(error).strip().splitlines()[0]}); export "
            "with --format=transformers or open_clip."
        ) from error
    difference = _compare(path, {taken: inputs}, module(inputs))
    log.info("%s: features differ from torch's by %.1e at most", path.name, difference)
    if not difference <= _TOLERANCE:
        raise UserError(
            f"Features of {path.name} in onnxruntime differ from torch's by {difference:.1e}, which is more than "
            f"{_TOLERANCE:g}; export with --format=transformers or open_clip."
        )


def _compare(path: Path, inputs: Mapping[str, Tensor], wanted: Tensor) -> float:
    """Return the largest difference of onnxruntime's features from torch's."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found: Any = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
    return float((torch.from_numpy(found) - wanted).abs().max())


def _require_packages() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise UserError(f"--format=onnx needs {', '.join(missing)}: pip install '.[onnx]'.")
