"""An examination: the checks in their processes, on every rank of the launch, and all findings on rank 0."""

import os
import socket
from collections.abc import Sequence
from dataclasses import replace

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor import processes
from neuclip_ds.doctor.finding import Finding, wrong
from neuclip_ds.doctor.progress import announce
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.table import CHECKS, Check, Scope, chosen
from neuclip_ds.doctor.worker import findings_of, read


def examine(request: Request, arguments: Sequence[str], communicator: Communicator) -> list[Finding]:
    """Run all checks and return the findings of all ranks, on all ranks.

    Args:
        request: what is asked for.
        arguments: those of this command, for the processes that run its checks.
        communicator: of the ranks' CPUs.
    """
    found: list[Finding] = []
    os.environ["LOCAL_WORLD_SIZE"] = str(len(communicator.ranks_of_node()))  # srun and mpirun name it otherwise
    for scope in (Scope.NODE, Scope.RANK, Scope.RANKS):
        if chosen(scope, request) and _takes_part(scope, communicator):
            found += _in_process(scope, request, arguments, communicator)
        communicator.barrier()
    for check in chosen(Scope.LAUNCH, request):
        announce(check.name, communicator)
        found += _placed(check, findings_of(check, request, communicator), communicator)
    return [finding for of_rank in communicator.gather_objects(found) for finding in of_rank]


def _takes_part(scope: Scope, communicator: Communicator) -> bool:
    """Return whether this rank runs a scope's checks; called by all ranks."""
    first_of_node = communicator.rank == communicator.ranks_of_node()[0]
    return first_of_node if scope is Scope.NODE else scope is Scope.RANK or communicator.world_size > 1


def _in_process(scope: Scope, request: Request, arguments: Sequence[str], communicator: Communicator) -> list[Finding]:
    found: list[Finding] = []
    checks = {check.name: check for check in CHECKS}
    current, begun = chosen(scope, request)[0], False

    def on_line(line: str) -> None:
        nonlocal current, begun
        record = read(line)
        if record is None:
            return
        if "begins" in record:
            current, begun = checks[record["begins"]], True
            announce(current.name, communicator)
        else:
            found.extend(_placed(current, [Finding(**record)], communicator))

    variables = {Scope.NODE: dict, Scope.RANK: processes.alone, Scope.RANKS: lambda: processes.joined(communicator)}
    output = request.out / f"{scope.value}_{communicator.rank}.txt"
    failure = processes.run(request, [*arguments, f"--worker={scope.value}"], variables[scope](), output, on_line)
    if failure is not None:
        what = "The check ended its process" if begun else "The process of this check did not begin it"
        finding = wrong(f"{what}, later ones in it did not run: {failure}", f"See {output}.")
        found += _placed(current, [finding], communicator)
    return found


def _placed(check: Check, findings: Sequence[Finding], communicator: Communicator) -> list[Finding]:
    """Return findings with their check and where they were made."""
    alone = check.scope is Scope.NODE or communicator.world_size == 1
    where = socket.gethostname() if alone else f"rank {communicator.rank} on {socket.gethostname()}"
    return [replace(finding, check=check.name, where=where) for finding in findings]
