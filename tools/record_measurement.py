"""Rerun the command of a data file, and update the file with the table that it prints, the machine, date and commit.

Many files in tools/measurements name their command. Pass a command after `--` if the file names none, if your paths are
different, or if the file's command was for an earlier version of its program. The command must print a Markdown table
with the file's columns, in any order; other columns are omitted.

Examples:
  python tools/record_measurement.py objective
  python tools/record_measurement.py loaders -- python tools/benchmark_streaming.py /data/mine/train
"""

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

from data_files import DEVICES, MEASUREMENTS, DataFile, Origin, commit, read_data, this_machine, write_data

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import nearest

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the file in tools/measurements, without .csv")
    parser.add_argument("command", nargs="*", help="command to run (default: the command that the file names)")
    options = parser.parse_args()
    with exit_on_mistake():
        names = [path.stem for path in MEASUREMENTS.glob("*.csv")]
        if options.name not in names:
            hint = nearest(options.name, names) or "; pass the name of an existing file."
            raise UserError(f"tools/measurements contains no {options.name}.csv{hint}")
        file = read_data(options.name)
        command = options.command or shlex.split(file.command)
        if not command:
            raise UserError(f"{options.name}.csv names no command: pass a command after --.")
        device, _ = this_machine()
        if device not in DEVICES:
            raise UserError(f"The pages have no label for {device}: add it to DEVICES in tools/data_files.py.")
        write_data(measured_again(file, command))
        print(f"Wrote {options.name}.csv; to update the pages, run python tools/write_tables.py")


def measured_again(file: DataFile, command: Sequence[str]) -> DataFile:
    """Run a command, and return a copy of the file with the rows that it prints and with this machine, date and commit.

    Raises:
        UserError: the command failed, or printed no table with the columns of the file.
        ValueError: a printed row has more or fewer cells than its table's header.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"{shlex.join(command)} ended with exit code {done.returncode}.")
    rows: list[dict[str, str]] = []
    for row in printed_rows(done.stdout):
        if set(file.columns) <= row.keys():
            rows.append({column: row[column] for column in file.columns})
    if not rows:
        raise UserError(f"The command printed no table with the columns {', '.join(file.columns)}.")
    device, hardware = this_machine()
    if file.origin.device in ("simulated", "estimated"):
        device = file.origin.device
    origin = Origin(
        name=file.origin.name,
        device=device,
        hardware=hardware,
        date=date.today().isoformat(),
        commit=commit(),
        code=file.origin.code,
    )
    return replace(file, origin=origin, command=shlex.join(command), rows=rows)


def printed_rows(text: str) -> Iterator[dict[str, str]]:
    """Yield each row of the Markdown tables in a text as a dict keyed by column name, with numbers like 1,435 as 1435.

    Raises ValueError if a row has more or fewer cells than its table's header.
    """
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not head:
            head = cells
        elif not all(set(cell) <= set("-:") for cell in cells):
            numbers = [_THOUSANDS.sub("", cell) for cell in cells]
            yield dict(zip(head, numbers, strict=True))


if __name__ == "__main__":
    main()
