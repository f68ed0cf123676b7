"""DeepSpeed's own kernels: which of them this machine has or can build."""

from typing import NamedTuple

from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.all_ops import ALL_OPS


class Ops(NamedTuple):
    """Names of DeepSpeed's ops."""

    built: list[str]  # with the installed package
    buildable: list[str]  # when they are first used
    others: list[str]


def list_ops() -> Ops:
    """Return DeepSpeed's ops for the accelerator that it has chosen; some are probed by compiling a line of C."""
    built = [name for name in ALL_OPS if installed_ops.get(name)]
    buildable = [name for name, builder in ALL_OPS.items() if name not in built and _can_be_built(builder)]
    return Ops(built, buildable, [name for name in ALL_OPS if name not in (*built, *buildable)])


def _can_be_built(builder: object) -> bool:
    try:
        return bool(builder.is_compatible(verbose=False))  # type: ignore[attr-defined]
    except Exception:  # builders raise errors of every kind where their toolkit is absent
        return False
