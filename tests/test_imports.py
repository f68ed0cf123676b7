"""A package imports only packages of lower layers (docs/explanation/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from neuclip_ds.objectives import METHODS

PACKAGE = Path(__file__).parents[1] / "neuclip_ds"
# lowest first; packages of one layer do not know each other
LAYERS: list[set[str]] = [
    {"redaction", "checksum"},
    {"errors"},
    {"section", "distributed"},
    {"state", "data", "documents"},
    {"objectives"},
    {"config"},
    {"recipe", "models"},
    {"evaluation", "loss", "reporting"},
    {"profiling", "engine", "embedding"},
    {"checkpoint"},
    {"training"},
    {"api", "planning", "reproduction"},
    {"doctor"},
    {"cli"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
# a library -> the only packages that may import it
ONLY_IN = {"deepspeed": {"distributed", "engine"}, "torch.distributed": {"distributed"}}
WITHOUT_TORCH = {
    "errors",
    "section",
    "documents",
    "config",
    "recipe",
}  # so that --help and mistakes in a config answer at once


def imported(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules() -> Iterator[tuple[Path, str, set[str]]]:
    """Yield each module of a package or of the top level: its path, its package and what it imports."""
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package not in ("__init__", "__main__"):
            yield path, package, imported(path)


def test_every_package_has_a_layer() -> None:
    assert {package for _, package, _ in modules()} == set(LAYER)


def test_lower_layers_never_import_higher_ones() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path, package, names in modules()
        for other in {name.split(".")[1] for name in names if name.startswith("neuclip_ds.")}
        if other != package and LAYER.get(other, -1) >= LAYER[package]
    ]
    assert upward == []


def test_libraries_stay_where_they_belong() -> None:
    astray = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path, package, names in modules()
        for name in names
        for library, packages in ONLY_IN.items()
        if (name == library or name.startswith(f"{library}.")) and package not in packages
    ]
    heavy = {"torch", "timm", "transformers", "deepspeed"}
    astray += [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path, package, names in modules()
        if package in WITHOUT_TORCH
        for name in names
        if name.split(".")[0] in heavy
    ]
    assert astray == []


def test_options_and_the_table_of_methods_load_without_torch() -> None:
    """Method files import their parts, and with them torch, when an objective is composed."""
    code = "import neuclip_ds.recipe, neuclip_ds.objectives, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_methods_are_named_in_the_table_alone() -> None:
    """A comparison with a method's name, `if method == "neuclip"`, is a switch."""
    for path, _, _ in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {
                    n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
                assert not constants & set(METHODS), f"{path}:{node.lineno}"
