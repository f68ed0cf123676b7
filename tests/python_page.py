"""Write docs/reference/python.md from signatures and docstrings: `python tests/python_page.py`."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import neuclip_ds
from neuclip_ds import errors
from neuclip_ds.losses.accumulate import TwoPass
from neuclip_ds.losses.gather import PendingBatch

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "python.md"
PARTS: dict[str, list[Any]] = {
    "Loss": [
        neuclip_ds.ContrastiveLoss,
        PendingBatch,
        TwoPass,
        neuclip_ds.IndexedDataset,
        neuclip_ds.add_index,
        neuclip_ds.autograd_loss,
        neuclip_ds.register_loss,
    ],
    "Training": [
        neuclip_ds.Config,
        neuclip_ds.Section,
        neuclip_ds.Hook,
        neuclip_ds.train,
        neuclip_ds.Run,
        neuclip_ds.load,
        neuclip_ds.Model,
    ],
    "Exceptions": [neuclip_ds.UserError, neuclip_ds.TrainingDiverged, errors.Interrupted],
}
# classes that users do not instantiate
NOT_CONSTRUCTED = (PendingBatch, TwoPass, neuclip_ds.Run, neuclip_ds.Model, neuclip_ds.Hook)
OPTIONS = (neuclip_ds.Config, neuclip_ds.Section)  # pydantic models, whose fields `--help all` describes
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Example):$", re.MULTILINE)
SIGNATURE = "```py\n{}\n```"  # not `python`, because the tests run `python` blocks
EXAMPLE = "```python\n{}\n```"


def written() -> str:
    """Return the text of the page: its current introduction, followed by generated sections."""
    page = PAGE.read_text(encoding="utf-8").split("\n## Loss\n")[0]
    for title, objects in PARTS.items():
        page += f"\n## {title}\n"
        for documented in objects:
            for block in described(documented):
                page += f"\n{block}\n"
    return page


def described(documented: Any) -> Iterator[str]:
    """Yield Markdown blocks for a function, or for a class and those of its public members that have a docstring."""
    yield f"### {documented.__name__}"
    if documented in OPTIONS or (isinstance(documented, type) and issubclass(documented, BaseException)):
        yield from sections(documented.__doc__)
        return
    if documented not in NOT_CONSTRUCTED:
        yield SIGNATURE.format(signature(documented, documented.__name__))
    yield from sections(documented.__doc__)
    if isinstance(documented, type):
        if "__init__" in vars(documented) and documented not in NOT_CONSTRUCTED:
            yield from sections(vars(documented)["__init__"].__doc__)
        for name, member in members(documented).items():
            is_public = not name.startswith("_") and "extra_state" not in name and member.__doc__
            if is_public and (isinstance(member, property) or inspect.isfunction(member)):
                yield f"#### `{name}`"
                if isinstance(member, property):
                    yield inspect.cleandoc(member.__doc__ or "")
                else:
                    yield SIGNATURE.format(signature(member, name))
                    yield from sections(member.__doc__)


def members(documented: type) -> dict[str, Any]:
    """Return a class's members by name: those that it defines, then those inherited from classes of this package."""
    by_name: dict[str, Any] = {}
    for base in documented.__mro__:
        if base.__module__.startswith("neuclip_ds."):
            by_name = by_name | {name: member for name, member in vars(base).items() if name not in by_name}
    return by_name


def signature(function: Any, name: str) -> str:
    """Return the signature of a function or class as written in the source, one parameter per line if it is long."""
    source = vars(function).get("__init__") if isinstance(function, type) else inspect.unwrap(function)
    if source is None:
        return f"{name}()"
    tree = ast.parse(textwrap.dedent(inspect.getsource(source))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tree.args.args = [argument for argument in tree.args.args if argument.arg != "self"]
    returns = "" if tree.returns is None or ast.unparse(tree.returns) == "None" else f" -> {ast.unparse(tree.returns)}"
    parameters = ast.unparse(tree.args).replace("=", " = ")
    line = f"{name}({parameters}){returns}"
    if len(line) <= 100:
        return line
    parts = re.split(r", (?=\*{0,2}\w+: |\*,)", parameters)
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def sections(docstring: str | None) -> Iterator[str]:
    """Yield the parts of a Google-style docstring as Markdown."""
    first, *rest = SECTION.split(inspect.cleandoc(docstring or ""))
    if first.strip():
        yield first.strip()
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        text = inspect.cleandoc(body)
        if title == "Example":
            yield EXAMPLE.format(text)
        elif title == "Returns":
            yield f"Returns: {text}"
        else:
            items = re.findall(r"^([\w., ]+): (.*(?:\n +.*)*)", text, re.MULTILINE)
            heading = "Arguments" if title == "Args" else title
            yield f"{heading}:\n\n" + "\n".join(f"- `{name}`: {' '.join(text.split())}" for name, text in items)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
