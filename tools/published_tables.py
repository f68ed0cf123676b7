"""Tables of the scores that the papers report, from docs/reference/published_scores.yaml."""

from collections.abc import Callable, Mapping
from typing import Any

import yaml
from data_files import ROOT, grid

_SCORES: list[dict[str, Any]] = yaml.safe_load((ROOT / "docs/reference/published_scores.yaml").read_text("utf-8"))
# data, batch size, and the place in published_scores.yaml: start of `source`, setting, and suffix of the row names
_FROM_SCRATCH = [
    ("CC3M, 2.7M pairs", "1,024", "NeuCLIP (ICLR 2026)", "cc3m", ""),
    ("CC12M, 9.2M pairs", "2,048", "NeuCLIP (ICLR 2026)", "cc12m", ""),
    ("CC12M, 9.2M pairs", "4,096", "FastCLIP, Tables 12 to 14", "cc12m", ", 4 nodes"),
    ("CC12M, 8.1M pairs", "2,048", "AmorLIP, Table 1", "cc12m", ""),
    ("DFN-14M, 13.7M pairs", "4,096", "NeuCLIP (ICLR 2026)", "dfn14m", ""),
    ("DFN-192M", "5,120", "NeuCLIP (ICLR 2026)", "dfn192m", ""),
    ("DFN-1B, 1B samples seen", "5,120", "NeuCLIP (ICLR 2026)", "dfn1b", ""),
]
# column heading -> names of rows, of which the first that exists is used; NeuCLIP and AmorLIP do not name FastCLIP's
# version
_COLUMNS = {
    "`fastclip_v3`": ("fastclip_v3", "fastclip"),
    "`neuclip`": ("neuclip",),
    "`amorlip`": ("amorlip", "amorlip, l2-log"),
    "`sogclr`": ("sogclr",),
    "`siglip`": ("siglip",),
}
_FINE_TUNED = {
    "OpenAI ViT-B/32": "vitb32",
    "OpenAI ViT-B/16": "vitb16",
    "SigLIP ViT-B/16": "siglip_vitb16",
    "LAION ViT-B/32": "laion_vitb32",
}


def from_scratch() -> str:
    """Published differences from OpenCLIP in the mean over 38 tasks, for models trained from scratch."""
    rows: list[list[str]] = []
    for data, batch, source, key, ending in _FROM_SCRATCH:
        published = _means(source, key)
        baseline = published["openclip" + ending]
        cells: list[str] = []
        for names in _COLUMNS.values():
            scores = [published[name + ending] for name in names if name + ending in published]
            cells.append(f"{scores[0] - baseline:+.1f}" if scores else "-")
        rows.append([data, batch, source.split(" ")[0].rstrip(","), *cells])
    return grid(["data", "B", "paper", *_COLUMNS], rows)


def fine_tuned() -> str:
    """Published means over 38 tasks, for checkpoints and for models that were fine-tuned from them."""
    rows: list[list[str]] = []
    for title, key in _FINE_TUNED.items():
        published = _means("TuneCLIP, Tables 1,", key)
        names = ("checkpoint", "openclip", "fastclip", "tuneclip")
        rows.append([title, *(f"{published[name]:.1f}" for name in names)])
    return grid(["checkpoint", "before", "`openclip`", "`gcl`", "`tuneclip` with recovery"], rows)


def _means(source: str, key: str) -> dict[str, float]:
    """Return the means over DataComp's 38 tasks by row name, for one setting of a source."""
    (table,) = [table for table in _SCORES if table["source"].startswith(source) and "datacomp" in table["scores"]]
    column = table["scores"].index("datacomp")
    means: dict[str, float] = {}
    for name, scores in table["percent"][key].items():
        score = scores[column]
        means[name] = score[0] if isinstance(score, list) else score  # [mean, standard deviation]
    return means


TABLES: Mapping[str, Callable[[], str]] = {
    "published_from_scratch": from_scratch,
    "published_fine_tuned": fine_tuned,
}
