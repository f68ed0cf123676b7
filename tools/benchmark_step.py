"""For developers of neuclip_ds: compare training steps with a plain DDP loop and open_clip's training program.

The part `speed` prints a table of samples/s and ratios for each number of ranks. The programs are

    here: METHOD    train.py (with --data random: its training step on one batch of noise)
    plain DDP       a loop with DistributedDataParallel, OpenCLIP's loss, this project's towers and webdataset's loader
    open_clip       the program open_clip_train.main with the same timm trunk and open_clip's text tower of equal size

They run in fresh processes, interleaved (ABCABC), with the same seed, batch, pixels, tokenizer, AdamW settings, and
numbers of loader processes and threads. All programs write a TensorBoard point every --log-every steps; the wall times
of these points give the speed.

The part `shares` prints the objective's share of a step of --share-model. Towers and optimizer are timed in real steps
of --share-rows pairs. The objective alone is timed at that batch size and at the paper's global batch size, for which
the towers are assumed to take the same time per pair.

The part `throughput` prints a table for the documentation: samples/s of our steps on random pairs, the share of the
GPUs' peak FLOP/s that the towers reach (MFU, without recomputed operations), and the objective's share of profiled
steps, in which the profiler slows down the host.

Config options, such as --data.decoder=pil, --model.compile=blocks or --objective.temperature.initial=0.01, are passed
to all programs.

Examples:
    python tools/benchmark_step.py
    python tools/benchmark_step.py --data /data/flickr8k/train random --repeats 5 --parts speed shares
    python tools/benchmark_step.py --data random --repeats 5 --objective.temperature.initial=0.01
    python tools/benchmark_step.py --parts throughput --recipe models/vitb16 --rows 256 --ranks 1 8 --precision bf16
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import profile_communication
import torch
from benchmarking.method_config import config_for
from benchmarking.step_speed import Program, Speeds, samples_per_second, table
from benchmarking.synthetic_profile import first_prediction
from step_costs import count_flops

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.config import CLIP_BPE, Config, dump
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.demo import demo_split
from neuclip_ds.data.open_data import iter_captions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.losses.methods import find_method
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.profiling.recorder import BREAKDOWN

PEERS = Path(__file__).parent / "peers"
PARTS = ("speed", "shares", "throughput")
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
class Setting:
    """Settings of all programs at one number of ranks."""

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
    def steps(self) -> int:
        """Steps after the warm-up; open_clip writes its points one step late."""
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

    def start(self, script: Path, folder: Path, config: str, *options: str) -> None:
        """Run a program to its end in a new, empty folder; write its output to a separate folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        call = [str(script), config, str(folder), *options]
        output = folder.with_name(f"{folder.name}_output")
        profile_communication.run_on_ranks(script.name, call, self.ranks, output, self.threads)

    def write(self, name: str, steps: int, method: str | None = None, *more: str) -> str:
        """Write the config of a run of `steps` steps to a file; return the file's path."""
        path = self.arguments.out / f"{as_name(name)}_{self.ranks}ranks.yaml"
        path.write_text(dump(self.config(method, f"--max_steps={steps}", *more)), encoding="utf-8")
        return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["speed"])
    parser.add_argument("--recipe", default="demo", help="recipe of the model and optimizer (demo)")
    parser.add_argument("--data", nargs="+", default=["demo:train"], help="shards, or `random` (demo:train)")
    parser.add_argument("--methods", nargs="+", default=["openclip", "neuclip"], help="our methods (openclip neuclip)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=64, help="pairs per rank (64)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (20)")
    parser.add_argument("--warmup", type=int, default=10, help="untimed first steps; more if NeuCLIP needs them (10)")
    parser.add_argument("--log-every", type=int, default=5, help="steps between TensorBoard points (5)")
    parser.add_argument("--repeats", type=int, default=2, help="interleaved repetitions (2)")
    parser.add_argument("--workers", type=int, default=1, help="loader processes per rank (1)")
    parser.add_argument("--threads", type=int, help="threads per rank (cores / ranks)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 is autocast in the peers")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="our ZeRO stage; peers replicate (1)")
    parser.add_argument("--share-model", default="models/vitb16", help="recipe for the part shares (models/vitb16)")
    parser.add_argument("--share-rows", type=int, default=16, help="pairs per real step of shares (16)")
    parser.add_argument("--share-steps", type=int, default=2, help="real steps after the first (2)")
    parser.add_argument("--paper-batch", type=int, default=_PAPER_BATCH, help=f"global batch size ({_PAPER_BATCH})")
    parser.add_argument("--paper-ranks", type=int, help=f"ranks for that batch ({_PAPER_RANKS}, or the number of GPUs)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark_step"), help="folder for all outputs")
    arguments, overrides = parser.parse_known_args()
    arguments.overrides = overrides
    with exit_on_mistake():
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    for method in arguments.methods:
        find_method(method)
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores, no GPU"
    load = f"load {os.getloadavg()[0]:.1f} before"
    print(f"{platform.machine()}, {device}, torch {torch.__version__}, {arguments.precision}, {load}", flush=True)
    if "speed" in arguments.parts:
        for source in arguments.data:
            compare(arguments, source)
    if "shares" in arguments.parts:
        print_shares(arguments)
    if "throughput" in arguments.parts:
        print_throughput(arguments)


def print_throughput(arguments: argparse.Namespace) -> None:
    """Print the throughput table of our steps on this machine."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    peaks = [peak for name, peak in _PEAK_FLOPS.items() if name in hardware.lower()]
    engine = f"zero{arguments.zero}_{arguments.precision}"
    names = "hardware, model, engine, method, pairs per rank, samples/s, objective %, MFU %"
    print(f"\n| {names.replace(', ', ' | ')} |\n" + "|---" * 8 + "|")
    for ranks, method in itertools.product(arguments.ranks, arguments.methods):
        setting = setting_for(arguments, ranks)
        speed = run(our_program(setting, method), setting, 0)
        folder = arguments.out / f"throughput_{method}_{ranks}ranks"
        worker_options = {
            "methods": method,
            "stages": arguments.zero,
            "recipe": arguments.recipe,
            "rows": arguments.rows,
            "precision": arguments.precision,
            "steps": arguments.steps,
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
            f"| {ranks} x {hardware} | {arguments.recipe} | {engine} | {method} | {arguments.rows} "
            f"| {speed:,.0f} | {100 * share:.1f} | {mfu} |",
            flush=True,
        )


def compare(arguments: argparse.Namespace, source: str) -> None:
    """Print the speed table for one data source."""
    if source.startswith("demo:"):
        source = str(demo_split(source, _CACHE))
    if source != RANDOM:
        source = "::".join(resolve_shards(source))
    tokenizer = None if source == RANDOM else make_tokenizer(arguments, source)
    speeds_by_ranks: dict[int, Speeds] = {}
    absent: dict[str, str] = {}
    for ranks in arguments.ranks:
        setting = setting_for(arguments, ranks, source, tokenizer)
        all_programs = programs(setting)
        speeds: dict[str, list[float]] = {}
        for program in all_programs:
            speeds[program.name] = []
            absent[program.name] = program.absent
        for turn in range(arguments.repeats):
            for program in all_programs:
                if not program.absent:
                    speed = run(program, setting, turn)
                    speeds[program.name].append(speed)
                    report(f"{ranks} ranks, turn {turn + 1}, {program.name}: {speed:,.1f} samples/s")
        speeds_by_ranks[ranks] = speeds
    kind = "one random batch" if source == RANDOM else f"shards, {arguments.workers} loader processes per rank"
    print(f"\n{arguments.recipe}, {arguments.rows} pairs per rank, {kind}\n")
    print("\n".join(table(speeds_by_ranks, [ours(method) for method in arguments.methods], absent)), flush=True)
    print_sizes(arguments.out, setting)


def setting_for(
    arguments: argparse.Namespace, ranks: int, source: str = RANDOM, tokenizer: tuple[Path, int] | None = None
) -> Setting:
    threads = arguments.threads or max(1, (os.cpu_count() or 1) // ranks)
    return Setting(
        arguments=arguments,
        recipe=arguments.recipe,
        ranks=ranks,
        rows=arguments.rows,
        threads=threads,
        source=source,
        tokenizer=tokenizer,
    )


def make_tokenizer(arguments: argparse.Namespace, source: str) -> tuple[Path, int] | None:
    """Train one tokenizer on the captions for all programs; return None if the recipe names a tokenizer."""
    text = config_for(None, [arguments.recipe, *arguments.overrides]).model.text
    if text.tokenizer not in (None, CLIP_BPE):
        return None
    manifest = open_manifest(source, arguments.out / "manifests")
    tokenizer = train_bpe(iter_captions(manifest, _CAPTIONS), text.vocab_size, text.context_length)
    tokenizer.save(arguments.out / "tokenizer")
    return arguments.out / "tokenizer", tokenizer.vocab_size


def ours(method: str) -> str:
    return f"here: {method}"


def programs(setting: Setting) -> list[Program]:
    """Return the programs in the order in which they are interleaved; write their configs next to their folders."""
    arguments = setting.arguments
    all_programs = [our_program(setting, method) for method in arguments.methods]
    steps = arguments.warmup + setting.steps
    peer_options = list(random_input(setting))
    if arguments.precision == "bf16":
        peer_options.append("--bf16")
    path = setting.write("plain DDP", steps, arguments.methods[0])
    all_programs.append(
        Program(
            name="plain DDP",
            script=PEERS / "plain_ddp.py",
            options=(path, *peer_options),
            tag="loss",
            warmup=arguments.warmup,
        )
    )
    missing = [name for name in ("open_clip_train", "pandas") if importlib.util.find_spec(name) is None]
    path = setting.write("open_clip", steps, arguments.methods[0])
    all_programs.append(
        Program(
            name="open_clip",
            script=PEERS / "open_clip_program.py",
            options=(path, *peer_options),
            tag="train/loss",
            warmup=arguments.warmup,
            absent=f"pip install open_clip_torch pandas (no {' and no '.join(missing)})" if missing else "",
        )
    )
    return all_programs


def our_program(setting: Setting, method: str) -> Program:
    """Return our program; its warm-up lasts at least until NeuCLIP's network predicts."""
    arguments = setting.arguments
    steps_to_predict = first_prediction(setting.config(method))
    points_to_predict = math.ceil(steps_to_predict / arguments.log_every)
    warmup = max(arguments.warmup, points_to_predict * arguments.log_every)
    name = ours(method)
    path = setting.write(name, warmup + setting.steps, method)
    return Program(
        name=name,
        script=PEERS / "ours.py",
        options=(path, *random_input(setting)),
        tag="loss",
        warmup=warmup,
    )


def random_input(setting: Setting) -> tuple[str, ...]:
    return ("--random",) if setting.source == RANDOM else ()


def run(program: Program, setting: Setting, turn: int) -> float:
    """Run a program once and return its samples/s; delete the run's checkpoints."""
    folder = setting.arguments.out / f"{as_name(program.name)}_{setting.ranks}ranks_turn{turn}"
    config, *options = program.options
    setting.start(program.script, folder, config, *options)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return samples_per_second(folder / "tensorboard", program.tag, program.warmup, setting.batch)


def as_name(program: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in program)


def print_sizes(out: Path, setting: Setting) -> None:
    """Print the number of parameters of our model and of open_clip's model."""
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
    """Return the seconds of a step of the loss without towers, by method."""
    path = setting.write("objective", 1)
    folder = Path(path).with_suffix("")
    report(f"the objective alone, {setting.ranks} ranks of {setting.rows} pairs")
    options = [f"--repeats={setting.arguments.repeats}", "--objective", *_METHODS_OF_SHARES]
    setting.start(PEERS / "ours.py", folder, path, *options)
    seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    return seconds


def report(progress: str) -> None:
    """Print progress to stderr, separately from the tables."""
    print(progress, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
