"""Check that the files, recipes, options and commands that README.md and docs/ name exist, and that their code runs."""

import ast
import fnmatch
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import python_page
import source_excerpts
from braceexpand import braceexpand
from markdown_it import MarkdownIt
from miniatures import save_clip
from PIL import Image
from small_runs import call, demo_shards

import neuclip_ds
from neuclip_ds.cli.main import COMMANDS as PROGRAMS
from neuclip_ds.config import Config
from neuclip_ds.recipe import TrainCommand, load_recipe, option_names, parse, recipe_names, validate

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOOLS = [path for path in sorted((ROOT / "tools").glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
OUR_FOLDERS = r"(?:neuclip_ds|tools|tests|docs|ds_configs|hostfiles)/"
# placeholders for option names
PLACEHOLDERS = {"--dotted.name", "--options", "--objective.margin.margin"}
# a command with one of these is incomplete, or reads a file that the reader writes or a run that the reader trains
SKETCHES = {
    "RECIPE",
    "...",
    "--options",
    "--help",
    "mine.yaml",
    "heads.yaml",
    "tuned.yaml",
    "margin_loss.py",
    "conv_tower.py",
    "hardest_negative.py",
    "runs/margin_2/config.yaml",
}
# files that a page tells readers to write, a file-name pattern, and a file of open_clip
NO_FILES = {
    "hostfiles/mine",
    "neuclip_ds/losses/offset.py",
    "neuclip_ds/losses/offset_options.py",
    "ds_configs/zeroN_bf16.json",
    "docs/openclip_results.csv",
}


def code_of(page: Path) -> list[str]:
    """Return a page's code: the lines of code blocks, with continuation lines joined, and inline code."""
    code = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            code += token.content.replace("\\\n", " ").splitlines()
        code += [child.content for child in token.children or [] if child.type == "code_inline"]
    return code


CODE: list[tuple[str, str]] = []  # page, code
for path in PAGES:
    CODE += [(str(path.relative_to(ROOT)), text) for text in code_of(path)]
PROGRAM = (
    r"(?:^|[\s/])(?:(train|tools/\w+)\.py|neuclip-ds ([a-z][\w-]*)|(?:-m|--module) neuclip_ds ([a-z][\w-]*))\s(.*)"
)
COMMANDS = [(page, text) for page, text in CODE if re.search(PROGRAM, text)]


def with_dashes(option: str) -> str:
    return f"--{option.removeprefix('--').replace('_', '-')}"


def module_of(command: str) -> Path:
    return ROOT / "neuclip_ds" / "cli" / f"{command.replace('-', '_')}.py"


def program_of(tool: Path) -> Path:
    """Return the module of the command that a file in tools/ wraps, or the file itself if it is not a wrapper."""
    command = re.search(r'main\(command="([\w-]+)"', tool.read_text(encoding="utf-8"))
    return module_of(command[1]) if command else tool


def modules_of(program: Path) -> set[Path]:
    """Return a program's module and the modules of `neuclip_ds.cli` that it imports, directly or indirectly."""
    modules: set[Path] = set()
    unread = {program}
    while unread:
        module = unread.pop()
        modules.add(module)
        names = re.findall(r"from neuclip_ds\.cli\.(\w+) import", module.read_text())
        unread |= {module_of(name) for name in names} - modules
    return modules


def options_of(tool: Path) -> set[str]:
    """Return the options of a tool's parser, read from the source because importing some tools takes seconds."""
    options = {"--help"}
    for path in modules_of(program_of(tool)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"):
                continue
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("--"):
                options.add(with_dashes(str(name.value)))
    return options


TRAIN_OPTIONS = {with_dashes(name) for name in option_names(TrainCommand)} | {"--help"}
OPTIONS = {tool.name: options_of(tool) for tool in TOOLS} | {name: options_of(module_of(name)) for name in PROGRAMS}
for tool in ("train.py", "train", "profile_communication.py", "benchmark_step.py", "cost_model.py"):
    OPTIONS[tool] = OPTIONS.get(tool, set()) | TRAIN_OPTIONS  # which these programs also accept


def named_options(text: str) -> Iterator[str]:
    yield from re.findall(r"(?<![\w-])--[a-zA-Z][\w.-]*\w", text)


def test_the_site_builds_without_a_dead_link_or_anchor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    commands = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config").load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"))
    commands.build(config)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    assert (tmp_path / "site" / "index.html").is_file()


def test_links_of_the_readme_exist() -> None:
    for token in MarkdownIt("commonmark").enable("table").parse((ROOT / "README.md").read_text(encoding="utf-8")):
        for child in token.children or []:
            target = str(child.attrs.get("href") or child.attrs.get("src") or "")
            path = target.split("#")[0]
            assert path.startswith("https://") or (ROOT / path).exists(), target


def test_pages_that_the_code_names_exist() -> None:
    sources = [*TOOLS, *(ROOT / "neuclip_ds").rglob("*.*"), *(ROOT / "tests").rglob("*.py"), ROOT / "pyproject.toml"]
    pages: set[str] = set()
    for path in sources:
        if path.suffix in (".py", ".yaml", ".toml"):
            pages |= set(re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8")))
    assert pages
    assert {page for page in pages if not (ROOT / page).is_file()} == set()


PACKAGES = "|".join(path.name for path in (ROOT / "neuclip_ds").iterdir() if path.is_dir())


def test_files_that_are_named_exist() -> None:
    names: set[tuple[str, str]] = set()
    for page, text in CODE:
        for path in re.findall(rf"(?<![\w./:{{-]){OUR_FOLDERS}[\w./*{{}},-]*", text):
            names.add((page, path.rstrip("/.,")))
        if re.fullmatch(rf"(?:{PACKAGES})/[\w/]+\.py", text):
            names.add((page, f"neuclip_ds/{text}"))
    assert names
    missing = []
    for page, name in names:
        if name not in NO_FILES and not all(any(ROOT.glob(path)) for path in braceexpand(name)):
            missing.append((page, name))
    assert missing == []


def test_recipes_that_are_named_exist() -> None:
    data = "|".join(sorted({name.split("_")[0] for name in recipe_names()}))
    pattern = re.compile(rf"(?!demo_)(?:{data})_[\w*]+")
    names = {(page, text) for page, text in CODE if pattern.fullmatch(text)}
    assert names
    assert {(page, name) for page, name in names if not fnmatch.filter(recipe_names(), name)} == set()


def test_dotted_names_on_pages_are_options() -> None:
    """Check dotted option names in commands and on their own; the next test checks the other options in commands."""
    sections = "|".join(Config.model_fields)
    known = set(option_names(Config))
    known |= {"data.batchsize", "objective.offset.log_c"}  # a typo, and an option of a method that a page adds
    known |= {"objective.margin", "objective.margin.margin"}  # of a loss that a page registers
    dotted = re.compile(rf"^({sections})(\.[a-z][\w.]*)(?:=|$)|--({sections})(\.[\w.-]*\w)")
    files = re.compile(r".*\.(?:py|csv|json|yaml|safetensors|txt|html)|deepspeed\.launcher\..*")
    names: set[tuple[str, str]] = set()
    for page, text in CODE:
        for parts in dotted.findall(text):
            name = "".join(parts).replace("-", "_")
            if not files.fullmatch(name):
                names.add((page, name))
    assert names
    assert {(page, name) for page, name in names if name not in known} == set()


def test_commands_use_options_of_their_programs() -> None:
    assert COMMANDS
    for page, command in sorted(set(COMMANDS)):
        check_command(page, command)


def check_command(page: str, command: str) -> None:
    file, installed, module, options = re.findall(PROGRAM, command)[0]
    program = f"{Path(file).name}.py" if file else installed or module
    arguments = shlex.split(options, comments=True)
    names = {argument.split("=")[0] for argument in arguments if argument.startswith("--")} - PLACEHOLDERS
    assert {with_dashes(name) for name in names} <= OPTIONS[program], (page, command)
    if program in ("train.py", "train") and arguments and not SKETCHES & set(arguments):
        assert parse(arguments).config.run.name, (page, command)


def test_make_targets_and_extras_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    extras = set(re.findall(r"^(\w+) = \[\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))
    named_targets: set[str] = set()
    named_extras: set[str] = set()
    for _, text in CODE:
        named_targets |= set(re.findall(r"(?:^|&& )make ([\w-]+)", text))
        for names in re.findall(r"(?:neuclip_ds|'\.)\[([\w,]+)\]", text):
            named_extras |= set(names.split(","))
    assert named_targets and named_targets <= targets
    assert named_extras and named_extras <= extras


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_a_tool_has_an_example_in_its_help_and_is_named_in_the_docs(tool: Path) -> None:
    program = program_of(tool)
    source = program.read_text(encoding="utf-8")
    help_text = ast.get_docstring(ast.parse(source)) or ""
    assert "description=__doc__" in source and re.search(r"^Examples?:", help_text, re.MULTILINE)
    name = rf"(?:tools/{tool.name}|neuclip(?:-ds|_ds) {program.stem.replace('_', '-')})"
    examples = re.findall(rf"{name}[^\n]*(?:\n {{4,}}[^\n]*)*", help_text.split("Example")[-1])
    assert examples
    for example in examples:
        assert {with_dashes(option) for option in named_options(example)} <= OPTIONS[tool.name]
    assert any(re.search(name, text) for _, text in CODE)


@dataclass(frozen=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    skipped: bool  # a comment before the block gives the reason


def blocks() -> Iterator[Block]:
    for page in PAGES:
        before = ""
        for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
            if token.type == "fence" and token.map is not None:
                yield Block(
                    page=str(page.relative_to(ROOT)),
                    line=token.map[0] + 1,
                    language=token.info,
                    text=token.content,
                    skipped="<!-- not run: " in before,
                )
            before = token.content if token.type == "html_block" else ""


# a block that begins with a file name is an excerpt from that file
PYTHON = [b for b in blocks() if b.language == "python" and not (b.skipped or re.match(r"# [\w/]+\.py", b.text))]
YAML = [block for block in blocks() if block.language == "yaml"]


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the code on the pages uses: exports, a picture, captions and shards."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("demo", "mine"):
        save_clip(folder / "exported" / name)
    Image.new("RGB", (40, 30), "red").save(folder / "picture.jpg")
    (folder / "captions.tsv").write_text("picture.jpg\ta red picture\n", encoding="utf-8")
    demo_shards(folder / ".cache" / "demo", 80)  # where runs of the demo find it
    (folder / "data").mkdir()
    (folder / "data" / "rendered").symlink_to(folder / ".cache" / "demo")
    return folder


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


# training and the registration of a loss change their process, so these blocks run in another one
CHANGES_PROCESS = [block for block in PYTHON if re.search(r"neuclip_ds\.train\(|\bregister_loss\(", block.text)]


@pytest.mark.parametrize("block", [block for block in PYTHON if block not in CHANGES_PROCESS], ids=name_of)
def test_python_blocks_run(block: Block, readers_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(readers_folder)
    exec(compile(block.text.replace("/data/", f"{readers_folder}/data/"), block.page, "exec"), {"__name__": "__main__"})


def test_python_blocks_that_train_run(readers_folder: Path) -> None:
    """Run these blocks one after the other in one process, because starting one takes seconds.

    Several of them train the same run, which the first one completes.
    """
    program = ""
    for block in CHANGES_PROCESS:
        text = block.text.replace("/data/", f"{readers_folder}/data/")
        program += f"exec(compile({text!r}, {name_of(block)!r}, 'exec'), {{'__name__': '__main__'}})\n"
    (readers_folder / "blocks.py").write_text(program, encoding="utf-8")
    call(str(readers_folder / "blocks.py"), folder=readers_folder)


@pytest.mark.parametrize("block", YAML, ids=lambda block: f"{block.page}:{block.line}")
def test_yaml_blocks_are_valid_recipes(block: Block, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(block.text, encoding="utf-8")
    validate(load_recipe(str(tmp_path / "mine.yaml")))


def test_the_api_page_equals_the_docstrings() -> None:
    """The page is equal to the output of `python tests/python_page.py`."""
    assert python_page.PAGE.read_text(encoding="utf-8") == python_page.written()


@pytest.mark.parametrize("page", source_excerpts.PAGES, ids=lambda page: page.name)
def test_excerpts_on_pages_equal_the_source(page: Path) -> None:
    """The page is equal to the output of `python tests/source_excerpts.py`."""
    text = page.read_text(encoding="utf-8")
    assert source_excerpts.BLOCK.search(text)
    assert text == source_excerpts.written(page)


@pytest.mark.parametrize("name", neuclip_ds.__all__)
def test_the_api_page_has_an_example_of_every_name(name: str) -> None:
    page = python_page.PAGE.read_text(encoding="utf-8")
    entry = re.split(r"^##+ ", page.partition(f"\n### {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert "```python" in entry
    assert "Example:" in inspect.getdoc(getattr(neuclip_ds, name))


def test_the_pages_have_code_that_runs() -> None:
    assert PYTHON and YAML
