"""The table of methods in the docs, written from the methods' files: python -m neuclip_ds.objectives.table PAGE."""

import sys
from collections.abc import Mapping
from pathlib import Path

from neuclip_ds.objectives.method import Method
from neuclip_ds.objectives.methods import METHODS

BEGIN, END = "<!-- methods: python -m neuclip_ds.objectives.table PAGE -->", "<!-- /methods -->"


def table(methods: Mapping[str, Method] = METHODS) -> str:
    """Return the Markdown table of the methods."""
    rows = [["`--objective.method`", "pair loss", "normaliser, w_i", "scale", "temperature", "source"]]
    rows.append(["---"] * len(rows[0]))
    for name, m in methods.items():
        rows.append([f"`{name}`", m.pair_loss, m.normalizer or "none", m.scale, m.temperature, m.source])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def refreshed(page: str) -> str:
    """Return a page with the table between its markers replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
