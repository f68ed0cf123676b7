"""A package imports only packages of lower layers (docs/explanation/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

from neuclip_ds.losses.methods import METHODS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "neuclip_ds"

# Lowest first. A package or top-level module imports only those of lower layers; those of one layer do not import each
# other.
LAYERS: list[set[str]] = [
    {"limits"},
    {"errors"},
    {"section", "distributed", "files", "compiler"},
    {"state"},
    {"losses"},
    {"config"},
    {"recipe", "models"},
    {"data"},
    {"engine", "reporting"},
    {"evaluation", "profiling"},
    {"checkpoint", "embedding"},
    {"training"},
    {"api", "planning"},
    {"cli"},
]
# package -> the only packages below it that it imports; a package that is not listed may import all of them
IMPORTS_ONLY = {
    "distributed": {"errors", "limits"},
    "losses": {"errors", "section", "distributed", "state", "compiler"},
}
# library -> the only packages that import it
LIBRARIES = {"deepspeed": {"distributed", "engine"}, "torch.distributed": {"distributed"}}
# attributes of DeepSpeed's engine, of its wrappers around the optimizer, and of parameters under ZeRO 3
ATTRIBUTES_OF_DEEPSPEED = {
    "averaged_gradients",
    "basic_optimizer",
    "bf16_groups",
    "ds_id",
    "ds_numel",
    "ds_shape",
    "ds_tensor",
    "fp16_groups",
    "fp32_groups_flat_partition",
    "fp32_groups_gradients_flat",
    "fp32_partitioned_groups_flat",
    "get_global_grad_norm",
    "global_samples",
    "global_steps",
    "partition_numel",
    "set_gradient_accumulation_boundary",
    "single_partition_of_fp32_groups",
    "was_step_applied",
    "zero_optimization_stage",
}

# Functions that import modules of this package when they are called, and why; all other imports are at the top of a
# file. A key is FILE: FUNCTION, or a folder for all of its functions.
LATE_IMPORTS = {
    "losses/method.py: build": "the table of methods loads without torch",
    "losses/plugins.py: import_plugin": "the user names the module",
}
# as above, for modules that most runs do not use: they do not count as imports of the function's module
OPTIONAL_IMPORTS = {
    "__init__.py: __getattr__": "a public name is imported when it is first used, because torch takes seconds",
    "cli": "a command imports what it needs after its options are checked, because torch takes seconds",
    "losses/__init__.py: __getattr__": "a public name is imported when it is first used, because torch takes seconds",
    "data/open_data.py: read": "scanning of shards that have no manifest",
    "data/open_data.py: resolve": "rendering of the demo data",
    "data/training_data.py: new_tokenizer": "the tokenizer of open_clip",
    "models/source.py: locate_model": "models of other libraries",
    "models/source.py: model_source": "models of other libraries",
    "models/source.py: _text_encoder": "text encoders of transformers",
}
# modules that the trainer must not import, because they are commands or hooks outside of it
OUTSIDE_THE_TRAINER = (
    "neuclip_ds.checkpoint.remote",
    "neuclip_ds.cli",
    "neuclip_ds.data.demo",
    "neuclip_ds.planning",
    "neuclip_ds.profiling",
    "neuclip_ds.reporting.report",
    "neuclip_ds.training.hooks.remote",
)
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def names_of(node: ast.AST) -> set[str]:
    """Return the dotted names of all modules that a statement or a call of `import_module` imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    if is_dynamic_import(node):
        return modules_named_by(node.args[0])
    return set()


def is_dynamic_import(node: ast.AST) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    return "import_module" in (getattr(function, "id", ""), getattr(function, "attr", ""))


def modules_named_by(argument: ast.expr) -> set[str]:
    """Return the modules that an argument of `import_module` may name: all of a folder if it ends with a variable."""
    if isinstance(argument, ast.Constant):
        return {str(argument.value)}
    if isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
        package = str(argument.values[0].value).rpartition(".")[0]
        return {f"{package}.{path.stem}" for path in (ROOT / package.replace(".", "/")).glob("*.py")}
    return set()


@cache
def imported(path: Path) -> set[str]:
    """Return the names of all modules that a file imports, at the top level or inside functions."""
    names: set[str] = set()
    for node in ast.walk(syntax_tree(path)):
        names |= names_of(node)
    return names


def package_of(path: Path) -> str:
    """Return the package of a file, or the name of a top-level module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> Iterator[tuple[Path, str]]:
    """Yield the path and the package of each module; a top-level module counts as a package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if package_of(path) not in ("__init__", "__main__"):
            yield path, package_of(path)


def test_a_package_imports_only_packages_of_lower_layers() -> None:
    assert {package for _, package in modules()} == set(LAYER), "each package has a layer"
    forbidden = []
    for path, package in modules():
        for name in imported(path):
            if not name.startswith("neuclip_ds."):
                continue
            other = name.split(".")[1]
            if other == package or other not in LAYER:  # of this package, or a public name
                continue
            is_lower = LAYER[other] < LAYER[package]
            if not is_lower or other not in IMPORTS_ONLY.get(package, LAYER):
                forbidden.append(f"{path.relative_to(PACKAGE)} imports {other}")
    assert forbidden == []


def test_deepspeed_and_collectives_are_used_by_few_packages() -> None:
    forbidden = []
    for path, package in modules():
        for library, packages in LIBRARIES.items():
            uses = any(name == library or name.startswith(f"{library}.") for name in imported(path))
            if uses and package not in packages:
                forbidden.append(f"{path.relative_to(PACKAGE)} imports {library}")
    assert forbidden == []


def test_only_the_engine_package_uses_deepspeeds_engine() -> None:
    """To support another version of DeepSpeed, or another engine, only one package then has to change."""
    users = set()
    for path, package in modules():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES_OF_DEEPSPEED:
                users.add(package)
    assert users == {"engine"}


def functions_that_import(node: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the name of the innermost function around each import of this package that is inside a function."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node.name
    if function and (is_dynamic_import(node) or any(name.startswith("neuclip_ds") for name in names_of(node))):
        yield function
    for child in ast.iter_child_nodes(node):
        yield from functions_that_import(child, function)


def test_functions_import_this_package_only_for_a_reason() -> None:
    """An import inside a function hides an import cycle or a dependency of the module."""
    used = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for function in functions_that_import(syntax_tree(path)):
            used.add(package_of(path) if package_of(path) in OPTIONAL_IMPORTS else f"{file}: {function}")
    assert used == LATE_IMPORTS.keys() | OPTIONAL_IMPORTS.keys()


def unsafe_calls(path: Path) -> Iterator[str]:
    """Yield the calls in a file that unpickle data."""
    collectives = {"all_gather_object", "gather_object"}
    collectives |= {f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")}
    for node in ast.walk(syntax_tree(path)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        called = ast.unparse(node.func)
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        is_unsafe = node.func.attr in collectives or called in ("pickle.load", "pickle.loads")
        is_unsafe |= called == "torch.load" and arguments.get("weights_only") != "True"
        is_unsafe |= arguments.get("allow_pickle", "False") != "False"
        if is_unsafe:
            yield f"{path}:{node.lineno}: {called}"


def test_nothing_unpickles_data_of_another_rank_or_a_file() -> None:
    """Unpickling can run arbitrary code, and anyone who can reach a run's port could send a pickle to its ranks."""
    for path, _ in modules():
        assert list(unsafe_calls(path)) == []
        assert imported(path) & {"shelve", "marshal", "dill", "cloudpickle"} == set(), path


def test_methods_are_named_in_the_table_alone() -> None:
    """No code compares a value with the name of a method, as in `if method == "neuclip"`."""
    for path, _ in modules():
        for comparison in ast.walk(syntax_tree(path)):
            if not isinstance(comparison, ast.Compare):
                continue
            if ast.unparse(comparison.comparators[0]).endswith(".sections"):
                continue  # the name of a section of options, which may be that of its method
            for node in ast.walk(comparison):
                is_name = isinstance(node, ast.Constant) and node.value in METHODS
                assert not is_name, f"{path}:{comparison.lineno}"


def needed_imports(node: ast.AST, file: str) -> Iterator[str]:
    """Yield the modules that a file imports, except those for type checkers and those in `OPTIONAL_IMPORTS`."""
    yield from names_of(node)
    for child in ast.iter_child_nodes(node):
        for_type_checkers = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_optional = is_function and f"{file}: {child.name}" in OPTIONAL_IMPORTS
        if not (for_type_checkers or is_optional):
            yield from needed_imports(child, file)


def closure(root: str) -> set[str]:
    """Return the modules of this package that `root` needs, directly or indirectly, at the top or in functions."""
    needed: set[str] = set()
    unread = {root}
    while unread:
        module = unread.pop()
        path = ROOT / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module in needed or not path.is_file() or not path.is_relative_to(PACKAGE):
            continue
        needed.add(module)
        unread.add(module.rpartition(".")[0])  # importing a module imports its package
        unread |= set(needed_imports(syntax_tree(path), path.relative_to(PACKAGE).as_posix()))
    return needed


def test_the_trainer_needs_no_command_and_no_optional_hook() -> None:
    """Reports, remote copies, planning, profiling and the demo data are hooks or commands outside the trainer."""
    needed = closure("neuclip_ds.training.trainer")
    assert "neuclip_ds.losses.neuclip" in needed, "imports inside functions count"
    assert [name for name in needed if name.startswith(OUTSIDE_THE_TRAINER)] == []
