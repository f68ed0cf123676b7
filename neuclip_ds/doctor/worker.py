"""The process that runs the checks of a scope: it prints a record as each begins and for each finding."""

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import connected
from neuclip_ds.doctor.finding import Finding, wrong
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.table import Check, Scope, chosen
from neuclip_ds.errors import UserError

_MARK = "neuclip-ds doctor record "  # in front of a record, among lines that libraries print


def work(scope: Scope, request: Request) -> None:
    """Run the checks of a scope in this process and print their records."""
    joins: AbstractContextManager[Communicator]
    joins = nullcontext(Communicator()) if scope is Scope.NODE else connected(f"doctor {scope.value}", request.out)
    with joins as communicator:
        for check in chosen(scope, request):
            _print({"begins": check.name})
            for finding in findings_of(check, request, communicator):
                _print(asdict(finding))


def findings_of(check: Check, request: Request, communicator: Communicator) -> list[Finding]:
    """Return the findings of a check; a mistake that it raises is one."""
    found: list[Finding] = []
    try:
        found.extend(check.examine(request, communicator))
    except UserError as error:
        found.append(wrong(str(error)))
    return found


def read(line: str) -> Mapping[str, Any] | None:
    """Return the record of a printed line, if it holds one."""
    _, mark, record = line.partition(_MARK)
    try:
        return dict(json.loads(record)) if mark else None
    except ValueError:  # another thread has printed into the line
        return None


def _print(record: Mapping[str, Any]) -> None:
    sys.stdout.write(f"\n{_MARK}{json.dumps(record)}\n")
    sys.stdout.flush()
