"""Read and write files of measurements with their origin: the machine, date and code; name the origin below tables.

A data file is a CSV table below lines of the form `# key: value`:

    title     what was measured
    device    CPU, H100, H200, simulated (counted, or run on simulated hardware), or estimated (computed by a model)
    hardware  machine and versions
    date      ISO date of the measurement
    commit    of the code that ran, or `unknown`
    code      files and folders that the numbers describe
    command   that printed the table at this commit (optional)
    note      anything else (optional); may be repeated
"""

from __future__ import annotations

import ast
import csv
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASUREMENTS = ROOT / "tools" / "measurements"
OLDER_CODE = MEASUREMENTS / "older_code.txt"
DEVICES = ("CPU", "H100", "H200", "simulated", "estimated")
UNKNOWN = "unknown"
OLDER = "older code"
_KEYS = ("title", "device", "hardware", "date", "commit", "code", "command", "note")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Origin of numbers: the device, the date, the commit and the code that they describe."""

    name: str  # of the file, and of the commit if a file has records of several commits
    device: str  # one of DEVICES
    hardware: str
    date: str
    commit: str
    code: Sequence[str]  # files and folders that the numbers describe

    def has_newer_code(self) -> bool:
        """Return whether the code behind the numbers has changed since their commit; needs git and the whole history.

        Changes to comments, docstrings and messages do not count. An unknown commit is taken to be the last one before
        the end of the day of the measurement.
        """
        base = self.commit.split("-")[0]  # without the suffix -dirty
        if not _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", check=False):
            base = _git("rev-list", "-1", f"--before={self.date} 23:59:59", "HEAD")
        changed = _git("diff", "--name-only", base, "HEAD", "--", *self.code).splitlines()
        return any(_changed_in_effect(base, path) for path in changed)


def _changed_in_effect(base: str, path: str) -> bool:
    """Return whether a file's code differs from its code at a commit, apart from comments, docstrings and messages."""
    if not path.endswith(".py"):
        return True
    before = _git("show", f"{base}:{path}", check=False)
    now = _git("show", f"HEAD:{path}", check=False)
    return _statements(before) != _statements(now)


def _statements(source: str) -> str:
    """Return the code of a module without comments, docstrings and messages, which are strings that contain a space."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return ast.dump(_WithoutMessages().visit(tree))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _WithoutMessages(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        is_message = isinstance(node.value, str) and " " in node.value
        return ast.Constant("message") if is_message else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        return ast.Constant("message") if any(" " in str(text) for text in texts) else node


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A table of measurements with its origin; each row maps column names to cells."""

    title: str
    origin: Origin
    command: str
    notes: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[dict[str, str]]

    def row(self, **values: str) -> dict[str, str]:
        """Return the only row with these values; raise `LookupError` if there is none, or more than one."""
        matching = [row for row in self.rows if all(row[key] == value for key, value in values.items())]
        if len(matching) != 1:
            raise LookupError(f"{self.origin.name} contains {len(matching)} rows with {values} instead of one.")
        return matching[0]


def read_data(name: str) -> DataFile:
    """Read tools/measurements/NAME.csv.

    Raises:
        ValueError: a key is unknown or missing, or the device is unknown.
    """
    header: dict[str, list[str]] = {}
    table: list[str] = []
    for line in (MEASUREMENTS / f"{name}.csv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            table.append(line)
            continue
        key, _, value = line[2:].partition(": ")
        if key not in _KEYS:
            raise ValueError(f"{name}.csv: the key {key!r} in the header is not one of {', '.join(_KEYS)}.")
        header.setdefault(key, []).append(value)
    missing = {*_KEYS} - {*header} - {"note", "command"}
    if missing:
        raise ValueError(f"The header of {name}.csv lacks {', '.join(sorted(missing))}.")
    device = header["device"][0]
    if device not in DEVICES:
        raise ValueError(f"{name}.csv: the device {device!r} is not one of {', '.join(DEVICES)}.")
    reader = csv.DictReader(table)
    return DataFile(
        title=header["title"][0],
        origin=Origin(
            name=f"{name}.csv",
            device=device,
            hardware=header["hardware"][0],
            date=header["date"][0],
            commit=header["commit"][0],
            code=header["code"][0].split(),
        ),
        command=" ".join(header.get("command", [])),
        notes=header.get("note", []),
        columns=list(reader.fieldnames or []),
        rows=list(reader),
    )


def write_data(file: DataFile) -> None:
    """Write a table with its origin to tools/measurements."""
    origin = file.origin
    header = {
        "title": file.title,
        "device": origin.device,
        "hardware": origin.hardware,
        "date": origin.date,
        "commit": origin.commit,
        "code": " ".join(origin.code),
        "command": file.command,
    }
    with (MEASUREMENTS / origin.name).open("w", encoding="utf-8", newline="") as stream:
        stream.writelines(f"# {key}: {value}\n" for key, value in header.items())
        stream.writelines(f"# note: {note}\n" for note in file.notes)
        writer = csv.DictWriter(stream, list(file.columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(file.rows)


def names_with_older_code() -> set[str]:
    """Return the names of origins whose code has changed since the measurement, as tools/write_tables.py recorded."""
    return set(OLDER_CODE.read_text(encoding="utf-8").split("\n")) - {""}


def badge(device: str) -> str:
    """Return a device, or `older code`, as a colored label (docs/style.css)."""
    return f'<span class="device {device.lower().replace(" ", "-")}">{device}</span>'


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def caption(*origins: Origin, note: str = "") -> str:
    """Return the text below a table: devices, hardware, dates, commits and data files of its numbers, and a note."""
    older = names_with_older_code()
    by_machine: dict[tuple[str, bool, str], list[Origin]] = {}
    for origin in origins:
        by_machine.setdefault((origin.device, origin.name in older, origin.hardware), []).append(origin)
    lines: list[str] = []
    for (device, is_older, hardware), group in by_machine.items():
        dates = sorted({origin.date for origin in group})
        commits = ", ".join(sorted({origin.commit for origin in group}))
        files = dict.fromkeys(f"`{origin.name.split('@')[0]}`" for origin in group)
        facts = [badge(device)]
        if is_older:
            facts.append(badge(OLDER))
        facts += [hardware, " to ".join(dict.fromkeys([dates[0], dates[-1]])), f"commit {commits}", ", ".join(files)]
        lines.append(" · ".join(facts))
    if note:
        lines.append(note)
    return "<small>" + "<br>".join(lines) + "</small>"


def has_history() -> bool:
    """Return whether this is a git checkout with the whole history."""
    try:
        return _git("rev-parse", "--is-shallow-repository") == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


def commit() -> str:
    """Return the current commit's short hash, with `-dirty` if there are uncommitted changes; `unknown` without git."""
    try:
        return _git("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def processor() -> str:
    """Return the name of this machine's processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def this_machine() -> tuple[str, str]:
    """Return the device, and a description of the hardware and of torch's version.

    The device is one of `DEVICES`, or the full name of a GPU that is not listed there.
    """
    import torch

    cores = f"{os.cpu_count()} cores of an {processor()}, torch {torch.__version__}"
    if not torch.cuda.is_available():
        return "CPU", cores
    gpu = torch.cuda.get_device_name()
    device = device_of(gpu)
    return gpu if device == "CPU" else device, f"{torch.cuda.device_count()} x {gpu}, {cores}"


def device_of(hardware: str) -> str:
    """Return the first member of `DEVICES` that a description of hardware contains, or CPU."""
    for device in DEVICES:
        if re.search(rf"\b{device}\b", hardware):
            return device
    return "CPU"


def _git(*arguments: str, check: bool = True) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout.strip()
