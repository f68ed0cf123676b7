"""Fine-tuning pairs of the cold-start study: with false negatives, and with captions that belong to other images."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from neuclip_ds.data.atomic_write import new_folder
from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.reproduction.data import shrunken, write_shards

_SEED = 1  # the demo's own scenes have 0


def render_pairs(folder: Path, pairs: int, duplicates: float) -> None:
    """Write rendered pairs that no split of the demo has; a folder that is complete is left as it is.

    Args:
        folder: of the shards.
        duplicates: probability that a pair shows the scene of an earlier one, drawn and described anew. In a batch it
            is a false negative of the others of its scene.
    """
    if folder.is_dir():
        return
    rendered = folder.with_name(f"{folder.name}.rendered")
    shutil.rmtree(rendered, ignore_errors=True)
    make_demo_data(rendered, pairs=pairs, held_out=1, zero_shot=1, duplicate_share=duplicates, seed=_SEED, processes=1)
    write_shards(shrunken(rendered / "train"), folder)
    shutil.rmtree(rendered)


def copy_shards(shards: Sequence[Path], folder: Path) -> None:
    """Copy shards into a folder; one that is complete is left as it is."""
    if folder.is_dir():
        return
    with new_folder(folder) as unfinished:
        for shard in shards:
            shutil.copy(shard, unfinished)


def mismatch_captions(source: Path, folder: Path, share: float) -> None:
    """Copy pairs, and give each of a share of them the caption of another one; a complete folder is left as it is."""
    if folder.is_dir():
        return
    pairs = list(shrunken(source))
    rng = Random(_SEED)
    chosen = [number for number in range(len(pairs)) if rng.random() < share]
    captions = [pairs[number]["txt"] for number in chosen]
    rng.shuffle(chosen)
    for number, caption in zip(chosen, captions, strict=True):
        pairs[number] = {"jpg": pairs[number]["jpg"], "txt": caption}
    write_shards(pairs, folder)
