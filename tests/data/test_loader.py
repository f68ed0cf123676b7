"""Check that batches do not depend on the workers, ranks or starting step, and that bad samples keep their rows."""

import os
import signal
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from forks import alive, children_of
from tars import assert_same, jpeg, load_evaluation, load_training, manifest_of, tokenize, write_pairs

from neuclip_ds.data import worker_pool
from neuclip_ds.data.dataset import BadSample, Batch, PairDataset
from neuclip_ds.data.images import EvalTransform, train_transform
from neuclip_ds.data.loader import PART_BYTES, LoaderOptions, RankBatch, join_parts, part_count, part_rows
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.open_data import iter_captions
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.worker_pool import PROCESS_NAME
from neuclip_ds.errors import UserError

TRANSFORM = train_transform(16, 0.5)
HERE = LoaderOptions(workers=0)


def order_of(manifest: Manifest, batch_size: int = 8, **options) -> GlobalOrder:
    return GlobalOrder(manifest.starts, manifest.sizes, batch_size, 5, **options)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    return manifest_of(write_pairs(tmp_path_factory.mktemp("pairs"), [9, 12, 6, 10]))


def joined(parts: Sequence[Batch]) -> Batch:
    return Batch(
        image=torch.cat([part.image for part in parts]),
        tokens=torch.cat([part.tokens for part in parts]),
        index=torch.cat([part.index for part in parts]),
        valid=torch.cat([part.valid for part in parts]),
    )


def load(
    manifest: Manifest,
    order: GlobalOrder,
    total_steps: int = 12,
    *,
    transform=TRANSFORM,
    rank: int = 0,
    world_size: int = 1,
    epoch: int = 0,
    step: int = 0,
    parts: int = 1,
    **options,
) -> list[Batch]:
    steps = total_steps - epoch * order.steps_per_epoch - step
    chosen = LoaderOptions(**{"workers": 0, **options})
    share = {"rank": rank, "world_size": world_size, "parts": parts}
    return list(load_training(manifest, order, transform, chosen, steps, epoch=epoch, step=step, **share))


@pytest.fixture(scope="module")
def uninterrupted(manifest) -> list[Batch]:
    """Load two epochs of 5 steps each and two steps of the third epoch."""
    return load(manifest, order_of(manifest))


def test_batches_have_the_samples_of_the_order_in_these_shapes(manifest, uninterrupted):
    order = order_of(manifest)
    assert order.steps_per_epoch == 5
    for number, batch in enumerate(uninterrupted):
        assert (batch.image.shape, batch.image.dtype) == ((8, 3, 16, 16), torch.uint8)
        assert (batch.tokens.shape, batch.tokens.dtype) == ((8, 12), torch.int64)
        assert batch.index.tolist() == order.batch(*divmod(number, 5)).tolist()
        assert batch.valid.tolist() == (batch.index >= 0).tolist()
        captions = [f"caption {i}" if i >= 0 else "" for i in batch.index.tolist()]
        assert torch.equal(batch.tokens, tokenize(captions))
        assert not batch.image[~batch.valid].any()
    epoch = torch.cat([batch.index[batch.valid] for batch in uninterrupted[:5]])
    assert sorted(epoch.tolist()) == list(range(37))


def test_augmentation_differs_between_epochs_only(uninterrupted):
    pixels = {}
    for number, batch in enumerate(uninterrupted[:10]):
        for index, image in zip(batch.index.tolist(), batch.image, strict=True):
            pixels[number // 5, index] = image
    assert sum(not torch.equal(pixels[0, i], pixels[1, i]) for i in range(37)) > 30


@pytest.mark.parametrize(
    ("epoch", "step", "workers"),
    [(0, 0, 0), (0, 3, 0), (1, 0, 0), (0, 5, 0), (1, 4, 0), (2, 1, 0), (2, 2, 0), (0, 0, 1), (0, 0, 2), (1, 3, 2)],
)
def test_starts_and_workers_do_not_change_the_batches(manifest, uninterrupted, epoch, step, workers):
    resumed = load(manifest, order_of(manifest), epoch=epoch, step=step, workers=workers, prefetch=2)
    assert_same(resumed, uninterrupted[epoch * 5 + step :])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rank_slices_join_to_the_global_batches(manifest, uninterrupted, world):
    ranks = [load(manifest, order_of(manifest), rank=rank, world_size=world) for rank in range(world)]
    assert_same([joined(parts) for parts in zip(*ranks, strict=True)], uninterrupted)


class Dies:
    """A transform that kills its process at call `deadly`, counted over all processes, or at every call by default."""

    image_size = 16

    def __init__(self, folder: Path, deadly: int | None = None) -> None:
        self.calls, self.deadly = folder / "calls", deadly

    def __call__(self, data: bytes, seed: int = 0) -> torch.Tensor:
        with self.calls.open("ab") as calls:
            calls.write(b".")
            number = calls.tell()
        if self.deadly in (None, number):
            os.kill(os.getpid(), signal.SIGKILL)
        return TRANSFORM(data, seed)


@pytest.mark.parametrize(("workers", "deadly"), [(0, 0), (2, 15)])
def test_parts_join_to_the_batches(manifest, uninterrupted, workers, deadly, tmp_path):
    """The parts of a batch give the whole batch, even if a worker dies while it loads a part."""
    options = {"workers": workers, "prefetch": 2, "transform": Dies(tmp_path, deadly)}
    parts = load(manifest, order_of(manifest), parts=3, epoch=1, step=2, **options)
    assert [len(part.index) for part in parts[:3]] == [2, 3, 3]
    assert_same([joined(parts[low : low + 3]) for low in range(0, len(parts), 3)], uninterrupted[7:])


@pytest.mark.parametrize(("world", "batch_size"), [(1, 10), (2, 8), (4, 3), (3, 50)])
def test_eval_takes_every_sample_once_in_equal_batches(manifest, world, batch_size):
    transform = EvalTransform(16)
    ranks = [list(load_evaluation(manifest, transform, HERE, batch_size, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert {tuple(batch.image.shape) for batches in ranks for batch in batches} == {(batch_size, 3, 16, 16)}
    rows = [index for batches in ranks for batch in batches for index in batch.index[batch.valid].tolist()]
    assert rows == list(range(37))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Manifest:
    bad = {
        1: {"txt": b"no image"},
        3: {"jpg": jpeg(3)},
        4: {"jpg": jpeg(4), "txt": b" \n"},
        6: {"jpg": jpeg(6)[:-100], "txt": b"cut"},
        7: {"jpg": b"no picture", "txt": b"junk"},
    }
    return manifest_of(write_pairs(tmp_path_factory.mktemp("damaged"), [5, 5], replace=bad))


REASONS = {1: "no image", 3: "no caption", 4: "blank caption", 6: "truncated", 7: "unknown image format"}


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_keep_their_place(damaged, workers):
    options = LoaderOptions(workers=workers)
    batches = list(load_evaluation(damaged, EvalTransform(16), options, 5))
    for batch in batches:
        expected = [index not in REASONS for index in batch.index.tolist()]
        assert batch.valid.tolist() == expected
        assert not batch.image[~batch.valid].any()
        assert not batch.tokens[~batch.valid].any()
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(10))
    found = {sample.index: sample for batch in batches for sample in batch.bad}
    assert found.keys() == REASONS.keys()
    for index, reason in REASONS.items():
        assert reason in found[index].reason
        assert found[index].key == f"{index:06d}"
        assert found[index].shard == damaged.shards[index // 5].path


def test_unreadable_shards_are_bad_samples_after_one_retry(tmp_path):
    manifest = manifest_of(write_pairs(tmp_path, [2, 2]))
    Path(manifest.shards[1].path).unlink()
    batch = PairDataset(manifest, TRANSFORM, tokenize).batch([(0, i) for i in range(4)])
    assert batch.valid.tolist() == [True, True, False, False]
    assert all("read failed" in sample.reason for sample in batch.bad)


def test_a_short_outage_is_retried(manifest, monkeypatch):
    calls, read = [], TarReader.read

    def every_second_fails(reader: TarReader, index: int, with_image: bool):
        calls.append(index)
        if len(calls) % 2:
            raise OSError("outage")
        return read(reader, index, with_image)

    monkeypatch.setattr(TarReader, "read", every_second_fails)
    assert PairDataset(manifest, TRANSFORM, tokenize).batch([(0, 0), (0, 1)]).valid.all()
    assert calls == [0, 0, 1, 1]


class Sleeps:
    image_size = 16

    def __call__(self, data: bytes, seed: int = 0) -> torch.Tensor:
        time.sleep(2)
        return torch.zeros(3, 16, 16, dtype=torch.uint8)


def test_a_loader_that_dies_or_hangs_is_a_clear_error(manifest, caplog, monkeypatch, tmp_path):
    """A worker that dies is replaced twice before an error is raised, because the failure may be temporary."""
    with pytest.raises(UserError, match=r"A loader process died .* step 1 of epoch 1 .* 3 times in a row"):
        load(manifest, order_of(manifest), 3, transform=Dies(tmp_path), workers=1)
    monkeypatch.setattr(worker_pool, "MAX_FAILURES", 2)
    order, options = order_of(manifest, 2), {"workers": 1, "timeout": 0.5}
    with pytest.raises(
        UserError, match=r"0.5 s waiting for step 3 of epoch 2 from 1 loader .*data.timeout\. This .* 2 times"
    ):
        load(manifest, order, 99, transform=Sleeps(), epoch=1, step=2, **options)
    assert "replacing a loader process (attempt 1 of 1)" in caplog.text


def test_workers_outlive_the_launchers_signals_and_end_with_the_loader(manifest, uninterrupted):
    options = LoaderOptions(workers=2, prefetch=1)
    batches = load_training(manifest, order_of(manifest), TRANSFORM, options, 12)
    first = next(batches)
    started = children_of(os.getpid(), PROCESS_NAME)
    assert len(started) == 2
    for pid in started:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)
    assert_same([first, next(batches), next(batches)], uninterrupted[:3])
    batches.close()
    assert not any(map(alive, started))


def test_one_of_several_captions_is_drawn_by_seed_epoch_and_index(tmp_path):
    texts = {i: {"jpg": jpeg(i), "txt": f"a{i}\nb{i}\n\nc{i}".encode()} for i in range(40)}
    texts[7] = {"jpg": jpeg(7), "json": b'{"other": ["d7", " "], "one": "e7"}'}
    manifest = manifest_of(write_pairs(tmp_path, [40], replace=texts))
    captions = ("txt:lines", "json:other", "json:one")

    def drawn(seed: int, epoch: int, items: Sequence[int]) -> list[str]:
        pairs = PairDataset(manifest, TRANSFORM, tokenize, seed=seed, captions=captions)
        tokens = pairs.batch([(epoch, index) for index in items]).tokens
        return [bytes(row).strip(b"\0").decode() for row in tokens.tolist()]

    first = drawn(0, 0, range(40))
    assert {text[0] for text in first if text[1:] != "7"} == set("abc")
    assert drawn(0, 0, [5, 30, 7]) == [first[5], first[30], first[7]]
    assert len({tuple(drawn(seed, epoch, range(40))) for seed in (0, 1) for epoch in (0, 1)}) == 4
    everything = set(iter_captions(manifest, 40, captions))
    assert everything == {f"{letter}{i}" for letter in "abc" for i in range(40) if i != 7} | {"d7", "e7"}


def test_captions_are_spread_over_the_shards(manifest, damaged):
    assert list(iter_captions(manifest, 1000)) == [f"caption {i}" for i in range(37)]
    some = [int(caption.split()[1]) for caption in iter_captions(manifest, 12)]
    assert len(some) == 12
    assert all(
        any(start <= i < start + n for i in some) for start, n in zip(manifest.starts, manifest.sizes, strict=True)
    )
    assert list(iter_captions(manifest, 0)) == []
    assert list(iter_captions(damaged, 100)) == [
        *("caption 0", "no image", "caption 2", "caption 5", "cut", "junk", "caption 8", "caption 9")
    ]


ROWS, PARTS = 11, 3


def whole() -> Batch:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (ROWS, 3, 2, 2), generator=generator, dtype=torch.uint8)
    bad = (
        BadSample(index=3, shard="shard", key="key", reason="no image"),
        BadSample(index=9, shard="shard", key="other", reason="no caption"),
    )
    index = torch.arange(ROWS)
    valid = (index != 3) & (index != 9)
    return Batch(image=image, tokens=torch.arange(2 * ROWS).view(ROWS, 2), index=index, valid=valid, bad=bad)


def cut(batch: Batch, count: int = PARTS) -> list[Batch]:
    """Return copies of the parts of a batch, as loader processes deliver them."""
    parts = []
    for number in range(count):
        rows = part_rows(len(batch.index), count, number)
        part = Batch(
            image=batch.image[rows].clone(),
            tokens=batch.tokens[rows].clone(),
            index=batch.index[rows].clone(),
            valid=batch.valid[rows].clone(),
            bad=tuple(bad for bad in batch.bad if rows.start <= bad.index < rows.stop),
        )
        parts.append(part)
    return parts


@pytest.mark.parametrize(("rows", "side", "parts"), [(640, 224, 1), (891, 224, 1), (892, 224, 2), (524_288, 224, 589)])
def test_a_part_is_bounded_in_bytes(rows: int, side: int, parts: int) -> None:
    assert part_count(rows, side) == parts
    slices = [part_rows(rows, parts, number) for number in range(parts)]
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    assert slices[-1].stop == rows
    sizes = {part.stop - part.start for part in slices}
    assert max(sizes) * 3 * side**2 <= PART_BYTES
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rows", [slice(0, 11), slice(0, 3), slice(2, 5), slice(3, 7), slice(1, 10), slice(8, 99)])
def test_rows_are_those_of_the_whole(rows: slice) -> None:
    batch, parts = whole(), cut(whole())
    joined = RankBatch(parts)
    assert len(joined) == ROWS
    assert torch.equal(joined.index, batch.index)
    assert torch.equal(joined.valid, batch.valid)
    assert joined.bad == batch.bad
    pieces = joined.pieces(rows)
    for column, wanted in zip(zip(*pieces, strict=True), (batch.image[rows], batch.tokens[rows]), strict=True):
        assert torch.equal(torch.cat(column), wanted)
    storages = {part.image.untyped_storage().data_ptr() for part in parts}
    assert {image.untyped_storage().data_ptr() for image, _ in pieces} <= storages, "views, not copies"


def test_parts_that_have_been_used_are_freed() -> None:
    parts = cut(whole())
    alive = [weakref.ref(part.image) for part in parts]
    ends = [len(parts[0].index), len(parts[0].index) + len(parts[1].index)]
    (batch,) = join_parts(iter(parts), PARTS)
    del parts
    batch.release(ends[0] - 1)
    assert all(image() is not None for image in alive)
    batch.release(ends[1])
    assert [image() is not None for image in alive] == [False, False, True]
    assert len(batch.pieces(slice(ends[1], ROWS))) == 1
    with pytest.raises(RuntimeError, match="have been released"):
        batch.pieces(slice(0, ROWS))
    assert batch.index.tolist() == list(range(ROWS))
    assert [len(following) for following in join_parts(iter(cut(whole()) + cut(whole(), 2)), PARTS)] == [ROWS, ROWS]
