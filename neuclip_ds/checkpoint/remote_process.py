"""Run an operation of `RemoteRun` in a separate process, which can be killed when a store does not answer.

fsspec's threads and locks stay out of the training process, whose loader processes are forks of it, and copying takes
no turns from its interpreter. The request is sent through a pipe, as the URL may hold a secret.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from neuclip_ds.checkpoint.remote_run import RemoteRun
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.data.failures import FailureKind, TransferFailure, describe_error

_ROOT = Path(__file__).parents[2]  # folder of the package, which may be a checkout that is not installed


class RemoteCall:
    """An operation in progress; ends with this process, even if that is killed.

    Args:
        url: folder of the run's copy.
        operation: name of a method of `RemoteRun`.
        arguments: of it, as JSON holds them.
    """

    def __init__(self, url: str, operation: str, *arguments: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to this process's group do not reach it
            env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            text=True,
        )
        self._request = json.dumps([os.getpid(), url, operation, arguments])

    def result(self) -> Any:
        """Wait for the end and return what the operation gives; raise `TransferFailure` where it failed."""
        try:
            answer, _ = self._process.communicate(self._request)
        finally:
            self.kill()  # where waiting was interrupted
        if not answer:
            raise TransferFailure("the process of the copy was killed", FailureKind.OUTAGE)
        outcome = json.loads(answer)
        if "failure" in outcome:
            reason, kind = outcome["failure"]
            raise TransferFailure(reason, FailureKind(kind))
        return outcome["result"]

    def kill(self) -> None:
        """End the process, from any thread."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Answer one request."""
    parent, url, operation, arguments = json.load(sys.stdin)
    end_with_parent(parent)
    try:
        outcome = {"result": getattr(RemoteRun(url), operation)(*arguments)}
    except TransferFailure as failure:
        outcome = {"failure": (str(failure), failure.kind)}
    except Exception as error:  # of the local disk
        described = describe_error(error)
        outcome = {"failure": (str(described), described.kind)}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
