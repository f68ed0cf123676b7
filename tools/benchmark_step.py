"""For developers of neuclip_ds: compare training steps with a plain DDP loop and open_clip's training program.

The part `speed` prints a table of samples/s and ratios for each number of ranks and of pairs per rank, and writes it to
OUT/speeds.csv, which begins with its origin, as the files in tools/measurements do. The programs are

    here: METHOD    train.py (with --data random: its training step on four batches of noise, pinned and prefetched)
    plain DDP       a loop with DistributedDataParallel, OpenCLIP's loss, this project's towers and webdataset's loader
    open_clip       the program open_clip_train.main with the same timm trunk and open_clip's text tower of equal size

They run in fresh processes without a profiler, interleaved (ABCABC), with the same seed, batch, image size, tokenizer,
AdamW settings, captions of the same lengths, and numbers of loader processes and threads. All programs write a
TensorBoard point every --log-every steps; the wall times of these points give the speed. With --data random, our
programs and plain DDP count the launches of one more step: on a GPU, the kernels, copies and memsets that the profiler
records; on a CPU, aten operations without views and allocations, unless the towers are compiled.

--variants selects configs of our programs. `default` is the config as given. `baseline` turns off four changes: lean
(optimizer.lean_zero1), packed (model.text.packed), class_token (model.vision.class_token_only) and compiled
(model.compile=blocks). The name of a change turns on this change alone, and `all` turns on all of them (lean only with
ZeRO 1 in bf16). Single changes are measured only for the first of --methods and --rows, and further methods only for
the first of --rows. The peers pad captions and compute all tokens in all blocks, unless options of open_clip change
this; ddp_compiled compiles the towers of plain DDP. Each --peer-flags is one string with options of open_clip, and
open_clip runs once with each of these strings (an empty string for no options). --open-clip-main also runs a checkout
of open_clip's main branch, once with each --open-clip-main-flags. The ratios compare the last of --variants with every
program.

With --caption-tokens=N, random captions have N tokens on average (lognormal, with a standard deviation of 0.53 N, which
is between those of CC3M's and CC12M's captions). With --caption-tokens=FILE, their lengths are drawn from a file with
one length per line. The default, `full`, fills the context.

With --time-limit, runs of the part `speed` that would probably exceed the limit are omitted. A program that fails is
reported at the end; the others still run.

The part `shares` prints the objective's share of a step of --share-model with openclip, fastclip_v3 and neuclip. The
towers and the optimizer are timed in real steps of --share-rows pairs. The objective alone is timed at that batch size
and at --paper-batch, by default the global batch size of the largest runs in the FastCLIP and NeuCLIP papers, for which
the towers are assumed to take the same time per pair.

The part `throughput` prints a table for the documentation: samples/s of our steps on random pairs, the share of the
GPUs' peak FLOP/s that the towers reach (MFU, without recomputed operations; only in bf16 on H100, H200, A100 and T4
GPUs), and the objective's share of profiled steps, in which the profiler slows down the host.

Config options, such as --data.decoder=pil or --objective.temperature.initial=0.01, are passed to all programs.

Examples:
    python tools/benchmark_step.py
    python tools/benchmark_step.py --data /data/flickr8k/train random --repeats 5 --parts speed shares
    python tools/benchmark_step.py --data random --repeats 5 --objective.temperature.initial=0.01
    python tools/benchmark_step.py --parts throughput --recipe models/vitb16 --rows 256 --ranks 1 8 --precision bf16
    python tools/benchmark_step.py --recipe models/vitb16 --data random --caption-tokens 20 --rows 640 --ranks 1 \\
        --precision bf16 --variants baseline lean packed class_token compiled all --time-limit 500
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import profile_communication
import torch
from benchmarking.launches import ON_CPU, ON_GPU, read_launches
from benchmarking.method_config import CAPTION_TOKENS, FULL, config_for
from benchmarking.random_pairs import check_caption_tokens
from benchmarking.step_speed import Measured, Program, markdown, rows_of_table, samples_per_second, write_csv
from benchmarking.synthetic_profile import first_prediction
from data_files import commit, this_machine
from step_costs import count_flops

from neuclip_ds.cli.program import exit_on_mistake, positive_integer
from neuclip_ds.config import CLIP_BPE, Config, dump
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.demo import demo_split
from neuclip_ds.data.open_data import iter_captions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError, counted
from neuclip_ds.losses.methods import find_method
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.profiling.recorder import BREAKDOWN

PEERS = Path(__file__).parent / "peers"
PARTS = ("speed", "shares", "throughput")
SPEEDS = "speeds.csv"
_CODE = "neuclip_ds/losses neuclip_ds/training neuclip_ds/engine neuclip_ds/models"  # the code that the speeds describe
RANDOM = "random"
_CACHE = Path(".cache")
_CAPTIONS = 20_000  # captions that the tokenizer is trained on
_OBJECTIVE_PHASES = ("objective", "normalizer")  # of a profiled step
_METHODS_OF_SHARES = ("openclip", "fastclip_v3", "neuclip")
_PAPER_BATCH = 5120
_PAPER_RANKS = 8
# dense bf16 (T4: fp16) FLOP/s of GPUs on their vendors' data sheets, by a part of their names
_PEAK_FLOPS = {"h100": 989e12, "h200": 989e12, "a100": 312e12, "t4": 65e12}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that makes our steps faster, given by the config option that turns it on or off."""

    option: str
    on: str
    off: str = "false"


CHANGES = {
    "lean": Change(option="optimizer.lean_zero1", on="true"),
    "packed": Change(option="model.text.packed", on="true"),
    "class_token": Change(option="model.vision.class_token_only", on="true"),
    "compiled": Change(option="model.compile", on="blocks"),
}
DEFAULT = "default"
BASELINE = "baseline"
ALL = "all"
VARIANTS = (DEFAULT, BASELINE, *CHANGES, ALL)
PEER_NAMES = ("ddp", "ddp_compiled", "open_clip")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of all programs for one number of ranks."""

    arguments: argparse.Namespace
    recipe: str
    ranks: int
    rows: int  # pairs per rank
    threads: int
    source: str = RANDOM  # or shards
    tokenizer: tuple[Path, int] | None = None  # folder and number of tokens

    @property
    def batch(self) -> int:
        return self.rows * self.ranks

    @property
    def input_name(self) -> str:
        """Name of the input in tables."""
        if self.source == RANDOM:
            return "noise"
        return f"shards, {self.arguments.workers} loader processes per rank"

    @property
    def steps(self) -> int:
        """Steps after the warm-up: --steps plus a logging interval, because open_clip writes its points a step late."""
        return int(self.arguments.steps + self.arguments.log_every)

    def config(self, method: str | None = None, *more: str) -> Config:
        """Return the config of a run with `method`; None selects the recipe's method."""
        arguments = self.arguments
        options = [
            f"--data.batch_size={self.batch}",
            f"--data.workers={arguments.workers}",
            "--data.prefetch=2",
            "--data.drop_last=true",
            "--data.val=",
            "--data.zero_shot=",
            f"--run.log_every={arguments.log_every}",
            "--run.checkpoint_every=1000000000",
            f"--deepspeed=zero{arguments.zero}_{arguments.precision}",
        ]
        if self.source == RANDOM:
            options.append("--model.text.tokenizer=null")
        else:
            options.append(f"--data.train={self.source}")
        if self.tokenizer is not None:
            folder, size = self.tokenizer
            options.append(f"--model.text.tokenizer={folder}")
            options.append(f"--model.text.vocab_size={size}")
        return config_for(method, [self.recipe, *options, *arguments.overrides, *more])

    def start(self, script: Path, folder: Path, config: str, *options: str, packages: tuple[str, ...] = ()) -> None:
        """Run a program to its end in a new, empty folder; write its output to a separate folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        call = [str(script), config, str(folder), *options]
        output = folder.with_name(f"{folder.name}_output")
        profile_communication.run_on_ranks(script.name, call, self.ranks, output, self.threads, packages)

    def folder_name(self, program: str) -> str:
        """Return a name for a program's files at this number of ranks and of pairs."""
        letters = "".join(letter if letter.isalnum() else "_" for letter in program)
        return f"{letters}_{self.rows}rows_{self.ranks}ranks"

    def write(self, name: str, steps: int, method: str | None = None, *more: str) -> str:
        """Write the config of a run of `steps` steps to a file; return the file's path."""
        path = self.arguments.out / f"{self.folder_name(name)}.yaml"
        path.write_text(dump(self.config(method, f"--max_steps={steps}", *more)), encoding="utf-8")
        return str(path)


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    with exit_on_mistake():
        measure(arguments)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the options of a command line; `overrides` are the config options among them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=["speed"], help="parts to measure (default: speed)"
    )
    parser.add_argument("--recipe", default="demo", help="recipe of the model and optimizer (default: demo)")
    parser.add_argument("--data", nargs="+", default=["demo:train"], help="shards, or `random` (default: demo:train)")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["openclip", "neuclip"],
        help="methods of neuclip_ds (default: openclip neuclip)",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks on this machine (default: 1 2)"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="pairs per rank (default: 64)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=[DEFAULT],
        help="configs of our programs, as described above (default: `default`, the recipe as it is)",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=PEER_NAMES,
        default=["ddp", "open_clip"],
        help="programs to compare with (default: ddp open_clip)",
    )
    parser.add_argument(
        "--peer-flags",
        action="append",
        help="options for a run of open_clip, as one string (default: none); may be repeated",
    )
    parser.add_argument(
        "--open-clip-main", type=Path, help="checkout of open_clip's main branch, which is measured too"
    )
    parser.add_argument(
        "--open-clip-main-flags",
        action="append",
        help="options for a run of the main branch, as one string (default: none); may be repeated",
    )
    parser.add_argument(
        "--caption-tokens",
        default=FULL,
        help=CAPTION_TOKENS,
    )
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, help="time limit of the part `speed`, in seconds (default: none)"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default: 20)")
    parser.add_argument(
        "--warmup",
        type=int,
        default=10,
        help="untimed first steps; methods with prototypes or a queue use more if they need them (default: 10)",
    )
    parser.add_argument("--log-every", type=int, default=5, help="steps between TensorBoard points (default: 5)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="in the part `speed`, interleaved runs of each program; in `shares`, timed steps of the objective "
        "(default: 2)",
    )
    parser.add_argument("--workers", type=int, default=1, help="loader processes per rank (default: 1)")
    parser.add_argument(
        "--threads", type=int, help="threads per rank (default: cores / ranks, and 1 in the part `shares`)"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="precision; in bf16, the peers use autocast (default: fp32)",
    )
    parser.add_argument(
        "--zero", type=int, choices=range(4), default=1, help="ZeRO stage of our programs; peers use DDP (default: 1)"
    )
    parser.add_argument(
        "--share-model", default="models/vitb16", help="recipe for the part `shares` (default: models/vitb16)"
    )
    parser.add_argument(
        "--share-rows", type=int, default=16, help="pairs in each real step of the part `shares` (default: 16)"
    )
    parser.add_argument(
        "--share-steps",
        type=positive_integer,
        default=2,
        help="timed real steps of the part `shares`, after an untimed one (default: 2)",
    )
    parser.add_argument(
        "--paper-batch",
        type=int,
        default=_PAPER_BATCH,
        help=f"larger global batch size of the part `shares` (default: {_PAPER_BATCH}, as in the papers)",
    )
    parser.add_argument(
        "--paper-ranks",
        type=int,
        help=f"ranks that share --paper-batch (default: the number of GPUs, or {_PAPER_RANKS} without a GPU)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/benchmark_step"),
        help="folder for all outputs (default: runs/benchmark_step)",
    )
    arguments, overrides = parser.parse_known_args(argv)
    arguments.overrides = overrides
    return arguments


def measure(arguments: argparse.Namespace) -> None:
    for method in arguments.methods:
        find_method(method)
    require_captions(arguments)
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.description = describe(arguments)
    print("\n".join(arguments.description), flush=True)
    if "speed" in arguments.parts:
        compare(arguments)
    if "shares" in arguments.parts:
        print_shares(arguments)
    if "throughput" in arguments.parts:
        print_throughput(arguments)


def require_captions(arguments: argparse.Namespace) -> None:
    """Raise `UserError` if --caption-tokens is invalid or has no effect."""
    check_caption_tokens(arguments.caption_tokens, config_for(None, [arguments.recipe, *arguments.overrides]))
    has_random_captions = "throughput" in arguments.parts or ("speed" in arguments.parts and RANDOM in arguments.data)
    if arguments.caption_tokens != FULL and not has_random_captions:
        raise UserError(
            "--caption-tokens has no effect: only the part `throughput` and, with --data random, the part `speed` use "
            "it. Omit it, or add one of these."
        )


def describe(arguments: argparse.Namespace) -> list[str]:
    """Return the lines above the table that describe the source of its numbers, in the format of data_files.py."""
    device, hardware = this_machine()
    versions: list[str] = []
    for package in ("deepspeed", "open_clip_torch"):
        if importlib.util.find_spec(package.removesuffix("_torch")) is not None:
            versions.append(f"{package} {importlib.metadata.version(package)}")
    load = f"load average {os.getloadavg()[0]:.1f} before the runs"
    captions = f"tokens of random captions: {arguments.caption_tokens}"
    return [
        f"title: Speed of training steps, {arguments.recipe}, {arguments.precision}, {captions}",
        f"device: {device}",
        f"hardware: {', '.join([hardware, *versions, load])}",
        f"date: {datetime.date.today().isoformat()}",
        f"commit: {commit()}",
        f"code: {_CODE}",
        f"command: {shlex.join(['python', 'tools/benchmark_step.py', *sys.argv[1:]])}",
    ]


def print_throughput(arguments: argparse.Namespace) -> None:
    """Print the throughput table of our steps on this machine."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    peaks = [peak for name, peak in _PEAK_FLOPS.items() if name in hardware.lower()]
    engine = f"zero{arguments.zero}_{arguments.precision}"
    names = "hardware, model, engine, method, pairs per rank, samples/s, objective %, MFU %"
    print(f"\n| {names.replace(', ', ' | ')} |\n" + "|---" * 8 + "|")
    for ranks, rows, method in itertools.product(arguments.ranks, arguments.rows, arguments.methods):
        setting = setting_for(arguments, ranks, rows)
        program = our_program(setting, method, DEFAULT)
        speed = run(program, setting, 0)
        folder = arguments.out / setting.folder_name(f"throughput_{method}")
        worker_options = {
            "methods": method,
            "stages": arguments.zero,
            "recipe": arguments.recipe,
            "rows": rows,
            "precision": arguments.precision,
            "steps": arguments.steps,
            "caption-tokens": arguments.caption_tokens,
            "out": folder,
        }
        call = [str(profile_communication.__file__), "--worker"]
        call += [f"--{name}={value}" for name, value in worker_options.items()]
        call += arguments.overrides
        profile_communication.run_on_ranks(method, call, ranks, folder, arguments.threads)
        breakdown = json.loads((folder / BREAKDOWN).read_text(encoding="utf-8"))
        objective = sum(
            breakdown["phases"][phase]["mean"] for phase in _OBJECTIVE_PHASES if phase in breakdown["phases"]
        )
        share = objective / breakdown["seconds"]["total"]["mean"]
        query = MemoryQuery(config_for(method, [arguments.recipe, *arguments.overrides]), ranks)
        flops_per_pair = sum(tower.forward + tower.backward for tower in count_flops(query))
        flops = speed / ranks * flops_per_pair  # per second and rank
        mfu = "-"
        if peaks and arguments.precision == "bf16":
            mfu = f"{100 * flops / peaks[-1]:.1f}"
        print(
            f"| {ranks} x {hardware} | {arguments.recipe} | {engine} | {method} | {rows} "
            f"| {speed:,.0f} | {100 * share:.1f} | {mfu} |",
            flush=True,
        )


def compare(arguments: argparse.Namespace) -> None:
    """Print the speed table, and write it to a file after every run.

    Raises:
        UserError: a program failed; the other programs have run.
    """
    clock = TimeLimit(arguments.time_limit)
    measured: list[Measured] = []
    settings = list(all_settings(arguments))
    for setting in settings:
        all_programs = programs(setting)
        entries = []
        for program in all_programs:
            entry = Measured(source=setting.input_name, program=program.name, ranks=setting.ranks, rows=setting.rows)
            entry.problem = program.absent
            entries.append(entry)
        measured += entries
        for turn in range(arguments.repeats):
            for program, entry in zip(all_programs, entries, strict=True):
                if not entry.problem:
                    run_timed(program, entry, setting, turn, clock)
                    write_csv(arguments.out / SPEEDS, arguments.description, speed_rows(arguments, measured))
    print(f"\n{markdown(speed_rows(arguments, measured))}", flush=True)
    print_sizes(arguments.out, settings[-1])
    failures = [
        f"{entry.program} ({counted(entry.ranks, 'rank')}): {entry.problem}" for entry in measured if entry.failed
    ]
    if failures:
        raise UserError("Programs failed:\n" + "\n".join(failures))


def speed_rows(arguments: argparse.Namespace, measured: list[Measured]) -> list[list[str]]:
    references = [ours(method, arguments.variants[-1]) for method in arguments.methods]
    return rows_of_table(measured, references, ON_GPU if torch.cuda.is_available() else ON_CPU)


class TimeLimit:
    """Limit on the total time of several runs of about equal duration.

    Args:
        seconds: the limit, counted from the creation of this object.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest = 0.0

    @property
    def reached(self) -> bool:
        """Whether a run that takes as long as the longest one so far would end too late."""
        return time.monotonic() + self._longest > self._end

    def add(self, seconds: float) -> None:
        """Record the duration of a run."""
        self._longest = max(self._longest, seconds)


def run_timed(program: Program, entry: Measured, setting: Setting, turn: int, clock: TimeLimit) -> None:
    """Run a program once and record its speed, or why there is none."""
    if clock.reached:
        entry.problem = "the time limit was reached"
        return
    start = time.monotonic()
    try:
        entry.speeds[turn] = run(program, setting, turn)
    except UserError as error:
        entry.problem = str(error)
        entry.failed = True
        report(entry.problem)
        return
    finally:
        clock.add(time.monotonic() - start)
    entry.launches = read_launches(run_folder(program, setting, turn))
    line = f"{counted(setting.ranks, 'rank')}, {setting.rows} pairs, turn {turn + 1}, {program.name}"
    report(f"{line}: {entry.speeds[turn]:,.1f} samples/s")


def all_settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    """Yield the settings in which programs are compared."""
    for source in arguments.data:
        if source.startswith("demo:"):
            source = str(demo_split(source, _CACHE))
        if source != RANDOM:
            source = "::".join(resolve_shards(source))
        tokenizer = None if source == RANDOM else make_tokenizer(arguments, source)
        for ranks, rows in itertools.product(arguments.ranks, arguments.rows):
            yield setting_for(arguments, ranks, rows, source, tokenizer)


def setting_for(
    arguments: argparse.Namespace,
    ranks: int,
    rows: int,
    source: str = RANDOM,
    tokenizer: tuple[Path, int] | None = None,
) -> Setting:
    threads = arguments.threads or max(1, (os.cpu_count() or 1) // ranks)
    return Setting(
        arguments=arguments,
        recipe=arguments.recipe,
        ranks=ranks,
        rows=rows,
        threads=threads,
        source=source,
        tokenizer=tokenizer,
    )


def make_tokenizer(arguments: argparse.Namespace, source: str) -> tuple[Path, int] | None:
    """Train a tokenizer for all programs on the captions; return its folder and number of tokens.

    If the config names a tokenizer other than `clip_bpe`, train none and return None.
    """
    text = config_for(None, [arguments.recipe, *arguments.overrides]).model.text
    if text.tokenizer not in (None, CLIP_BPE):
        return None
    manifest = open_manifest(source, arguments.out / "manifests")
    tokenizer = train_bpe(iter_captions(manifest, _CAPTIONS), text.vocab_size, text.resolved_context_length())
    tokenizer.save(arguments.out / "tokenizer")
    return arguments.out / "tokenizer", tokenizer.vocab_size


def ours(method: str, variant: str) -> str:
    return f"here: {method}" if variant == DEFAULT else f"here: {method}, {variant}"


def variant_options(variant: str, arguments: argparse.Namespace) -> list[str]:
    """Return the config options of a variant."""
    if variant == DEFAULT:
        return []
    has_lean_step = arguments.precision == "bf16" and arguments.zero == 1
    options = []
    for name, change in CHANGES.items():
        is_on = name == variant or (variant == ALL and (name != "lean" or has_lean_step))
        options.append(f"--{change.option}={change.on if is_on else change.off}")
    return options


def programs(setting: Setting) -> list[Program]:
    """Return the programs in the order in which they are interleaved; write their configs next to their folders."""
    arguments = setting.arguments
    all_programs = []
    for method, variant in itertools.product(arguments.methods, arguments.variants):
        differences = int(method != arguments.methods[0]) + int(setting.rows != arguments.rows[0])
        allowed = 0 if variant in CHANGES else 1
        if differences <= allowed:
            all_programs.append(our_program(setting, method, variant))
    return [*all_programs, *peer_programs(setting)]


def our_program(setting: Setting, method: str, variant: str) -> Program:
    """Return our program; its warm-up lasts at least until NeuCLIP's network predicts or the queue is full."""
    arguments = setting.arguments
    steps_to_predict = first_prediction(setting.config(method))
    points_to_predict = math.ceil(steps_to_predict / arguments.log_every)
    warmup = max(arguments.warmup, points_to_predict * arguments.log_every)
    name = ours(method, variant)
    path = setting.write(name, warmup + setting.steps, method, *variant_options(variant, arguments))
    return Program(
        name=name,
        script=PEERS / "ours.py",
        options=(path, *input_options(setting)),
        tag="loss",
        warmup=warmup,
    )


def peer_programs(setting: Setting) -> Iterator[Program]:
    """Yield the programs that ours are compared with."""
    arguments = setting.arguments
    if "ddp" in arguments.peers:
        yield plain_ddp(setting, "plain DDP", "false")
    if "ddp_compiled" in arguments.peers:
        yield plain_ddp(setting, "plain DDP, compiled", "towers")
    if "open_clip" in arguments.peers:
        for flags in arguments.peer_flags or [""]:
            yield open_clip(setting, "open_clip", flags)
    if arguments.open_clip_main:
        source = arguments.open_clip_main.resolve() / "src"
        for flags in arguments.open_clip_main_flags or [""]:
            yield open_clip(setting, "open_clip main", flags, packages=(str(source),))


def plain_ddp(setting: Setting, name: str, compiled: str) -> Program:
    """Return the plain DDP program; `compiled` is the value of `model.compile`."""
    path, options = peer_config(setting, name, f"--model.compile={compiled}")
    return Program(
        name=name,
        script=PEERS / "plain_ddp.py",
        options=(path, *options),
        tag="loss",
        warmup=setting.arguments.warmup,
    )


def open_clip(setting: Setting, version: str, flags: str, packages: tuple[str, ...] = ()) -> Program:
    """Return open_clip's program with additional options; modules in the folders `packages` replace installed ones."""
    missing = [name for name in ("open_clip_train", "pandas") if importlib.util.find_spec(name) is None]
    name = f"{version} {flags}".strip()
    path, options = peer_config(setting, name)
    return Program(
        name=name,
        script=PEERS / "open_clip_program.py",
        options=(path, *options, f"--flags={flags}"),
        tag="train/loss",
        warmup=setting.arguments.warmup,
        packages=packages,
        absent=f"no {' and no '.join(missing)} (pip install open_clip_torch pandas)" if missing else "",
    )


def peer_config(setting: Setting, name: str, *more: str) -> tuple[str, list[str]]:
    """Write the config of a peer, without our changes; return the file's path and the program's options."""
    arguments = setting.arguments
    steps = arguments.warmup + setting.steps
    path = setting.write(name, steps, arguments.methods[0], *variant_options(BASELINE, arguments), *more)
    options = list(input_options(setting))
    if arguments.precision == "bf16":
        options.append("--bf16")
    return path, options


def input_options(setting: Setting) -> tuple[str, ...]:
    if setting.source != RANDOM:
        return ()
    return "--random", f"--caption-tokens={setting.arguments.caption_tokens}"


def run_folder(program: Program, setting: Setting, turn: int) -> Path:
    folder: Path = setting.arguments.out / f"{setting.folder_name(program.name)}_turn{turn}"
    return folder


def run(program: Program, setting: Setting, turn: int) -> float:
    """Run a program once and return its samples/s; delete the run's checkpoints."""
    folder = run_folder(program, setting, turn)
    config, *options = program.options
    setting.start(program.script, folder, config, *options, packages=program.packages)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return samples_per_second(folder / "tensorboard", program.tag, program.warmup, setting.batch)


def print_sizes(out: Path, setting: Setting) -> None:
    """Print the number of parameters of our model and, if open_clip ran, of its model."""
    config = setting.config()
    config.model.text.tokenizer = None  # the embedding then has vocab_size rows
    count = Parameters.of(MemoryQuery(config, 1).build()).total
    notes = sorted(out.glob("open_clip_*/facts.json"))
    theirs = f"; open_clip's model {json.loads(notes[-1].read_text())['parameters']:,}" if notes else ""
    print(f"\nParameters: {count:,}, plus one for the temperature{theirs}.")


def print_shares(arguments: argparse.Namespace) -> None:
    """Print the objective's share of a step, by method."""
    gpus = torch.cuda.device_count()
    threads = arguments.threads or 1  # on a CPU, the objective is timed on one core
    small = Setting(
        arguments=arguments, recipe=arguments.share_model, ranks=1, rows=arguments.share_rows, threads=threads
    )
    ranks = arguments.paper_ranks or gpus or _PAPER_RANKS
    paper = replace(small, ranks=ranks, rows=arguments.paper_batch // ranks)
    npn = small.config().objective.npn
    small_seconds = loss_seconds(small)
    paper_seconds = loss_seconds(paper)
    seconds_per_pair = step_seconds(small) - small_seconds["openclip"] / small.rows  # of the towers and optimizer
    print(f"\nObjective's share of a step, {small.recipe}, T_u = {npn.inner_steps}, m = {npn.prototypes}\n")
    print("| B | K | method | objective ms | NPN part ms | towers and optimizer ms | share |\n" + "|---" * 7 + "|")
    for setting, seconds_by_method, note in ((small, small_seconds, ""), (paper, paper_seconds, " (computed)")):
        towers = seconds_per_pair * setting.rows
        for method, seconds in seconds_by_method.items():
            network = 0.0
            if "npn" in find_method(method).sections:
                network = seconds - seconds_by_method["openclip"]
            print(
                f"| {setting.batch:,} | {setting.ranks} | {method} | {1e3 * seconds:,.1f} | {1e3 * network:,.1f} "
                f"| {1e3 * towers:,.0f}{note} | {seconds / (seconds + towers):.2%} |"
            )


def step_seconds(setting: Setting) -> float:
    """Return the seconds per pair of whole steps with OpenCLIP's loss."""
    steps = 1 + setting.arguments.share_steps
    path = setting.write("towers", steps, "openclip", "--run.log_every=1")
    folder = setting.arguments.out / "towers"
    report(f"{steps} steps of {setting.rows} pairs")
    setting.start(PEERS / "ours.py", folder, path, "--random")
    return 1 / samples_per_second(folder / "tensorboard", "loss", 1, setting.batch)


def loss_seconds(setting: Setting) -> dict[str, float]:
    """Return the seconds per step of the loss alone, by method."""
    path = setting.write("objective", 1)
    folder = Path(path).with_suffix("")
    report(f"the objective alone, {counted(setting.ranks, 'rank')} with {setting.rows} pairs each")
    options = [f"--repeats={setting.arguments.repeats}", "--objective", *_METHODS_OF_SHARES]
    setting.start(PEERS / "ours.py", folder, path, *options)
    seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    return seconds


def report(progress: str) -> None:
    """Print progress to stderr, separately from the tables."""
    print(progress, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
