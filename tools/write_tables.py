"""Write the tables of README.md, CONTRIBUTING.md and docs/ from the recorded numbers.

The records are tools/measurements/*.csv, tools/study/*.jsonl and docs/reference/published_scores.yaml. On a page, two
comments enclose each table, and the first one names it; the program replaces the lines between them:

    <!-- table: NAME -->
    <!-- end of table -->

It replaces a number or a phrase in a sentence in the same way: <!-- value: NAME --><!-- end of value -->.

In a git checkout with its whole history, the program first updates tools/measurements/older_code.txt, a list of the
records whose code has changed since they were made; the tables mark their numbers as "older code". Elsewhere, and with
--print, the stored list is used.

Examples:
  python tools/write_tables.py
  python tools/write_tables.py --print docs/reference/results.md
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import performance_tables
import published_tables
from data_files import MEASUREMENTS, OLDER_CODE, ROOT, Origin, has_history, read_data
from study import page_tables

VALUES = {**performance_tables.VALUES, **page_tables.VALUES}
TABLES = {**performance_tables.TABLES, **published_tables.TABLES, **page_tables.TABLES}
_VALUE = re.compile(r"(<!-- value: (\w+) -->).*?(<!-- end of value -->)", re.DOTALL)
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages",
        nargs="*",
        type=Path,
        help="pages to write (default: README.md, CONTRIBUTING.md and all pages in docs/)",
    )
    parser.add_argument("--print", action="store_true", help="print the tables instead of writing them to the pages")
    options = parser.parse_args()
    pages = [page.resolve() for page in options.pages] or list(all_pages())
    if has_history() and not options.print:
        OLDER_CODE.write_text("".join(f"{name}\n" for name in older(origins())), encoding="utf-8")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if options.print:
            for match in _MARKED.finditer(text):
                print(f"\n{match[2]}\n\n{TABLES[match[2]]()}")
            continue
        new_text = with_tables(text)
        if new_text != text:
            page.write_text(new_text, encoding="utf-8")
            print("written:", page.relative_to(ROOT))


def all_pages() -> Iterator[Path]:
    """Yield README.md, CONTRIBUTING.md and the pages of docs/, if they contain tables or values."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if _MARKED.search(text) or _VALUE.search(text):
            yield page


def with_tables(text: str) -> str:
    """Return a page's text with its tables and values filled in; raise `KeyError` if the name of one is unknown."""
    text = _VALUE.sub(lambda match: f"{match[1]}{VALUES[match[2]]()}{match[3]}", text)
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def origins() -> Iterator[Origin]:
    """Yield the origins of all data files, one for each commit in a file."""
    for path in sorted(MEASUREMENTS.glob("*.csv")):
        yield read_data(path.stem).origin
    yield from {result.origin.name: result.origin for result in page_tables.all_results()}.values()


def older(all_origins: Iterable[Origin]) -> list[str]:
    """Return the names of the origins whose code has changed since their numbers were measured."""
    return [origin.name for origin in all_origins if origin.has_newer_code()]


if __name__ == "__main__":
    main()
