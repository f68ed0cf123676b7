"""Training programs side by side: in fresh processes, in turns, timed by the points that they write to TensorBoard.

Nothing is built into a program to time it: each keeps its loss at regular steps, and the wall time of those points is
its speed, with all that happens in between.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.children import killed_with_parent
from neuclip_ds.errors import UserError

ROOT = Path(__file__).parents[2]
_OUTPUT = "output.txt"
_SHOWN = 15  # last lines of a failed program's output


class Program(NamedTuple):
    """Something that trains."""

    name: str
    script: Path
    options: tuple[str, ...]
    tag: str  # of the scalar that it writes at regular steps
    warmup: int  # steps that do not count
    absent: str = ""  # why it cannot run here; empty where it can


def start(name: str, program: Sequence[str], ranks: int, folder: Path, threads: int | None = None) -> None:
    """Run a program as ranks of this machine, which share its cores, to its end; its output goes to FOLDER/output.txt.

    A program is a script, or `-m` and a module, with its arguments. Errors call it `name`.

    Raises:
        UserError: it failed; shows the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    default = str(max(1, (os.cpu_count() or 1) // ranks))
    # the loopback interface by name: gloo may otherwise look up the machine's name at length
    surroundings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": default, **os.environ}
    paths = [str(ROOT), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    surroundings |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}
    surroundings |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    path = folder / _OUTPUT
    with path.open("w") as output:
        call = [sys.executable, *launcher, *program]
        code = subprocess.run(
            call, env=surroundings, stdout=output, stderr=output, preexec_fn=killed_with_parent()
        ).returncode
    if code:
        rank_said = path.read_text(errors="replace").partition("torch/distributed/elastic")[0]  # then the launcher's
        lines = [line for line in rank_said.splitlines() if line.strip() and "torch/_" not in line]  # but statistics
        end = "\n".join(lines[-_SHOWN:])
        raise UserError(f"{name} on {ranks} ranks ended with exit code {code}; {path} ends with\n{end}")


def samples_per_second(folder: Path, tag: str, warmup: int, batch: int) -> float:
    """Return the speed between the first point of a scalar from step `warmup` on and the last one.

    Raises:
        UserError: there are not two such points.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # seconds to import

    events = EventAccumulator(str(folder)).Reload()
    points = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    counted = [(point.step, point.wall_time) for point in points if point.step >= warmup]
    if len(counted) < 2:
        raise UserError(f"{folder} holds fewer than two points of {tag} from step {warmup} on; ask for more steps.")
    (first, began), (last, ended) = counted[0], counted[-1]
    return (last - first) * batch / (ended - began)


Speeds = Mapping[str, Sequence[float]]  # program -> samples/s of its turns; none where it cannot run


def table(found: Mapping[int, Speeds], references: Sequence[str], absent: Mapping[str, str]) -> list[str]:
    """Return lines of a Markdown table of the speeds by number of ranks, with `references` divided by each program.

    A ratio is the median of those of the turns, in each of which all programs ran.
    """
    head = ["program", "ranks", "samples/s", "lowest - highest", *(f"{name} / it" for name in references)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for ranks, speeds in found.items():
        for name, turns in speeds.items():
            if not turns:
                cells = [f"not run: {absent[name]}", *["-"] * (1 + len(references))]
            else:
                pairs = [zip(speeds[reference], turns, strict=True) for reference in references]
                ratios = [statistics.median(ours / its for ours, its in of_turns) for of_turns in pairs]
                spread = f"{min(turns):,.1f} - {max(turns):,.1f}"
                cells = [f"{statistics.median(turns):,.1f}", spread, *(f"{ratio:.2f}" for ratio in ratios)]
            lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    return lines
