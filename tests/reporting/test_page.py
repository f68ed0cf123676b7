"""Tables put into pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.page import Table, replace_tables


def test_tables_replace_those_below_their_titles(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n<!-- Speeds -->\n\n| old | head |\n|---|---|\n| 1 | 2 |\n\nText | with a bar.\n\n| kept |\n"
    )
    absent = Table("Not there", ["x"], [["1"]])
    replace_tables(page, [absent, Table("Speeds", ["new"], [["3"], ["4"]])])
    wanted = "# A page\n\n<!-- Speeds -->\n\n| new |\n| --- |\n| 3 |\n| 4 |\n\nText | with a bar.\n\n| kept |\n"
    assert page.read_text() == wanted
    replace_tables(page, [Table("Speeds", ["new"], [["3"], ["4"]])])
    assert page.read_text() == wanted
    with pytest.raises(UserError, match=r"page\.md has no line `<!-- Not there -->`"):
        replace_tables(page, [absent])
