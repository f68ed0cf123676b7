"""DeepSpeed's own kernels: which of them this machine has or can build."""

from typing import NamedTuple

from deepspeed.git_version_info import compatible_ops, installed_ops


class Ops(NamedTuple):
    """Names of DeepSpeed's ops."""

    built: list[str]  # with the installed package
    buildable: list[str]  # when they are first used
    others: list[str]


def list_ops() -> Ops:
    """Return DeepSpeed's ops for the accelerator that it has chosen."""
    built = [name for name, is_built in installed_ops.items() if is_built]
    buildable = [name for name, can_be in compatible_ops.items() if can_be and name not in built]
    return Ops(built, buildable, [name for name in compatible_ops if name not in (*built, *buildable)])
