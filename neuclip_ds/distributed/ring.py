"""Bytes that one rank sends, and receives as many, in the ring algorithm of a collective.

The same formulas count what an objective sends, what DeepSpeed sends and what a plan predicts, so that methods can be
compared whatever the backend does inside.
"""

from __future__ import annotations


def ring_bytes(op: str, size: int, world_size: int) -> int:
    """
    Args:
        op: all_gather, all_reduce, reduce_scatter, reduce, broadcast, all_to_all; others (barrier) carry nothing.
        size: bytes of the tensor that a rank puts in: its own rows of an all-gather, all ranks' rows of a
            reduce-scatter, the whole of the rest.
        world_size: ranks K of the group.

    Returns:
        The rank's share; of `reduce` and `broadcast`, whose ranks differ, the mean over them.
    """
    others = world_size - 1
    if op == "all_gather":
        return others * size
    if op == "all_reduce":
        return 2 * others * size // world_size
    if op in ("reduce_scatter", "reduce", "broadcast", "all_to_all"):
        return others * size // world_size
    return 0
