"""The page of claims: every row has a state, and what it tells the reader to run exists."""

import re
from pathlib import Path

MEASURED = ("reference/reproduction.md", "explanation/cold_start.md")
DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "reference/claims.md").read_text(encoding="utf-8")
MEASURED_PAGES = "".join((DOCS / page).read_text(encoding="utf-8") for page in MEASURED)
STATES = {"holds", "fails", "partly", "within noise", "not testable here", "not tested"}
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.count("|") == 5]
CLAIMS = [row for row in ROWS if row[2] != "state" and set(row[2]) != {"-"}]


def test_every_claim_has_a_state() -> None:
    assert len(CLAIMS) > 50
    assert {row[2] for row in CLAIMS} == STATES


def test_named_arms_are_those_of_the_measured_pages() -> None:
    named = set(re.findall(r'"([^"]+)"', PAGE))
    assert named
    assert {name for name in named if f"| {name} |" not in MEASURED_PAGES} == set()


def test_figures_are_those_of_the_measured_pages() -> None:
    """Each figure with a deviation stands in a table of a page that measured it."""
    figures = [figure for row in CLAIMS for figure in re.findall(r"[\d.]+ ± [\d.]+", row[3])]
    assert [figure for figure in figures if figure not in MEASURED_PAGES] == []
