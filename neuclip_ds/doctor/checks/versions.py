"""Versions of Python, the libraries, CUDA and NCCL."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, wrong
from neuclip_ds.doctor.request import Request
from neuclip_ds.engine.config import require_version
from neuclip_ds.errors import UserError

_PACKAGES = ("neuclip_ds", "torch", "deepspeed", "transformers", "timm", "numpy", "pillow")


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    try:
        require_version()
    except UserError as error:
        yield wrong(str(error))
    yield fine(facts={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}, **_cuda()})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return "not installed"


def _cuda() -> dict[str, str]:
    if not (torch.version.cuda and torch.cuda.is_available()):
        return {}
    return {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
