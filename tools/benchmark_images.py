"""For developers of neuclip_ds: compare the speed of loading photographs with open_clip's pipeline.

Photographs with a longer side of 512 px, and captions, become batches of random 224 px crops and tokens. open_clip's
pipeline is `open_clip_train.data.get_wds_dataset` (webdataset, PIL, float32 batches) with open_clip's training
transform and tokenizer. Ours yields uint8 batches and tokenizes with a BPE trained on the captions. To compare only the
loaders, webdataset's WebLoader also runs with our transform and tokenizer. Contenders run interleaved in new processes;
results are medians. Then the photographs are loaded as in an evaluation, twice with the same processes. Finally, the
stages of our pipeline and of open_clip's are timed one by one.

The photographs are mosaics of images from a dataset (`--data`), so they have the detail, size and number of bytes of
real photographs. If the folder does not exist, they are mosaics of the demo's scenes, with noise.

Example: python tools/benchmark_images.py --data /data/flickr8k/train --repeats 5
"""

import argparse
import functools
import io
import itertools
import random
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarking import in_new_process, machine
from benchmarking.mosaic import samples_of
from PIL import Image
from torch import Tensor

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.demo import demo_split
from neuclip_ds.data.images import DECODERS, EvalTransform, decode_simplejpeg, train_transform
from neuclip_ds.data.loader import Loader, LoaderOptions, eval_jobs, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.evaluation.sets import open_shards
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.tokenizer import CaptionTokenizer

# pixels
LONGER = 512
SHORTER = 384
TILE = 192
CROP = 224
SCALE = 0.9  # smallest fraction of the area that a crop keeps
SHARDS = 4
CONTEXT = 77
VOCABULARY = 10_000
QUALITY = 95  # img2dataset writes JPEGs of this quality
SEED = 0
PREFETCH = 2  # batches that a worker prepares ahead
WARM_UP = 2  # number of prefetch buffers that are read before timing starts


class Setting(argparse.Namespace):
    """Options, and the locations of the prepared files."""

    data: Path
    samples: int
    batch: int
    workers: int
    repeats: int
    tars: list[str]
    tokenizer: str  # folder
    evaluation: str  # folder with the photographs as an evaluation set


Contender = Callable[[Setting], Iterator[int]]  # yields the sizes of an endless sequence of batches


# photographs


def write_photographs(setting: Setting, folder: Path) -> list[str]:
    """Write tars of photographs and captions; return their paths."""
    draw = random.Random(SEED)
    tiles: list[bytes] = []
    captions: list[bytes] = []
    for sample in itertools.islice(samples_of(source(setting.data)), 4 * setting.samples):
        tiles.append(sample.image or b"")
        captions.append(next(iter(sample.texts.values())))
    noise = np.random.default_rng(SEED)
    grain = 0 if setting.data.is_dir() else 12  # the demo's scenes have flat colors
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for number in range(shard, setting.samples, SHARDS):
                pixels = np.asarray(mosaic(draw.choices(tiles, k=6), upright=draw.random() < 0.3))
                grainy = (pixels + noise.normal(0, grain, pixels.shape)).clip(0, 255).astype(np.uint8)
                out = io.BytesIO()
                Image.fromarray(grainy).save(out, "JPEG", quality=QUALITY)
                add(archive, f"{number:08d}.jpg", out.getvalue())
                add(archive, f"{number:08d}.txt", draw.choice(captions))
    return resolve_shards(str(folder))


def source(data: Path) -> Manifest:
    folder = data if data.is_dir() else demo_split("demo:train", Path(".cache"))
    return build_manifest(resolve_shards(str(folder)))


def mosaic(tiles: list[bytes], upright: bool) -> Image.Image:
    """Return an image of LONGER x SHORTER pixels cut from 3 x 2 tiles, or this image rotated if `upright`."""
    picture = Image.new("RGB", (3 * TILE, 2 * TILE))
    for number, tile in enumerate(tiles):
        image = Image.open(io.BytesIO(tile)).convert("RGB").resize((TILE, TILE), Image.Resampling.BICUBIC)
        picture.paste(image, (number % 3 * TILE, number // 3 * TILE))
    picture = picture.crop((0, 0, LONGER, SHORTER))
    return picture.transpose(Image.Transpose.ROTATE_90) if upright else picture


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


# contenders


def ours(setting: Setting, decoder: str = "simplejpeg") -> Iterator[int]:
    manifest = build_manifest(setting.tars)
    order = GlobalOrder(manifest.starts, manifest.sizes, setting.batch, SEED)
    options = LoaderOptions(workers=setting.workers, prefetch=PREFETCH)
    transform = train_transform(CROP, SCALE, DECODERS[decoder])
    tokenizer = our_tokenizer(setting)
    pairs = PairDataset(manifest, transform, tokenizer, order.seed)
    with closing(Loader(options, {"train": pairs})) as loader:
        for batch in loader.batches("train", train_jobs(order, 0, 1, 0, 0, steps=10**9)):
            yield len(batch.image)


def our_tokenizer(setting: Setting) -> CaptionTokenizer:
    return CaptionTokenizer.load(setting.tokenizer, CONTEXT)


def webloader(setting: Setting) -> Iterator[int]:
    """Load with webdataset's WebLoader and our transform and tokenizer."""
    from webdataset import WebDataset, WebLoader

    transform = train_transform(CROP, SCALE, decode_simplejpeg)
    tokenizer = our_tokenizer(setting)
    dataset = (
        WebDataset(setting.tars, shardshuffle=len(setting.tars), nodesplitter=None)
        .repeat()
        .shuffle(1000)
        .to_tuple("jpg", "txt")
        .map_tuple(transform, lambda caption: tokenizer([caption.decode()])[0])
        .batched(setting.batch)
    )
    workers = {"num_workers": setting.workers, "prefetch_factor": PREFETCH}
    loader: Any = WebLoader(dataset, batch_size=None, **workers)
    return (len(images) for images, _ in loader)


def open_clip_pipeline(setting: Setting) -> Iterator[int]:
    from open_clip_train import data as loading
    from webdataset.tariterators import tar_file_expander

    # webdataset 1.0 marks the end of a shard, but open_clip, written for 0.2, does not know this mark
    loading.tar_file_expander = functools.partial(tar_file_expander, eof_value=None)
    options = argparse.Namespace(
        train_data="::".join(setting.tars),
        train_data_upsampling_factors=None,
        train_num_samples=10**9,
        dataset_resampled=True,
        batch_size=setting.batch,
        workers=setting.workers,
        world_size=1,
        seed=SEED,
    )
    transform, tokenizer = open_clip_parts()
    data = loading.get_wds_dataset(options, transform, is_train=True, tokenizer=tokenizer)
    return (len(images) for images, _ in data.dataloader)


def open_clip_parts() -> tuple[Callable[[Image.Image], Tensor], Callable[[str], Tensor]]:
    """Return open_clip's training transform and tokenizer."""
    from open_clip import SimpleTokenizer, image_transform

    return image_transform(CROP, is_train=True, aug_cfg={"scale": (SCALE, 1.0)}), SimpleTokenizer()


CONTENDERS: dict[str, Contender] = {
    "ours": ours,
    "ours, decoder pil": functools.partial(ours, decoder="pil"),
    "WebLoader, our transform": webloader,
    "open_clip": open_clip_pipeline,
}


def rate(contender: Contender, setting: Setting) -> float:
    """Measure a contender's samples/s after the warm-up, on `setting.samples` photographs."""
    sizes = contender(setting)
    for _ in range(WARM_UP * setting.workers * PREFETCH):  # more batches than were prepared ahead
        next(sizes)
    samples = 0
    start = time.perf_counter()
    while samples < setting.samples:
        samples += next(sizes)
    return samples / (time.perf_counter() - start)


# evaluation


class Passes(NamedTuple):
    """Samples/s of one rank in two passes over the photographs."""

    first: float  # includes starting the processes
    second: float


def evaluation_set(setting: Setting) -> Passes:
    """Measure the speed of loading the photographs as an evaluation set."""
    folder = Path(setting.evaluation)
    transform = EvalTransform(CROP, decode=decode_simplejpeg)
    prepare = functools.partial(decode, transform=transform)

    def run_pass(loader: Loader) -> int:
        batches = sharded_batches(open_shards(folder), prepare, Communicator(), setting.batch, loader)
        return sum(len(torch.stack(batch.rows)) for batch in batches)

    return two_passes(setting, Loader(LoaderOptions(workers=setting.workers, prefetch=PREFETCH)), run_pass)


def evaluation_pairs(setting: Setting) -> Passes:
    """Measure the speed of loading the photographs as validation pairs."""
    manifest = build_manifest(setting.tars)
    options = LoaderOptions(workers=setting.workers, prefetch=PREFETCH)
    transform = EvalTransform(CROP, decode=decode_simplejpeg)
    pairs = {"val": PairDataset(manifest, transform, our_tokenizer(setting))}

    def run_pass(loader: Loader) -> int:
        batches = loader.batches("val", eval_jobs(manifest, 0, 1, setting.batch))
        return sum(int(batch.valid.sum()) for batch in batches)

    return two_passes(setting, Loader(options, pairs), run_pass)


def two_passes(setting: Setting, loader: Loader, run_pass: Callable[[Loader], int]) -> Passes:
    rates: list[float] = []
    with closing(loader):
        for _ in range(2):
            seconds, samples = timed(functools.partial(run_pass, loader))
            rates.append(samples / seconds)
    first, second = rates
    return Passes(first, second)


def link_evaluation_set(tars: list[str], folder: Path) -> str:
    """Link the photographs as an evaluation set; return the set's folder."""
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "nshards.txt").write_text(f"{len(tars)}\n")
    for number, tar in enumerate(tars):
        (folder / "test" / f"{number}.tar").symlink_to(tar)
    return str(folder)


# where the time goes


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Milliseconds per sample of a pipeline's stages, run one after another in one process without a loader."""

    read: float
    decode: float
    resize: float  # crop and resize; for open_clip, also the conversion to float32 and normalization
    tokenize: float
    collate: float


def our_stages(setting: Setting, count: int) -> Stages:
    manifest = build_manifest(setting.tars)
    reader = TarReader(manifest)
    tokenizer = our_tokenizer(setting)
    transform = train_transform(CROP, SCALE, decode_simplejpeg)
    dataset = PairDataset(manifest, transform, tokenizer)
    reader.read(0)
    read, samples = timed(lambda: [reader.read(index) for index in range(count)])
    images = [sample.image or b"" for sample in samples]
    captions = [next(iter(sample.texts.values())).decode() for sample in samples]
    transform(images[0])
    decoded, _ = timed(lambda: [decode_simplejpeg(image, None) for image in images])
    transformed, _ = timed(lambda: [transform(image, number) for number, image in enumerate(images)])
    tokenized, _ = timed(lambda: tokenizer(captions))
    all_stages, _ = timed(lambda: dataset.batch([(0, index) for index in range(count)]))
    collated = max(0.0, all_stages - read - transformed - tokenized)
    return Stages(
        read=1000 * read / count,
        decode=1000 * decoded / count,
        resize=1000 * (transformed - decoded) / count,
        tokenize=1000 * tokenized / count,
        collate=1000 * collated / count,
    )


def open_clip_stages(setting: Setting, count: int) -> Stages:
    import webdataset

    transform, tokenizer = open_clip_parts()
    raw = iter(webdataset.WebDataset(setting.tars, shardshuffle=False))
    next(raw)
    read, samples = timed(lambda: list(itertools.islice(raw, count)))
    decode = webdataset.autodecode.imagehandler("pilrgb")
    pictures: list[Image.Image]
    decoded, pictures = timed(lambda: [decode("jpg", sample["jpg"]) for sample in samples])
    transform(pictures[0])
    transformed, pixels = timed(lambda: [transform(picture) for picture in pictures])
    tokenized, tokens = timed(lambda: [tokenizer(sample["txt"].decode())[0] for sample in samples])

    def collate() -> None:
        for start in range(0, count, setting.batch):
            torch.stack(pixels[start : start + setting.batch])
            torch.stack(tokens[start : start + setting.batch])

    collated, _ = timed(collate)
    return Stages(
        read=1000 * read / count,
        decode=1000 * decoded / count,
        resize=1000 * transformed / count,
        tokenize=1000 * tokenized / count,
        collate=1000 * collated / count,
    )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


# the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("/data/flickr8k/train"),
        help="folder of shards whose images are combined into the photographs (default: /data/flickr8k/train; the "
        "demo's scenes if the folder does not exist)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=2048,
        help="number of photographs to generate; each measurement of a loader reads at least as many samples (default: "
        "2048)",
    )
    parser.add_argument("--batch", type=int, default=64, help="samples per batch (default: 64)")
    parser.add_argument("--workers", type=int, default=1, help="loader processes (default: 1)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="times to measure each contender, interleaved (default: 3)"
    )
    with exit_on_mistake():
        run(parser.parse_args(namespace=Setting()))


def run(setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as name:
        photographs = Path(name, "photographs")
        photographs.mkdir()
        setting.tars = write_photographs(setting, photographs)
        setting.tokenizer = f"{name}/tokenizer"
        setting.evaluation = link_evaluation_set(setting.tars, Path(name, "set"))
        train_bpe(captions_of(setting), VOCABULARY, CONTEXT).save(setting.tokenizer)
        size = sum(Path(tar).stat().st_size for tar in setting.tars) / setting.samples
        print(
            f"{machine()}: {setting.samples:,} photographs of {LONGER} x {SHORTER} px and about {size / 1000:.0f} kB, "
            f"crops of {CROP} px, {setting.workers} workers, batch {setting.batch}\n"
        )
        print_rates(setting)
        print_evaluation(setting)
        print_stages(setting)


def captions_of(setting: Setting) -> Iterator[str]:
    for sample in samples_of(build_manifest(setting.tars)):
        for text in sample.texts.values():
            yield text.decode()


def print_rates(setting: Setting) -> None:
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(setting.repeats):
        for name, contender in CONTENDERS.items():
            samples_per_second = in_new_process(rate, contender, setting)
            rates[name].append(samples_per_second / max(1, setting.workers))
    print("| loader | samples/s per worker | lowest to highest | ours / this row |\n|---|---|---|---|")
    for name, theirs in rates.items():
        ratio = statistics.median(our_rate / rate for our_rate, rate in zip(rates["ours"], theirs, strict=True))
        print(f"| {name} | {statistics.median(theirs):,.0f} | {min(theirs):,.0f} - {max(theirs):,.0f} | {ratio:.2f} |")


def print_evaluation(setting: Setting) -> None:
    print("\n| evaluation | samples/s per worker, first pass | second pass |\n|---|---|---|")
    for name, work in {"evaluation set": evaluation_set, "validation pairs": evaluation_pairs}.items():
        turns: list[Passes] = [in_new_process(work, setting) for _ in range(setting.repeats)]
        workers = max(1, setting.workers)
        first = statistics.median(turn.first for turn in turns) / workers
        second = statistics.median(turn.second for turn in turns) / workers
        print(f"| {name} | {first:,.0f} | {second:,.0f} |")


def print_stages(setting: Setting) -> None:
    """Print the time of each stage; `hand over` is a one-worker loader's time minus the sum of the stages."""
    count = min(512, setting.samples)
    stage_names = [field.name for field in fields(Stages)]
    columns = " | ".join(["pipeline", *stage_names, "sum", "hand over"])
    print(f"\nms per sample\n\n| {columns} |\n{'|---' * (len(stage_names) + 3)}|")
    one_worker = argparse.Namespace(**{**vars(setting), "workers": 1})
    for name, measure_stages in {"ours": our_stages, "open_clip": open_clip_stages}.items():
        turns: list[Stages] = [in_new_process(measure_stages, setting, count) for _ in range(setting.repeats)]
        medians = [statistics.median(getattr(turn, stage) for turn in turns) for stage in stage_names]
        loader_times = [1000 / in_new_process(rate, CONTENDERS[name], one_worker) for _ in range(setting.repeats)]
        stages_sum = sum(medians)
        hand_over = statistics.median(loader_times) - stages_sum
        cells = " | ".join(f"{milliseconds:.2f}" for milliseconds in (*medians, stages_sum, hand_over))
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main()
