"""The tables of docs/ from tools/measurements/*.csv, most of them for performance.md; write_tables.py writes them."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from data_files import DataFile, badge, caption, grid, names_with_older_code, read_data

OURS = "here: openclip"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *files: DataFile, notes: Sequence[str] = ()) -> str:
    """Return a Markdown table and, below it, the line that names the source of its numbers."""
    source = caption(*(file.origin for file in files), note="<br>".join(notes))
    return f"{grid(head, rows)}\n\n{source}"


def columns_of(name: str, headings: Mapping[str, str]) -> Callable[[], str]:
    """Return a function that returns a table with columns of a file under the given headings."""

    def print_table() -> str:
        file = read_data(name)
        rows = [[row[column] or "-" for column in headings] for row in file.rows]
        return table(list(headings.values()), rows, file)

    return print_table


def whole_file(name: str) -> Callable[[], str]:
    """Return a function that returns a file's whole table."""
    return columns_of(name, {column: column for column in read_data(name).columns})


def mean_speeds(file: DataFile) -> dict[str, float]:
    """Return the mean samples/s of each program in a file of whole steps."""
    speeds: dict[str, list[float]] = {}
    for row in file.rows:
        if row["part"] == "speed":
            speeds.setdefault(row["program"], []).append(float(row["samples/s"]))
    return {program: statistics.mean(values) for program, values in speeds.items()}


def whole_step() -> str:
    """Speed of whole steps of three programs."""
    cpu = read_data("whole_step")
    packed = read_data("whole_step_packed")
    gpu = read_data("whole_step_h100")
    inputs = {"none": "noise, no loading", "demo shards": "the demo's shards"}
    rows: list[list[str]] = []
    for source, title in inputs.items():
        for ranks in ("1", "2"):
            ours = cpu.row(input=source, ranks=ranks, program=OURS)
            ddp = cpu.row(input=source, ranks=ranks, program="plain DDP")
            peer = cpu.row(input=source, ranks=ranks, program="open_clip")
            now = packed.row(input=source, ranks=ranks)["ratio to plain DDP"]
            speed = f"{float(ours['samples/s']):.0f}"
            rows.append(
                [badge("CPU"), title, ranks, speed, ddp["neuclip_ds / this row"], peer["neuclip_ds / this row"], now]
            )
    means = mean_speeds(gpu)
    ratios = [f"{means[OURS] / means[program]:.2f}" for program in ("plain DDP", "open_clip")]
    rows.append([badge("H100"), "noise, ViT-B/16", "1", f"{means[OURS]:,.0f}", *ratios, "-"])
    head = ["device", "input", "ranks", "ours, samples/s", "ratio to plain DDP", "ratio to open_clip"]
    head.append("ratio to plain DDP, packed")
    return table(head, rows, cpu, packed, gpu)


def profiled_steps() -> str:
    """Speed of our steps on the H100."""
    gpu = read_data("whole_step_h100")
    rows: list[list[str]] = []
    for row in gpu.rows:
        if row["part"] != "speed":
            mfu = f"{row['MFU %']}%" if row["MFU %"] else "-"
            cells = [f"{float(row['samples/s']):,.0f}", mfu, row["step ms"] or "-", row["busy ms"] or "-"]
            rows.append([row["model"], row["program"].removeprefix("here: "), row["pairs"], *cells])
    head = ["model", "loss", "pairs", "samples/s", "MFU", "step, ms", "kernels, ms"]
    return table(head, rows, gpu)


def losses() -> str:
    """Time and memory of the losses alone, relative to ClipLoss."""
    file = read_data("objective")
    queue = read_data("objective_queue")
    rows: list[list[str]] = []
    base = [file.row(objective="open_clip ClipLoss", ranks=ranks, **{"rows per rank": "2048"}) for ranks in ("1", "2")]
    absolute = [f"{float(row['ms']):.0f} ms" for row in base]
    memory = [f"{float(row['peak MB']):.0f} MB" for row in base]
    rows.append(["`ClipLoss`", absolute[0], memory[0], absolute[1], memory[1]])
    by_name: dict[str, list[str]] = {}
    for row in [*file.rows, *queue.rows]:
        if row["rows per rank"] == "2048" and row["objective"] != "open_clip ClipLoss":
            cells = by_name.setdefault(row["objective"], ["-"] * 4)
            first = 2 * (int(row["ranks"]) - 1)
            cells[first : first + 2] = [row["time ratio"], row["memory ratio"]]
    rows += [[f"`{name}`", *cells] for name, cells in by_name.items()]
    head = ["loss", "time, 1 rank", "peak memory, 1 rank", "time, 2 ranks", "peak memory, 2 ranks"]
    return table(head, rows, file, queue)


def losses_gpu() -> str:
    """Time and memory of ClipLoss and of our loss on the H200, by batch size and precision."""
    file = read_data("objective_h200")
    # B, precision, ClipLoss's row, ours; from 2^25 similarities, our loss is compiled
    shown = [
        ("4,096", "float32", ("before", "ClipLoss 4096 fp32"), ("after", "openclip 4096 fp32 eager 128")),
        ("4,096", "bf16", ("after", "ClipLoss 4096 bf16"), ("after", "openclip 4096 bf16 eager 128")),
        ("16,384", "float32", ("before", "ClipLoss 16384 fp32"), ("after", "openclip 16384 fp32 fused 128")),
        ("16,384", "bf16, not compiled", ("after", "ClipLoss 16384 bf16"), ("after", "openclip 16384 bf16 eager 128")),
        (
            "16,384",
            "bf16",
            ("after", "ClipLoss 16384 bf16"),
            ("after", "openclip 16384 bf16 fused 128; inductor's defaults"),
        ),
        ("32,768", "bf16", ("before", "ClipLoss 32768 bf16"), ("after", "openclip 32768 bf16 fused 128")),
    ]
    rows: list[list[str]] = []
    for batch, precision, theirs, ours in shown:
        row = [batch, precision]
        for code, case in (theirs, ours):
            measured = file.row(code=code, case=case)
            mark = "*" if case.endswith("fused 128") else ""
            row.append(f"{float(measured['wall ms']):.1f} ms, {float(measured['gpu ms']):.1f} ms{mark}")
            row.append(f"{int(measured['peak MB']):,} MB{mark}")
        rows.append(row)
    head = ["B", "precision", "`ClipLoss`: time, kernels", "peak memory", "`openclip`: time, kernels", "peak memory"]
    note = "* with earlier compiler settings, which use less memory and make the kernels about 10% slower"
    return table(head, rows, file, notes=[note])


def gradient_errors() -> str:
    """Smallest and largest error of the gradient over B and tau, by kind of features and precision."""
    file = read_data("gradient_precision_h200")
    rows: list[list[str]] = []
    for features in ("random", "matched", "collapsed"):
        for sent, title in (("bf16", "bf16"), ("fp32", "float32")):
            chosen = [row for row in file.rows if (row["features"], row["sent as"]) == (features, sent)]
            ours = [float(row[side]) for row in chosen for side in ("ours image", "ours text")]
            theirs = "ClipLoss autocast" if sent == "bf16" else "ClipLoss float32"
            rows.append([features, title, span(ours), span([float(row[theirs]) for row in chosen])])
    head = ["features", "sent as", "error of `openclip`", "error of `ClipLoss` (bf16: autocast)"]
    return table(head, rows, file)


def span(values: Sequence[float]) -> str:
    return " to ".join(f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-") for value in (min(values), max(values)))


def loaders() -> str:
    """Speed of three loaders, and their times to the first batch."""
    file = read_data("loaders")
    start = read_data("first_batch")
    versions = {"ours": "this project", "webdataset": "webdataset 1.0.2"}
    versions["MosaicML streaming"] = "MosaicML streaming 0.13.0"
    storages = {"disk": "cold disk", "S3": "S3"}
    rows: list[list[str]] = []
    for row in file.rows:
        cells = [
            f"{int(row['samples/s']):,}",
            row["ours / this row"],
            row["first batch, s"],
            row["resumed, s"],
            "-",
            "-",
        ]
        if row["storage"] == "S3" and row["contender"] != "MosaicML streaming":
            now = start.row(contender=row["contender"])
            cells[4:] = [now["first batch, s"], now["resumed, s"]]
        rows.append([storages[row["storage"]], versions[row["contender"]], *cells])
    head = ["storage", "loader", "samples/s", "our speed / this", "first batch, s", "resume mid-epoch, s"]
    head += ["first batch now, s", "resume now, s"]
    return table(head, rows, file, start)


def memory() -> str:
    """Estimated memory relative to the measured peak."""
    cpu = read_data("memory")
    files = [cpu, read_data("memory_gpu"), read_data("memory_simulated")]
    rows: list[list[str]] = []
    for row in cpu.rows:
        case = f"{row['model']}, {row['engine']}, {row['ranks']} ranks, {row['batch of a rank']} pairs per rank"
        case = case.replace(" 1 ranks", " 1 rank")
        if row["checkpointing"] == "yes":
            case += ", activation checkpointing"
        rows.append([badge("CPU"), case, row["ratio"]])
    for file in files[1:]:
        rows += [[badge(file.origin.device), row["case"], row["estimate / measured"]] for row in file.rows]
    gpu = read_data("whole_step_h100")
    large = gpu.row(part="vith14")
    ratio = float(large["estimated GB"]) / float(large["peak GB"])
    case = f"`vith14_tuneclip`, {large['pairs']} pairs, peak {float(large['peak GB']):.1f} GB"
    rows.append([badge("H100"), case, f"{ratio:.2f}"])
    return table(["device", "case", "estimate / measured"], rows, *files, gpu)


def many_nodes() -> str:
    """Estimated step times and traffic on several nodes."""
    file = read_data("many_nodes")
    rows: list[list[str]] = []
    for row in file.rows:
        baseline = file.row(loss="OpenCLIP's scheme", nodes=row["nodes"])["MB received per rank"]
        received = int(row["MB received per rank"])
        ratio = f"{received / int(baseline):.2f}"
        times = f"{int(row['lowest ms']):,} to {int(row['highest ms']):,}"
        rows.append([row["loss"], row["nodes"], f"{int(row['batch']):,}", times, f"{received:,}", ratio])
    head = ["loss", "nodes", "batch", "step, ms", "MB received per rank", "ratio to OpenCLIP's scheme"]
    return table(head, rows, file)


def cost_model_fit() -> str:
    """Accuracy of the fitted cost model's predictions of profiled steps."""
    file = read_data("cost_model_profiles")
    rows: list[list[str]] = []
    for ranks in ("1", "2", "4"):
        ratios = [float(row["ratio"]) for row in file.rows if row["ranks"] == ranks]
        close = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
        rows.append([ranks, str(len(ratios)), str(close), f"{min(ratios):.2f} to {max(ratios):.2f}"])
    return table(["ranks", "profiled steps", "predicted within 25%", "predicted / measured"], rows, file)


def tutorial(page: str) -> Callable[[], str]:
    """Return a function that returns a table with the time of each step of a tutorial."""

    def print_table() -> str:
        file = read_data("tutorials")
        rows = [[row["step"], f"{row['s']} s", f"{row['CPU s']} s"] for row in file.rows if row["page"] == page]
        return table(["step", "time", "CPU time"], rows, file)

    return print_table


def time_of(page: str) -> Callable[[], str]:
    """Return a function that returns the total time of a tutorial's steps, as a phrase."""

    def print_time() -> str:
        file = read_data("tutorials")
        rows = [row for row in file.rows if row["page"] == page]
        seconds = sum(float(row["s"]) for row in rows)
        cpu_seconds = sum(float(row["CPU s"]) for row in rows)
        return f"{_rounded_time(seconds)} ({_rounded_time(cpu_seconds)} of CPU time)"

    return print_time


def _rounded_time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds > 100 else f"{seconds:.0f} seconds"


def first_run() -> str:
    """Return how long the first run of the quick start takes, as a phrase."""
    first, *_ = (row for row in read_data("tutorials").rows if row["page"] == "quick_start")
    return f"{first['s']} seconds ({first['CPU s']} of CPU time)"


def cpu_time_of_longer_run() -> str:
    """Return the CPU time of the longer run of the quick start, as a phrase."""
    row = read_data("tutorials").row(page="quick_start", step="train longer")
    return f"{_rounded_time(float(row['CPU s']))} of CPU time"


def speed_on_h100() -> str:
    """Return our speed for ViT-B/16 on one H100 and its ratio to open_clip's, as a phrase."""
    file = read_data("whole_step_h100")
    means = mean_speeds(file)
    ours = means[OURS]
    ratio = ours / means["open_clip"]
    return f"{ours:,.0f} samples/s for ViT-B/16 on one H100, {ratio:.2f} times open_clip's speed ({_measured(file)})"


def cost_of_losses_on_h200() -> str:
    """Return the time and memory of our loss and of open_clip's on one H200 at B = 32,768, as a phrase."""
    file = read_data("objective_h200")
    ours = file.row(code="after", case="openclip 32768 bf16 fused 128")
    peer = file.row(code="before", case="ClipLoss 32768 bf16")
    costs = [f"{float(row['wall ms']):.0f} ms and {float(row['peak MB']) / 1000:.1f} GB" for row in (ours, peer)]
    return f"{costs[0]}; the same loss in open_clip, `ClipLoss`, takes {costs[1]} ({_measured(file)})"


def time_of_near_duplicates() -> str:
    """Return how long `neuclip-ds filter --near-duplicates` takes for 40,000 samples, as a phrase."""
    file = read_data("stored_features")
    what = "`neuclip-ds filter --near-duplicates`, 40000 samples"
    return f"{file.row(what=what)['CPU s']} s for 40,000 on one CPU core, {_measured(file)}"


def time_of_fast_tests() -> str:
    """Return the CPU time of all fast tests, as a phrase."""
    seconds = sum(float(row["CPU s"]) for row in read_data("test_times").rows)
    return _rounded_time(seconds)


def _measured(file: DataFile) -> str:
    has_newer_code = file.origin.name in names_with_older_code()
    return f"measured {file.origin.date}" + (" with earlier code" if has_newer_code else "")


TUTORIALS = ("quick_start", "stored_features", "fine_tuning", "your_own_data", "own_loop", "papers")
VALUES: Mapping[str, Callable[[], str]] = {
    **{f"time_of_{page}": time_of(page) for page in ("stored_features", "fine_tuning")},
    "time_of_first_run": first_run,
    "cpu_time_of_longer_run": cpu_time_of_longer_run,
    "time_of_near_duplicates": time_of_near_duplicates,
    "time_of_fast_tests": time_of_fast_tests,
    "speed_on_h100": speed_on_h100,
    "cost_of_losses_on_h200": cost_of_losses_on_h200,
}
TABLES: Mapping[str, Callable[[], str]] = {
    **{f"tutorial_{page}": tutorial(page) for page in TUTORIALS},
    "whole_step": whole_step,
    "profiled_steps": profiled_steps,
    "losses": losses,
    "losses_gpu": losses_gpu,
    "loss_module": columns_of(
        "loss_module",
        {
            "ranks": "ranks",
            "rows per rank": "pairs per rank",
            "ClipLoss ms": "`ClipLoss`, ms",
            "ContrastiveLoss openclip": "`openclip`",
            "ContrastiveLoss fastclip_v3": "`fastclip_v3`",
            "fast_clip v3": "FastCLIP-v3 of fast_clip",
        },
    ),
    "traffic": whole_file("traffic"),
    "gradient_errors": gradient_errors,
    "loaders": loaders,
    "photographs": columns_of(
        "photographs",
        {
            "loader": "loader",
            "samples/s per worker": "samples/s per worker",
            "lowest to highest": "lowest to highest",
            "ours / this row": "our speed / this",
        },
    ),
    "photograph_cpu_time": whole_file("photograph_cpu_time"),
    "large_data": whole_file("large_data"),
    "memory": memory,
    "kept_memory": whole_file("kept_memory"),
    "checkpoints": columns_of(
        "checkpoints",
        {"model": "model", "ranks": "ranks", "GB": "size, GB", "step s": "step, s", "save s": "pause, s"},
    ),
    "many_nodes": many_nodes,
    "cost_model_fit": cost_model_fit,
    "npn_updates": whole_file("npn_updates"),
    "stored_features": whole_file("stored_features"),
    "test_times": whole_file("test_times"),
    "order_mixing_defaults": whole_file("order_mixing_defaults"),
    "lean_zero1": whole_file("lean_zero1"),
    "lean_zero1_cpu": whole_file("lean_zero1_cpu"),
    "bf16_gradients": whole_file("bf16_gradients"),
}
