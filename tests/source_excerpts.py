"""Copy excerpts of the source into the pages of docs/: `python tests/source_excerpts.py`.

In the source, the comments `# docs: NAME` and `# docs: end` enclose an excerpt. An excerpt may have several parts with
the same name; `...` stands for the lines between them. On a page, `<!-- from FILE: NAME -->` stands before the excerpt.
"""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "explanation" / "architecture.md"]
# not `python`, because the tests run `python` blocks
BLOCK = re.compile(r"(<!-- from (\S+): ([\w-]+) -->\n```py\n)(.*?)(```\n)", re.DOTALL)


def excerpt(file: str, name: str) -> str:
    """Return the lines of an excerpt without the markers and the common indentation.

    Raises:
        ValueError: the file has no such excerpt, or a part of it has no end.
    """
    lines: list[str] = []
    is_open = False
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text == f"# docs: {name}":
            if lines:
                lines.append(line.replace(text, "..."))
            is_open = True
        elif text == "# docs: end":
            is_open = False
        elif is_open:
            lines.append(line)
    if is_open or not lines:
        raise ValueError(f"{file} needs `# docs: {name}` and, after each, `# docs: end`")
    return textwrap.dedent("\n".join(lines)).strip() + "\n"


def written(page: Path) -> str:
    """Return the text of a page with its excerpts updated from the source."""

    def renewed(block: re.Match[str]) -> str:
        start, file, name, _, end = block.groups()
        return start + excerpt(file, name) + end

    return BLOCK.sub(renewed, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
