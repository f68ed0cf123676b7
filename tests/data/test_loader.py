"""Loaders: batches are independent of workers, ranks and starting step; bad samples keep their row."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tars import jpeg, tokenize, write_pairs

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.dataset import Batch, PairDataset, iter_captions
from neuclip_ds.data.loader import LoaderOptions, eval_loader, train_loader
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.transforms import EvalTransform, train_transform
from neuclip_ds.errors import UserError

FLICKR = Path(__file__).parents[3] / "shared/data/flickr8k/train"
TRANSFORM = train_transform(16, 0.5)
HERE = LoaderOptions(workers=0)


def manifest_of(folder: Path) -> Manifest:
    return build_manifest(resolve_shards(str(folder)), processes=1)


def order_of(manifest: Manifest, batch_size: int = 8, **options) -> GlobalOrder:
    return GlobalOrder(manifest.starts, manifest.sizes, batch_size, 5, **options)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    return manifest_of(write_pairs(tmp_path_factory.mktemp("pairs"), [9, 12, 6, 10]))


def assert_same(actual: list[Batch], expected: list[Batch]) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        for field in ("image", "tokens", "index", "valid"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
        assert ours.bad == theirs.bad


def joined(parts: Sequence[Batch]) -> Batch:
    return Batch(*(torch.cat(column) for column in zip(*(part[:4] for part in parts), strict=True)))


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
    batches = train_loader(
        manifest, order, transform, tokenize, epoch=epoch, step=step, steps=steps, options=chosen, **share
    )
    return list(batches)


@pytest.fixture(scope="module")
def uninterrupted(manifest) -> list[Batch]:
    """Two epochs of 5 steps and two steps of the third."""
    return load(manifest, order_of(manifest))


def test_shapes_and_contents(manifest, uninterrupted):
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


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (0, 3), (1, 0), (0, 5), (1, 4), (2, 1), (2, 2)])
def test_resuming_equals_the_uninterrupted_run(manifest, uninterrupted, epoch, step):
    resumed = load(manifest, order_of(manifest), epoch=epoch, step=step)
    assert_same(resumed, uninterrupted[epoch * 5 + step :])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_batches(manifest, uninterrupted, workers):
    assert_same(load(manifest, order_of(manifest), workers=workers, prefetch=2), uninterrupted)
    assert_same(load(manifest, order_of(manifest), workers=workers, epoch=1, step=3), uninterrupted[8:])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rank_slices_join_to_the_global_batches(manifest, uninterrupted, world):
    ranks = [load(manifest, order_of(manifest), rank=rank, world_size=world) for rank in range(world)]
    assert_same([joined(parts) for parts in zip(*ranks, strict=True)], uninterrupted)


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_join_to_the_batches(manifest, uninterrupted, workers, tmp_path):
    """Also where a worker dies at a part in the middle of a batch."""
    deadly = (15,) if workers else ()
    failing = Fails(tmp_path, deadly=deadly, stuck=())
    options = {"workers": workers, "prefetch": 2, "restarts": 1, "transform": failing}
    parts = load(manifest, order_of(manifest), parts=3, epoch=1, step=2, **options)
    assert [len(part.index) for part in parts[:3]] == [2, 3, 3]
    assert_same([joined(parts[low : low + 3]) for low in range(0, len(parts), 3)], uninterrupted[7:])


def test_webdataset_reader_gives_the_same_batches(manifest, uninterrupted):
    assert_same(load(manifest, order_of(manifest), reader="webdataset"), uninterrupted)
    assert_same(load(manifest, order_of(manifest), reader="webdataset", workers=2), uninterrupted)


def test_batch_must_divide_by_the_ranks(manifest):
    with pytest.raises(UserError, match="batch_size=8 is not divisible by 3 ranks"):
        train_loader(manifest, order_of(manifest), TRANSFORM, tokenize, world_size=3, steps=1)


@pytest.mark.skipif(not FLICKR.is_dir(), reason="no flickr8k here")
def test_resume_and_workers_on_real_shards():
    manifest = manifest_of(FLICKR)
    order = order_of(manifest, 60)
    whole = load(manifest, order, total_steps=102, epoch=0, step=96)
    assert order.steps_per_epoch == 100
    assert all(batch.valid.all() for batch in whole)
    assert_same(load(manifest, order, total_steps=102, epoch=0, step=99, workers=2), whole[3:])


@pytest.mark.parametrize(("world", "batch_size"), [(1, 10), (2, 8), (4, 3), (3, 50)])
def test_eval_takes_every_sample_once_in_equal_batches(manifest, world, batch_size):
    transform = EvalTransform(16)
    ranks = [
        list(eval_loader(manifest, transform, tokenize, rank=r, world_size=world, batch_size=batch_size, options=HERE))
        for r in range(world)
    ]
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
@pytest.mark.parametrize("reader", ["tar", "webdataset"])
def test_bad_samples_keep_their_place(damaged, workers, reader):
    options = LoaderOptions(workers=workers, reader=reader)
    batches = list(eval_loader(damaged, EvalTransform(16), tokenize, batch_size=5, options=options))
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
    batch = PairDataset(manifest, TRANSFORM, tokenize).__getitems__([(0, i) for i in range(4)])
    assert batch.valid.tolist() == [True, True, False, False]
    assert all("read failed" in sample.reason for sample in batch.bad)


def test_a_short_outage_is_retried(manifest, monkeypatch):
    dataset, calls = PairDataset(manifest, TRANSFORM, tokenize), []
    read = dataset._reader.read

    def every_second_fails(index: int):
        calls.append(index)
        if len(calls) % 2:
            raise OSError("outage")
        return read(index)

    monkeypatch.setattr(dataset._reader, "read", every_second_fails)
    assert dataset.__getitems__([(0, 0), (0, 1)]).valid.all()
    assert calls == [0, 0, 1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_changed_shard_is_one_clear_error(tmp_path, workers):
    manifest = manifest_of(write_pairs(tmp_path, [4]))
    write_pairs(tmp_path, [3])
    with pytest.raises(UserError, match=r"^Shard .*00000.tar yields 3 samples"):
        load(manifest, order_of(manifest, 2), workers=workers)


class Sleeps:
    image_size = 16

    def __call__(self, data: bytes, seed: int = 0) -> torch.Tensor:
        time.sleep(2)
        return torch.zeros(3, 16, 16, dtype=torch.uint8)


class Dies(Sleeps):
    def __call__(self, data: bytes, seed: int = 0) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def test_a_stuck_loader_says_what_it_waited_for(manifest, caplog):
    order, options = order_of(manifest, 2), {"workers": 1, "timeout": 0.5, "restarts": 1}
    with pytest.raises(UserError, match=r"0.5 s waiting for step 2 of epoch 1 from 1 loader .*data.timeout \(2 times"):
        load(manifest, order, 99, transform=Sleeps(), epoch=1, step=2, **options)
    assert "restarting the loader processes (1 of 1)" in caplog.text


def test_a_dead_worker_is_a_clear_error(manifest):
    with pytest.raises(
        UserError, match=r"A loader process died while waiting for step 0 of epoch 0 .*; if memory .*\(1 times"
    ):
        load(manifest, order_of(manifest), 3, transform=Dies(), workers=1, restarts=0)


class Fails:
    """The usual transform, which kills or blocks its process at some calls, counted over all processes."""

    image_size = 16

    def __init__(self, folder: Path, deadly: tuple[int, ...], stuck: tuple[int, ...]) -> None:
        self.folder, self.deadly, self.stuck = folder, deadly, stuck

    def __call__(self, data: bytes, seed: int = 0) -> torch.Tensor:
        with (self.folder / "calls").open("ab") as calls:
            calls.write(b".")
            number = calls.tell()
        if number in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if number in self.stuck:
            time.sleep(60)
        return TRANSFORM(data, seed)


def test_dead_and_stuck_workers_are_replaced_at_the_current_step(manifest, uninterrupted, tmp_path, caplog):
    """Three failures, never more than two in a row at one batch: the batches equal those of a run without failures."""
    failing = Fails(tmp_path, deadly=(3, 40), stuck=(71,))
    options = {"workers": 1, "prefetch": 1, "timeout": 3, "restarts": 2}
    assert_same(load(manifest, order_of(manifest), transform=failing, **options), uninterrupted)
    assert caplog.text.count("restarting the loader processes") == 3
    assert "died" in caplog.text
    assert "Timed out" in caplog.text


def children() -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def test_workers_outlive_the_launchers_signals_and_end_with_the_loader(manifest, uninterrupted):
    before = children()
    options = LoaderOptions(workers=2, prefetch=1)
    batches = train_loader(manifest, order_of(manifest), TRANSFORM, tokenize, steps=12, options=options)
    first = next(batches)
    started = children() - before
    assert len(started) == 2
    for pid in started:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)
    assert_same([first, next(batches), next(batches)], uninterrupted[:3])
    batches.close()
    assert not started & children()


def test_removed_shards_are_neither_trained_on_nor_evaluated(manifest):
    shards = [shard._replace(removed=number == 1) for number, shard in enumerate(manifest.shards)]
    smaller = Manifest(shards)
    kept = [i for i in range(37) if not 9 <= i < 21]
    assert (smaller.n, smaller.n_used) == (37, 25)
    order = order_of(smaller)
    batches = load(smaller, order, 2 * order.steps_per_epoch)
    for epoch in (0, 1):
        part = batches[epoch * order.steps_per_epoch : (epoch + 1) * order.steps_per_epoch]
        assert sorted(torch.cat([batch.index[batch.valid] for batch in part]).tolist()) == kept
    seen = []
    for rank in range(3):
        share = {"rank": rank, "world_size": 3, "batch_size": 4, "options": HERE}
        for batch in eval_loader(smaller, EvalTransform(16), tokenize, **share):
            seen += batch.index[batch.valid].tolist()
    assert seen == kept


def test_one_of_several_captions_is_drawn_by_seed_epoch_and_index(tmp_path):
    texts = {i: {"jpg": jpeg(i), "txt": f"a{i}\nb{i}\n\nc{i}".encode()} for i in range(40)}
    texts[7] = {"jpg": jpeg(7), "json": b'{"other": ["d7", " "], "one": "e7"}'}
    manifest = manifest_of(write_pairs(tmp_path, [40], replace=texts))
    captions = ("txt:lines", "json:other", "json:one")

    def drawn(seed: int, epoch: int, items: list[int]) -> list[str]:
        heard: list[str] = []

        def listen(captions: list[str]) -> torch.Tensor:
            heard.extend(captions)
            return tokenize(captions)

        PairDataset(manifest, TRANSFORM, listen, seed=seed, captions=captions)[epoch, items[0]]
        heard.clear()
        PairDataset(manifest, TRANSFORM, listen, seed=seed, captions=captions).__getitems__([(epoch, i) for i in items])
        return heard

    first = drawn(0, 0, list(range(40)))
    assert {text[0] for text in first if text[1:] != "7"} == set("abc")
    assert first[7] in ("d7", "e7")
    assert drawn(0, 0, [5, 30, 7]) == [first[5], first[30], first[7]]
    assert len({tuple(drawn(seed, epoch, list(range(40)))) for seed in (0, 1) for epoch in (0, 1)}) == 4
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


def test_weighted_captions_are_the_same_from_any_start_on_any_rank(tmp_path: Path) -> None:
    replaced = {
        index: {"jpg": jpeg(index), "txt": b"own", "syn.txt": b"made"}
        if index % 4
        else {"jpg": jpeg(index), "txt": b"one"}
        for index in range(37)
    }
    manifest = manifest_of(write_pairs(tmp_path, [20, 17], replaced))
    order, weighted = order_of(manifest), {"captions": {"txt": 0.3, "syn.txt": 0.7}}
    whole = load(manifest, order, **weighted)
    assert_same(load(manifest, order, epoch=1, step=2, **weighted), whole[7:])
    halves = [load(manifest, order, rank=rank, world_size=2, **weighted) for rank in range(2)]
    assert_same([joined(parts) for parts in zip(*halves, strict=True)], [batch._replace(bad=()) for batch in whole])
    letters = [
        (index, bytes(tokens.tolist()).strip(b"\0").decode())
        for batch in whole
        for index, tokens in zip(batch.index.tolist(), batch.tokens, strict=True)
        if index >= 0
    ]
    assert {text for index, text in letters if index % 4 == 0} == {"one"}
    drawn = [text for index, text in letters if index % 4]
    assert 0.55 < drawn.count("made") / len(drawn) < 0.85
    assert len({tuple(text for i, text in letters if i == index) for index in range(1, 4)}) > 1, "other ones each epoch"
