"""A package imports only packages of lower layers (docs/explanation/architecture.md)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from small_runs import demo_shards, environment

from neuclip_ds.objectives import METHODS

PACKAGE = Path(__file__).parents[1] / "neuclip_ds"
# lowest first; packages in the same layer do not import each other
LAYERS: list[set[str]] = [
    {"errors"},
    {"section", "distributed", "files"},
    {"state", "data"},
    {"objectives"},
    {"config"},
    {"recipe", "models", "reporting"},
    {"evaluation", "loss"},
    {"profiling", "engine", "embedding"},
    {"checkpoint"},
    {"training"},
    {"api", "planning"},
    {"cli"},
]
# packages and modules whose functions may import neuclip_ds: commands, public names and the table of methods, which
# importing torch would delay, and rarely needed code (models of other libraries, scanning and rendering of data)
LATE_IMPORTS = {
    "cli",
    "loss/__init__.py",
    "models/source.py",
    "objectives/__init__.py",
    "objectives/compose.py",
    "training/data.py",
}
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
# a library -> the only packages that may import it
ONLY_IN = {"deepspeed": {"distributed", "engine"}, "torch.distributed": {"distributed"}}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, at the top level or inside functions."""
    return {name for node in nodes(path) for name in names_of(node)}


def names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def modules() -> Iterator[tuple[Path, str, set[str]]]:
    """Yield the path, package and imports of each module; a top-level module counts as a package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package not in ("__init__", "__main__"):
            yield path, package, imported(path)


def test_every_package_has_a_layer_and_never_imports_a_higher_one() -> None:
    assert {package for _, package, _ in modules()} == set(LAYER)
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

    assert astray == []


def test_nothing_unpickles_what_another_rank_or_a_file_holds() -> None:
    """Unpickling can run arbitrary code, and anyone who can reach a run's port could send a pickle to its ranks."""
    collectives = {"all_gather_object", "gather_object"}
    collectives |= {f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")}
    found = []
    for path, _, names in modules():
        found += [f"{path}: {name}" for name in names & {"shelve", "marshal", "dill", "cloudpickle"}]
        for node in nodes(path):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            called, arguments = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            unsafe = node.func.attr in collectives or called in ("pickle.load", "pickle.loads")
            unsafe |= called == "torch.load" and arguments.get("weights_only") != "True"
            unsafe |= arguments.get("allow_pickle", "False") != "False"
            found += [f"{path}:{node.lineno}: {called}"] * unsafe
    assert found == []


def test_functions_import_nothing_of_this_package() -> None:
    """An import inside a function hides an import cycle or a dependency of the module."""
    late = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, package, _ in modules()
        if not {package, path.relative_to(PACKAGE).as_posix()} & LATE_IMPORTS
        for function in nodes(path)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if (isinstance(node, (ast.Import, ast.ImportFrom)) and "neuclip_ds" in ast.unparse(node))
        or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"))
    ]
    assert late == []


def test_options_and_the_table_of_methods_load_without_torch() -> None:
    """Without torch, --help and config errors appear at once, and processes that scan shards start at once."""
    loaded = "neuclip_ds.recipe, neuclip_ds.objectives, neuclip_ds.cli.build_manifest"
    heavy = {"torch", "timm", "transformers", "deepspeed"}
    code = f"import {loaded}, sys; neuclip_ds.UserError; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_methods_are_named_in_the_table_alone() -> None:
    """No code compares with the name of a method, as in `if method == "neuclip"`."""
    for path, _, _ in modules():
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                constants = {
                    n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
                assert not constants & set(METHODS), f"{path}:{node.lineno}"


ROOT = "neuclip_ds.training.trainer"
FILES, LINES = 120, 13_500  # limits on the files and lines of this package that the trainer imports
SATELLITES = (  # modules that the trainer must not import
    "neuclip_ds.api",
    "neuclip_ds.checkpoint.export_run",
    "neuclip_ds.checkpoint.model_card",
    "neuclip_ds.checkpoint.remote",
    "neuclip_ds.checkpoint.saved_model",
    "neuclip_ds.cli",
    "neuclip_ds.embedding",
    "neuclip_ds.data.demo",
    "neuclip_ds.evaluation",
    "neuclip_ds.models.conversion",
    "neuclip_ds.planning",
    "neuclip_ds.profiling",
    "neuclip_ds.reporting.report",
    "neuclip_ds.training.hooks.optional",
    "neuclip_ds.training.hooks.remote",
)


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported, without function bodies and imports for type checkers."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not (for_types or isinstance(child, ast.FunctionDef)):
            yield child
            yield from at_import(child)


def closure(root: str) -> dict[str, Path]:
    """Return the modules of this package that importing `root` imports, mapped to their files."""
    found: dict[str, Path] = {}
    new = {root}
    while new:
        module = new.pop()
        path = PACKAGE.parent / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.startswith("neuclip_ds") and module not in found and path.is_file():
            found[module] = path
            new.add(module.rpartition(".")[0])
            new |= {name for node in at_import(ast.parse(path.read_text(encoding="utf-8"))) for name in names_of(node)}
    return found


def test_the_trainer_knows_no_satellite() -> None:
    """Reports, exports, remote copies, evaluation, planning and profiling are hooks or commands outside the trainer."""
    files = closure(ROOT)
    assert [name for name in files if name.startswith(SATELLITES)] == []
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    largest = sorted(lines, key=lines.__getitem__, reverse=True)[:20]
    count = f"{len(lines)} files of {sum(lines.values())} lines, the largest of which are {largest}"
    assert len(lines) <= FILES and sum(lines.values()) <= LINES, count


@pytest.mark.slow
def test_a_training_step_is_read_in_few_files(tmp_path: Path) -> None:
    script = Path(__file__).with_name("reading_path.py")
    call = [sys.executable, str(script), str(demo_shards(tmp_path, 600))]
    printed = subprocess.run(call, env=environment(), capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["files"] <= 30 and found["lines"] <= 4_800, printed
