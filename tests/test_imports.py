"""The imports hold the architecture (docs/architecture.md): who may know whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from neuclip_ds.objectives import METHODS

PACKAGE = Path(__file__).parents[1] / "neuclip_ds"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {path.stem for path in PACKAGE.glob("*.py")}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "recipe": {"config", "errors"},
    "distributed": {"errors"},
    "state": {"distributed", "errors"},
    "objectives": {"config", "distributed", "errors", "state"},
    "data": {"errors"},
    "models": {"config", "errors"},
    "evaluation": {"data", "errors"},
    "reporting": {"errors"},
    "profiling": {"distributed", "errors", "reporting"},
    "reproduction": {"errors", "reporting"},
    "training": ROOMS - {"cli"},
    "cli": ROOMS,
}


def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def test_every_room_has_its_rule() -> None:
    assert ROOMS - {"__init__", "__pycache__", "recipes", "py"} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    known = {name.split(".")[1] for name in imported(path) if name.startswith("neuclip_ds.")}
    assert known - {room} <= MAY_IMPORT[room], f"{path} reaches out of its room"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    names, room = imported(path), room_of(path)
    if room != "training":
        assert not any(name.split(".")[0] == "deepspeed" for name in names)
    if room != "distributed":
        assert not any(name.startswith("torch.distributed") for name in names)
    if room in ("config", "recipe", "errors"):
        assert not any(name.split(".")[0] in ("torch", "timm", "transformers") for name in names)


def test_methods_are_named_in_the_table_alone() -> None:
    """No `if method == "neuclip"` anywhere: a comparison with a method's name is a switch."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {
                    n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
                assert not constants & set(METHODS), f"{path}:{node.lineno}"
