"""Read mutated shards, manifests, images and lists: nothing may crash, hang or access files outside its folder."""

import io
import json
import os
import random
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import fork, kill
from PIL import Image
from small_runs import environment
from tars import jpeg, tokenize, write_tar

from neuclip_ds.data.build import build_manifest, write_manifest
from neuclip_ds.data.dataset import Batch, PairDataset
from neuclip_ds.data.decoders import DecodeError
from neuclip_ds.data.images import DECODERS, EvalTransform, RandomCrop
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import load_manifest
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError


@pytest.mark.parametrize("number", [80, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_inputs_are_read_refused_or_bad_samples_and_touch_no_other_file(tmp_path: Path, number: int) -> None:
    default = 15 if number == 80 else random.randrange(10**9)
    seed = int(os.environ.get("FUZZ_SEED", default))
    print(f"FUZZ_SEED={seed}")
    (tmp_path / "canary").write_text("untouched")
    process = fork(report, str(tmp_path), seed, number, variables=environment())
    try:
        process.join(3600)
        assert process.exitcode == 0, f"input {sorted((tmp_path / 'in').iterdir())} ended the process"
    finally:
        kill(process)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    print(outcome)
    assert not outcome["failures"]
    assert {path.name for path in tmp_path.iterdir()} == {"canary", "in", "outcome.json", "stderr"}
    assert (tmp_path / "canary").read_text() == "untouched"
    assert sum(outcome["counts"].values()) == number
    assert min(outcome["counts"][result] for result in ("read", "refused", "bad")) > number / 50


SOURCES = ("txt", "txt:lines", "json:caption")
NAMES = ("../../out.jpg", "/etc/passwd", "/tmp/canary.txt", "..", ".", "a/../../b.png", "x" * 200 + ".jpg", "a\nb.jpg")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes after one to four mutations: flips, cuts, overwritten blocks, insertions or extreme numbers."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(changed) + 1), rng.choice((1, 8, 100, 512, 3000))
        kind = rng.randrange(7)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at : at + size] = rng.randbytes(size)
        elif kind == 3:
            start = rng.randrange(len(data) + 1)
            changed[at:at] = data[start : start + size]
        elif kind == 4:
            del changed[at : at + size]
        elif kind == 5:
            changed[at : at + size] = bytes([rng.choice((0, 255))]) * size
        else:
            number = rng.choice((0, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 10**12))
            changed[at : at + 8] = number.to_bytes(8, rng.choice(("big", "little")))
    return bytes(changed)


def images(rng: random.Random) -> bytes:
    """Return an image file of a random format, mode and size."""
    picture = Image.open(io.BytesIO(jpeg(rng.randrange(20), rng.randint(1, 90), rng.randint(1, 60))))
    kind = rng.choice(("JPEG", "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "EPS", "PPM"))
    out = io.BytesIO()
    if kind == "PNG" and rng.random() < 0.3:
        Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257).save(out, kind)
    else:
        picture.convert(rng.choice(("RGB", "L"))).save(out, kind)
    return out.getvalue()


def header_fields(shard: bytes, rng: random.Random) -> bytes:
    """Give some members a hostile name, size or type, with valid header checksums."""
    changed = bytearray(shard)
    for _ in range(rng.randint(1, 5)):
        at = 512 * rng.randrange(max(1, len(changed) // 512))
        block = changed[at : at + 512]
        if len(block) < 512:
            continue
        field = rng.randrange(3)
        if field == 0:
            block[0:100] = rng.choice(NAMES).encode()[:100].ljust(100, b"\0")
        elif field == 1:
            block[124:136] = rng.choice((b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"00000001000\0"))
        else:
            block[156:157] = rng.choice(b"0123456789LKxgSV\0").to_bytes(1, "big")
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        changed[at : at + 512] = block
    return bytes(changed)


def shard(folder: Path, rng: random.Random) -> bytes:
    """Return a shard of a few samples, in which about a third of the members are mutated."""
    members: list[tuple[str, bytes]] = []
    for number in range(rng.randint(1, 4)):
        parts = {"jpg": images(rng), "txt": b"a caption", "json": b'{"caption": ["a", "b \\ud800"], "n": 1}'}
        members += [
            (f"{number:03d}.{extension}", mutated(data, rng) if rng.random() < 0.3 else data)
            for extension, data in parts.items()
        ]
    formats = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    if rng.random() < 0.3:
        members.append((rng.choice(NAMES), b"hostile"))
        formats = formats[1:]
    return write_tar(folder / "whole.tar", members, rng.choice(formats)).read_bytes()


def read_all(manifest: Manifest, rng: random.Random) -> Batch:
    transform = rng.choice((EvalTransform(16), RandomCrop(16, 0.9, DECODERS[rng.choice(list(DECODERS))])))
    dataset = PairDataset(manifest, transform, tokenize, captions=SOURCES)
    return dataset.batch([(0, row) for row in range(min(manifest.n, 50))])


def a_shard(folder: Path, rng: random.Random) -> bool:
    """Build a manifest of a mutated shard, as a run does, and read every sample."""
    data = shard(folder, rng)
    change = rng.choice((mutated, header_fields, lambda data, rng: mutated(header_fields(data, rng), rng)))
    (folder / "0.tar").write_bytes(change(data, rng))
    return bool(read_all(build_manifest([str(folder / "0.tar")], 1, options=ScanOptions(captions=SOURCES)), rng).bad)


def a_changed_shard(folder: Path, rng: random.Random) -> bool:
    """Read a shard that was mutated after its manifest was built: samples reported as valid must be unchanged."""
    path = folder / "0.tar"
    path.write_bytes(shard(folder, rng))
    manifest = write_manifest(
        folder / "m", [str(path)], ThreadPoolExecutor(1), ScanOptions(captions=SOURCES, checksum=True)
    )
    before = read_all(manifest, random.Random(0))
    size = path.stat().st_size
    path.write_bytes(mutated(path.read_bytes(), rng)[:size].ljust(size, b"\0"))
    after = read_all(load_manifest(folder / "m"), random.Random(0))
    assert not (after.valid & ~before.valid).any(), "a bad sample became good"
    assert (after.image[after.valid] == before.image[after.valid]).all(), "changed pixels count as good"
    assert (after.tokens[after.valid] == before.tokens[after.valid]).all(), "a changed caption counts as good"
    return bool(after.bad)


def a_manifest(folder: Path, rng: random.Random) -> bool:
    """Load a manifest after one of its files was mutated, and read every sample."""
    (folder / "0.tar").write_bytes(shard(folder, rng))
    write_manifest(
        folder / "m", [str(folder / "0.tar")], ThreadPoolExecutor(1), ScanOptions(captions=SOURCES, checksum=True)
    )
    path = rng.choice([path for path in sorted((folder / "m").rglob("*")) if path.is_file()])
    path.write_bytes(mutated(path.read_bytes(), rng))
    return bool(read_all(load_manifest(folder / "m"), rng).bad)


def an_image(folder: Path, rng: random.Random) -> bool:
    """Decode a mutated image with all decoders, which must agree on whether it is valid and on its full size."""
    data = mutated(images(rng), rng)
    found: dict[str, tuple[int, int] | None] = {}
    for name in DECODERS:
        try:
            found[name] = DECODERS[name](data, rng.choice((None, 20))).full_size
        except DecodeError:
            found[name] = None
    assert len(set(found.values())) == 1, f"decoders disagree: {found}"
    return found["pil"] is None


def a_list(folder: Path, rng: random.Random) -> bool:
    """Resolve a mutated list of shards with relative names, because searching a folder such as / could take long."""
    os.chdir(folder)
    for number in range(3):
        Path(f"{number}.tar").touch()
    Path("list.txt").write_bytes(mutated(b"{0..2}.tar\n*.tar\n1.tar::2.tar\n# comment\n[01].tar\n", rng))
    resolve_shards("list.txt")
    return False


KINDS: dict[str, Callable[[Path, random.Random], bool]] = {
    work.__name__: work for work in (a_shard, a_changed_shard, a_manifest, an_image, a_list)
}


_READABLE = (sys.prefix, sys.base_prefix, Path(__file__).parents[2], "/proc", "/usr/share/zoneinfo", "/dev/null")
_DIR_FD = {"os.remove": 1, "os.mkdir": 2, "os.rmdir": 1}  # position of the folder descriptor in the arguments


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Record writes outside a folder, reads outside the folder and `_READABLE`, and programs that are started."""
    found: list[str] = []
    active = [True]
    readable = tuple(os.path.realpath(path) for path in _READABLE)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if not active[0]:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            found.append(f"{event} {arguments}")
        elif event in ("open", "os.rename", *_DIR_FD) and isinstance(arguments[0], str | bytes | os.PathLike):
            base = arguments[_DIR_FD[event]] if event in _DIR_FD else -1
            start = Path(f"/proc/self/fd/{base}") if base >= 0 else Path()
            place = os.path.realpath(start / os.fsdecode(arguments[0]))
            only_read = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not place.startswith(f"{folder}/") and not (only_read and place.startswith(readable)):
                found.append(f"{event} {place}")

    sys.addaudithook(note)  # stays for the rest of this process
    try:
        yield found
    finally:
        active[0] = False


def report(folder: str, seed: int, number: int) -> None:
    """Try `number` inputs, generated from the seeds `seed`, `seed + 1`, ..., and write outcome.json."""
    root, kinds = Path(folder).resolve() / "in", list(KINDS.values())
    root.mkdir()
    tempfile.tempdir = str(root)  # sample tables are written there
    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), 2)  # libjpeg writes to standard error
    counts: Counter[str] = Counter()
    slowest, failures = 0.0, list[str]()
    with watched(root) as outside:
        Path("/etc/hosts").open().close()
        assert outside.pop() == "open /etc/hosts", "the watch sees nothing"
        for one in range(seed, seed + number):
            work, place = kinds[one % len(kinds)], root / str(one)
            place.mkdir()
            began = time.process_time()
            result = tried(work, place, one)
            took = time.process_time() - began
            slowest = max(slowest, took)
            counts[result.split(":")[0]] += 1
            if result.startswith("crash") or took > 1:
                failures.append(f"{work.__name__} {one}: {result} in {took:.2f} s")
            failures += [f"{work.__name__} {one}: {access}" for access in outside]
            outside.clear()
            shutil.rmtree(place, ignore_errors=True)
    outcome = {"counts": counts, "slowest": slowest, "failures": failures}
    Path(folder, "outcome.json").write_text(json.dumps(outcome))


def tried(work: Callable[[Path, random.Random], bool], place: Path, seed: int) -> str:
    """Return `read`, `bad`, `refused` (a one-line `UserError`) or `crash: ...` for an input."""
    try:
        return "bad" if work(place, random.Random(seed)) else "read"
    except UserError as error:
        return "refused" if "\n" not in str(error) else f"crash: {error!r}"
    except BaseException as error:
        return f"crash: {error!r} at {traceback.extract_tb(error.__traceback__)[-1]}"
