"""Count the bytes that one rank sends and receives in the ring algorithm of a collective.

The same formulas count the traffic of an objective, of DeepSpeed and of a plan, so that methods can be compared
whatever the backend uses.
"""


def ring_bytes(op: str, size: int, world_size: int) -> int:
    """Return the bytes that a rank sends; for `reduce` and `broadcast`, whose ranks differ, the mean over ranks.

    Args:
        op: all_gather, all_reduce, reduce_scatter, reduce, broadcast or all_to_all; others (barrier) count 0.
        size: bytes of a rank's input: local rows for all_gather, the whole tensor for the others.
        world_size: number of ranks K.
    """
    once = ("reduce_scatter", "reduce", "broadcast", "all_to_all")
    rounds = {"all_gather": world_size, "all_reduce": 2, **dict.fromkeys(once, 1)}
    return rounds.get(op, 0) * (world_size - 1) * size // world_size
