"""Follow the tutorials in a new clone, and print a Markdown table of the time that each of their steps takes.

The program clones the last commit. tutorials.yaml lists the steps; the commands and the files that a reader saves are
read from the pages. A step that fails stops the program.

The page stored_features.md needs the unpacked folder of Flickr8k, which you pass, and two encoders from the Hugging
Face hub or its cache. Without the folder, this page is omitted by default.

Examples:
  python tools/time_tutorials.py
  python tools/record_measurement.py tutorials -- python tools/time_tutorials.py /data/flickr8k
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from data_files import ROOT

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.errors import UserError

PAGES = ROOT / "docs" / "tutorials"
STEPS = Path(__file__).with_name("tutorials.yaml")
_NEEDS_FLICKR8K = "stored_features"
_BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Commands of a page that are timed together, and the files that the reader has saved before them."""

    page: str
    name: str
    commands: Sequence[str]
    files: Mapping[str, str]  # content by name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "flickr8k",
        nargs="?",
        type=Path,
        help="folder of Flickr8k, with Images/ and captions.txt; the page stored_features needs it",
    )
    parser.add_argument(
        "--pages", nargs="+", help="names of pages (default: all, but stored_features only with Flickr8k)"
    )
    options = parser.parse_args()
    with exit_on_mistake():
        steps = read_steps()
        pages = options.pages or [page for page in pages_of(steps) if options.flickr8k or page != _NEEDS_FLICKR8K]
        unknown = set(pages) - set(pages_of(steps))
        if unknown:
            raise UserError(f"--pages: unknown {', '.join(sorted(unknown))}; choose from {', '.join(pages_of(steps))}.")
        print("| page | step | s | CPU s |\n|---|---|---|---|", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder, "clone")
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
            if options.flickr8k is not None:
                link_flickr8k(options.flickr8k, clone / "data" / "flickr8k")
            for step in steps:
                if step.page not in pages:
                    continue
                seconds, cpu_seconds = run(step, clone)
                print(f"| {step.page} | {step.name} | {seconds:.0f} | {cpu_seconds:.0f} |", flush=True)


def read_steps() -> list[Step]:
    """Return the steps of tutorials.yaml, with the commands and files of the pages.

    Raises:
        UserError: a page lacks a command or a file of a step.
    """
    steps: list[Step] = []
    for page, listed in yaml.safe_load(STEPS.read_text(encoding="utf-8")).items():
        blocks = _BLOCK.findall((PAGES / f"{page}.md").read_text(encoding="utf-8"))
        files = {name: _starting_with(start, blocks, page) for name, start in listed.get("files", {}).items()}
        lines = "".join(blocks).splitlines()
        for name, starts in listed["steps"].items():
            commands = [_starting_with(start, lines, page) for start in starts]
            steps.append(Step(page=page, name=name, commands=commands, files=files))
    return steps


def pages_of(steps: Iterable[Step]) -> list[str]:
    """Return the pages of the steps, each once, in order."""
    return list(dict.fromkeys(step.page for step in steps))


def _starting_with(start: str, texts: Iterable[str], page: str) -> str:
    for text in texts:
        if text.startswith(start):
            return text
    raise UserError(f"{page}.md contains no command or file that starts with {start!r}: adapt tutorials.yaml.")


def link_flickr8k(source: Path, target: Path) -> None:
    """Make a writable folder like the one that a reader unpacks, with links to the images.

    Raises:
        UserError: the source is not Flickr8k.
    """
    images = sorted((source / "Images").glob("*.jpg"))
    captions = source / "captions.txt"
    if not images or not captions.is_file():
        raise UserError(f"{source} must contain Images/*.jpg and captions.txt: pass the folder of Flickr8k.")
    (target / "Images").mkdir(parents=True)
    (target / "captions.txt").symlink_to(captions.resolve())
    for image in images:
        (target / "Images" / image.name).symlink_to(image.resolve())


def run(step: Step, clone: Path) -> tuple[float, float]:
    """Run the commands of a step in the clone; return the wall time and the CPU time that they took, in seconds.

    Raises:
        UserError: a command failed.
    """
    for name, content in step.files.items():
        (clone / name).write_text(content, encoding="utf-8")
    programs = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(clone), os.environ.get("PYTHONPATH", "")]))
    began = time.perf_counter()
    cpu_began = cpu_time_of_children()
    script = "\n".join(step.commands)
    log = clone / "step.log"
    with log.open("w") as output:
        command = ["bash", "-e", "-c", script]
        done = subprocess.run(command, cwd=clone, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        last_lines = "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
        raise UserError(f"{step.page}, {step.name}, ended with exit code {done.returncode}:\n{last_lines}")
    return time.perf_counter() - began, cpu_time_of_children() - cpu_began


def cpu_time_of_children() -> float:
    """Return the CPU seconds of all ended child processes that have been waited for, and of their descendants."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
