"""Find shards that hold the same samples: they would count twice, or make a validation of what was trained on.

Shards are the same if they have the same path, the same checksum, or the same layout (names, offsets, sizes) and equal
bytes; only in the last case are files read. Manifests of older versions know the path and at most the checksum.
"""

import filecmp
from collections.abc import Hashable, Iterable, Iterator

from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError


def check_distinct(manifest: Manifest) -> None:
    """Raise UserError if two shards of a manifest hold the same samples."""
    for first, second in _repeats(manifest.shards):
        same = "is listed more than once" if first.path == second.path else f"has the same content as {first.path}"
        raise UserError(f"{second.path} {same}, so its samples would count twice; name every shard once.")


def check_separate(training: Manifest, validation: Manifest) -> None:
    """Raise UserError if shards of the validation data are among the training data."""
    found = [second for _, second in _repeats([*training.shards, *validation.shards])]
    if found:
        raise UserError(
            f"{len(found)} of {validation.n_shards} shards of data.val are among the training shards, such as "
            f"{found[0].path}: their recall would be that of pairs trained on. Name other shards, or set data.val= "
            "(empty) for none."
        )


def _repeats(shards: Iterable[Shard]) -> Iterator[tuple[Shard, Shard]]:
    """Yield each shard that repeats an earlier one, after that one."""
    seen: dict[Hashable, Shard] = {}
    for shard in shards:
        if shard.removed or shard.n == 0:
            continue
        keys = list(_identities(shard))
        earlier = [seen[key] for key in keys if key in seen]
        seen.update((key, shard) for key in keys if key not in seen)
        if same := next((other for other in earlier if _is_same(other, shard)), None):
            yield same, shard


def _identities(shard: Shard) -> Iterator[Hashable]:
    """Yield what a shard shares with its like."""
    yield shard.path
    if shard.crc32 is not None:
        yield "crc32", shard.bytes, shard.crc32
    if shard.layout is not None:
        yield "layout", shard.bytes, shard.layout


def _is_same(one: Shard, other: Shard) -> bool:
    if None not in (one.selection, other.selection) and one.selection != other.selection:
        return False  # different samples of the shard
    if one.path == other.path:
        return True
    if one.crc32 is not None and other.crc32 is not None:
        return one.crc32 == other.crc32
    try:
        return is_local(one.path) and is_local(other.path) and filecmp.cmp(one.path, other.path, shallow=False)
    except OSError:  # a shard that is missing here is reported by who reads it
        return False
