"""Export trained models to the files of other libraries: `transformers`, `open_clip` and, in onnx.py, ONNX.

`CONVERTERS` convert a package of one family to another format, and `WRITERS` write it. ONNX takes any model as it is.
"""

from collections.abc import Callable
from pathlib import Path

from neuclip_ds.models.export import convert
from neuclip_ds.models.export.write import write_open_clip, write_transformers
from neuclip_ds.models.pretrained.base import Package

WRITERS: dict[str, Callable[[Package, Path], None]] = {"transformers": write_transformers, "open_clip": write_open_clip}

CONVERTERS: dict[tuple[str, str], Callable[[Package], Package]] = {
    ("transformers", "open_clip"): convert.clip_to_open_clip,
    ("open_clip", "transformers"): convert.open_clip_to_clip,
    ("timm", "transformers"): convert.timm_to_clip,
    ("timm", "open_clip"): convert.timm_to_open_clip,
}


def export(package: Package, form: str, folder: Path) -> None:
    """Write a model into a folder.

    Args:
        package: the model in its family's form.
        form: a key of WRITERS.
        folder: an empty one.

    Raises:
        UserError: the format cannot express the model.
    """
    converted = package if package.family == form else CONVERTERS[package.family, form](package)
    WRITERS[form](converted, folder)
