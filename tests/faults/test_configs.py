"""Check that invalid recipes, options, DeepSpeed configs and hostfiles cause one-line errors, never a traceback."""

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import call

from neuclip_ds.config import Config, dump
from neuclip_ds.distributed.launch import read_hostfile
from neuclip_ds.engine.config import load_engine_config, read_engine_file
from neuclip_ds.engine.start import check_engine_config
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import load_recipe, load_saved, option_names, parse, validate
from neuclip_ds.section import read_options, read_yaml

NAMES = option_names(Config)
WORDS = ["neuclip", "gcl", "pad", "1e400", "null", "[", "{", "~", "\0", "a\nb", ".inf", "\udcff", "x" * 5000]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**30), st.floats(), st.text(max_size=8), st.sampled_from(WORDS)
)
KEYS = st.one_of(st.text(max_size=5), st.sampled_from([name.split(".")[-1] for name in NAMES]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
YAML_PARTS = [
    *(b"data:\n", b"run:\n", b"  name: x\n", b"include: [r]\n", b"include: r\n", b"include: 5\n", b"objective:\n"),
    *(b"  other_methods:\n", b"    npn:\n", b"  method: gcl\n", b"  method: [gcl]\n", b"!!python/object:os.system {}"),
    *(b"!!set {a}\n", b"<<: *a\n", b"x: &a [*a]\n", b"\xff\xfe", b"\xef\xbb\xbf", b"y: !!int ''\n", b"on: off\n"),
    *(b"  seed: !!timestamp x\n", b"  seed: 2001-99-99\n", b"  seed: !!float\n", b"  seed: 1:99\n", b"[" * 1000),
]
ENGINE_KEYS = ["bf16", "fp16", "zero_optimization", "optimizer", "train_batch_size", "gradient_clipping", "aio"]
ENGINE_KEYS += ["steps_per_print", "flops_profiler", "activation_checkpointing", "comms_logger", "tensorboard"]
ZERO_KEYS = ["stage", "offload_optimizer", "offload_param", "allgather_bucket_size", "overlap_comm", "nonsense"]


def succeeds_or_explains(work: Callable[[], object]) -> None:
    """Fail unless `work` succeeds or raises a one-line `UserError` of moderate length."""
    try:
        work()
    except UserError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1500


def resolve(argv: Sequence[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):  # raised by --help
        config = parse(argv).config
        config.micro_batch(2)
        assert validate(yaml.safe_load(dump(config))) == config


def nested(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in pairs:
        *sections, key = name.split(".")
        node = tree
        for section in sections:
            inner = node.get(section)
            node[section] = inner if isinstance(inner, dict) else {}
            node = node[section]
        node[key] = value
    return tree


def texts(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


RECIPES = st.one_of(
    st.lists(st.tuples(st.sampled_from(NAMES), VALUES), min_size=1, max_size=3).map(
        lambda pairs: json.dumps(nested(pairs)).encode()  # nearly all JSON is YAML
    ),
    st.binary(max_size=60),
    st.lists(st.sampled_from(YAML_PARTS), max_size=6).map(b"".join),
)
OPTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([*NAMES, "hostfile", "gpu-memory", "profile"]), VALUES).map(
            lambda pair: f"--{pair[0]}={texts(pair[1])}"
        ),
        st.text(max_size=12),
        st.sampled_from(["--data", "--data.", "=", "--=", "-x", "--run={}", '--objective={"method":5}', "--"]),
    ),
    max_size=3,
)
ENGINES = st.one_of(
    st.dictionaries(st.sampled_from(ENGINE_KEYS), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(ZERO_KEYS), VALUES, max_size=3).map(lambda zero: {"zero_optimization": zero}),
    VALUES,
).map(lambda tree: json.dumps(tree).encode()) | st.binary(max_size=30)
HOSTFILES = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from(["a", " ", "slots", "=", "1", "0", "²", "\n", "#", "9" * 5000]), max_size=9).map(
        lambda parts: "".join(parts).encode()
    ),
)


def check_recipe(folder: Path, data: bytes) -> None:
    (folder / "r.yaml").write_bytes(data)
    succeeds_or_explains(lambda: resolve([str(folder / "r.yaml")]))
    succeeds_or_explains(lambda: load_saved(folder / "r.yaml"))


def check_options(folder: Path, options: list[str]) -> None:
    succeeds_or_explains(lambda: resolve(["demo", *options]))


def check_engine(folder: Path, data: bytes) -> None:
    (folder / "engine.json").write_bytes(data)
    config = parse(["demo", f"--deepspeed={folder}/engine.json"]).config
    succeeds_or_explains(lambda: check_engine_config(load_engine_config(config, 1), config.deepspeed))


def check_hostfile(folder: Path, data: bytes) -> None:
    (folder / "hosts").write_bytes(data)
    succeeds_or_explains(lambda: read_hostfile(folder / "hosts"))


CHECKS = [(check_recipe, RECIPES, 8), (check_options, OPTIONS, 15), (check_engine, ENGINES, 15)]
CHECKS += [(check_hostfile, HOSTFILES, 15)]


@pytest.mark.parametrize("factor", [1, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("check", "inputs", "number"), CHECKS)
def test_generated_input_is_accepted_or_refused_in_one_line(
    check: Callable[[Path, Any], None], inputs: st.SearchStrategy[Any], number: int, factor: int, tmp_path: Path
) -> None:
    profile = settings(max_examples=factor * number, derandomize=True, database=None, deadline=None)
    profile = settings(profile, suppress_health_check=list(HealthCheck))
    profile(given(inputs)(lambda data: check(tmp_path, data)))()


def expanding_aliases(value: str) -> str:
    """Return YAML with 20 values, each of which refers to the one before, `*v`, several times."""
    lines = ["v0: &v0 {a: 1}"]
    for number in range(1, 20):
        inner = value.replace("*v", f"*v{number - 1}")
        lines.append(f"v{number}: &v{number} {inner}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {bach_size: 3}", "unknown key data.bach_size; did you mean data.batch_size?"),
        ("data: {'train[0]': a}", "unknown key data.train[0]; did you mean data.train?"),
        ("data: [", "not valid YAML"),
        ("run: {name: Bücher}".encode("latin-1"), "not valid YAML"),
        ("- data", "must be a mapping"),
        ("include: [nothing]", "includes it)"),
        (
            "objective: {method: gcl, hinge: {margin: 1}}",
            "objective.method=gcl does not use objective.hinge.margin; these methods do: tuneclip",
        ),
        ("objective: {other_methods: {hnge: {}}}", "unknown key objective.other_methods.hnge; did you mean hinge?"),
        ("objective: {other_methods: {hinge: {margn: 1}}}", "unknown key hinge.margn"),
        ("run: &a\n  x: *a", "an alias (*NAME) refers to a value that contains the alias itself"),
        (expanding_aliases("[*v, *v, *v, *v]"), "contains more than 100000 values"),
        (expanding_aliases("{<<: [*v, *v, *v, *v]}"), "contains more than 100000 values"),
        ("run: " + "[" * 1000, "not valid YAML"),
        ("run: {seed: " + "9" * 5000 + "}", "not valid YAML"),
        ("optimizer: {lr: .inf}", "finite"),
        ("optimizer: {lr: .nan}", "lr=nan"),
        ("run: {seed: 123456789012345678901234567890}", "does not fit in 64 bits"),
        ('run: {name: "a\\0b"}', "contains a NUL character"),
        ("model: {vision: {options: {a: 2001-01-01}}}", "is a date; write it in quotes"),
        ("include: [other]", "includes itself (r.yaml includes other.yaml includes r.yaml)"),
        ("include: demo", "is not a list of recipes"),
        ("optimizer: {lr: 1}\ndata: {}\noptimizer: {eps: 1}", "the key 'optimizer' occurs twice, in lines 1 and 3"),
        ('data: {workers: 1, "workers": 2}', "r.yaml is not valid YAML or JSON: the key 'workers' occurs twice"),
        ("objective: {method: [gcl]}", "objective.method=['gcl'] is unknown"),
        ("run: 5", "run=5"),
        ("{" + ", ".join(f"k{number}: 1" for number in range(50)) + "}", "and 45 more problems"),
    ],
)
def test_invalid_recipes_are_refused_in_one_line(text: str | bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "other.yaml").write_text("include: [r]")
    with pytest.raises(UserError) as caught:
        resolve([str(tmp_path / "r.yaml")])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['a: !!int ""', "a: !!bool maybe", "a: " + "[" * 3000])
def test_invalid_yaml_raises_value_error_whatever_pyyaml_raises(text: str) -> None:
    with pytest.raises(ValueError):
        read_yaml(text)


def test_a_key_that_occurs_twice_in_json_is_refused(tmp_path: Path) -> None:
    """Recipes and DeepSpeed configs may be JSON."""
    path = tmp_path / "zero2.json"
    path.write_text('{"optimizer": {"lr": 1}, "zero_optimization": {"stage": 1, "stage": 2}}')
    for read in (read_options, read_engine_file, load_recipe):
        with pytest.raises(UserError, match=r"zero2\.json is not valid .* the key 'stage' occurs twice"):
            read(path if read is read_options else str(path))


def test_merge_keys_of_yaml_may_be_overridden() -> None:
    text = "a: &a {x: 1}\nb: &b {y: 1}\nc: {<<: *a, <<: *b, x: 2}"
    assert read_yaml(text)["c"] == {"x": 2, "y": 1}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_recipes_may_have_empty_sections_and_other_encodings(encoding: str, tmp_path: Path) -> None:
    text = "include: [demo]\ndata:\nmodel:\n  text:\nrun:\n  name: Bücher\nobjective:\n  other_methods:\n"
    (tmp_path / "r.yaml").write_text(text, encoding=encoding)
    config = parse([str(tmp_path / "r.yaml")]).config
    assert config.run.name == "Bücher"
    assert config.data == parse(["demo"]).config.data


@pytest.mark.parametrize(
    ("zero", "words"),
    [('{"stage": "two"}', "zero_optimization.stage"), ('{"allgather_bucket_size": "x"}', "DeepSpeed rejects")],
)
def test_all_ranks_refuse_an_invalid_engine_config(zero: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(f'{{"zero_optimization": {zero}}}')
    done = call("train.py", "demo", "--deepspeed=engine.json", "--data.train=.", folder=tmp_path, ranks=2, code=2)
    assert words in done.stderr
    assert done.stderr.count("error: ") == 1 + ("error: rank" in done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "runs").exists()
