"""`neuclip-ds doctor`: the examination of the launch, its report and its files."""

import json
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.data.disk import explain_disk
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.distributed.launch import connected
from neuclip_ds.doctor.comparisons import COMPARISONS
from neuclip_ds.doctor.examination import examine
from neuclip_ds.doctor.finding import wrong
from neuclip_ds.doctor.rates import machine
from neuclip_ds.doctor.report import as_json, text
from neuclip_ds.doctor.request import Request
from neuclip_ds.errors import UserError

MACHINE = "machine.json"


def diagnose(request: Request, arguments: Sequence[str], findings_file: Path | None) -> bool:
    """Examine all ranks of the launch, print the report on rank 0, and return on all ranks whether nothing is wrong.

    Args:
        request: what is asked for.
        arguments: those of `neuclip-ds`, for the processes that run the checks.
        findings_file: file for all findings, if any.
    """
    with explain_disk(request.out, "choose another --out"):
        request.out.mkdir(parents=True, exist_ok=True)
    try:
        with connected("doctor", request.out) as communicator:
            return _diagnose(request, arguments, findings_file, communicator)
    except UserError as error:  # ranks are missing, or their code or libraries differ
        if read_environment().local_rank == 0:
            print(text([wrong(str(error))]))
        return False


def _diagnose(
    request: Request, arguments: Sequence[str], findings_file: Path | None, communicator: Communicator
) -> bool:
    found = examine(request, arguments, communicator)
    found += [finding for compare in COMPARISONS for finding in compare(found)]
    if communicator.rank == 0:
        print(text(found))
        _write(request.out / MACHINE, machine(found))
        if findings_file is not None:
            _write(findings_file, as_json(found))
    return all(finding.level != "wrong" for finding in found)


def _write(path: Path, content: object) -> None:
    if content is not None:
        with explain_disk(path, "choose another --out"):
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"Written: {path}")
