"""The looks at a node: what each check says of a bad machine, which the tests pretend to have."""

from __future__ import annotations

import errno
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from small_runs import demo_shards

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.checks import (
    devices,
    disks,
    matmul,
    operations,
    shards,
    shared_memory,
    versions,
)
from neuclip_ds.doctor.checks.devices import Gpu
from neuclip_ds.doctor.finding import Finding
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.table import CHECKS
from neuclip_ds.doctor.worker import findings_of
from neuclip_ds.engine.ops import Ops
from neuclip_ds.recipe import parse

CHECK = {check.name: check for check in CHECKS}


def found(check: str, *options: str, **asked: str) -> list[Finding]:
    request = Request(parse(["demo", *options]).config, Path("doctor"), [], **asked)
    return findings_of(CHECK[check], request, Communicator())


def problems(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(one.level, one.message, one.fix) for one in found if one.level != "fine"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """Two good ones, which the test may change."""
    there = [Gpu("NVIDIA H100 80GB HBM3", "570.1", 81920, 4, 0)] * 2
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(devices, "list_gpus", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    return there


def test_good_gpus(gpus: list[Gpu]) -> None:
    (good,) = found("devices")
    assert good.facts == {"GPUs": "2 x NVIDIA H100 80GB HBM3, 80 GiB", "driver": "570.1"}


def test_bad_gpus(gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus[0] = gpus[0]._replace(errors=3)
    gpus[1] = gpus[1]._replace(used=30_000)
    broken, busy = problems(found("devices"))
    assert broken[0] == "wrong" and "GPU 0" in broken[1] and "3 uncorrected" in broken[1]
    assert busy[0] == "warning" and "29.3 of 80 GiB in use" in busy[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (unusable,) = problems(found("devices"))
    assert unusable[0] == "wrong" and "driver 570.1" in unusable[1]


@pytest.mark.parametrize(("ranks", "level"), [("4", "wrong"), ("1", "warning")])
def test_other_ranks_than_gpus(gpus: list[Gpu], ranks: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    (one,) = problems(found("devices"))
    assert one[0] == level


def test_a_cpu_and_gpus_that_are_hidden(gpus: list[Gpu]) -> None:
    (hidden,) = found("devices", accelerator="cpu")
    assert "2 GPUs hidden" in hidden.facts["devices"]
    gpus.clear()
    (without,) = found("devices")
    assert without.facts["devices"].endswith("no GPU")


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho No devices were found >&2\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (failed,) = problems(found("devices"))
    assert failed[0] == "wrong" and "No devices were found" in failed[1] and "driver" in failed[2]


def test_what_nvidia_smi_prints_is_read() -> None:
    assert devices.parse("NVIDIA A100-SXM4-40GB, 535.9, 40960, 11, [N/A]") == Gpu(
        "NVIDIA A100-SXM4-40GB", "535.9", 40960, 11, 0
    )


def test_another_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(found("versions")) == []
    monkeypatch.setattr("neuclip_ds.engine.config.version", lambda package: "0.1.0")
    (one,) = problems(found("versions"))
    assert one[0] == "wrong" and "Installed DeepSpeed: 0.1.0" in one[1]
    assert versions._version("no_such_package") == "not installed"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations.shutil, "which", lambda name, path=None: None)
    (one,) = problems(found("DeepSpeed ops"))
    assert one[0] == "warning" and "c++" in one[1] and "g++" in one[2]
    described = operations.describe(Ops(["cpu_adam"], ["fused_adam", "utils"], ["sparse_attn"]))
    assert described == "1 built (cpu_adam), 2 to be built when used (fused_adam, utils)"


def test_tf32_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(found("precision")) == []
    for value, level in (("1", "wrong"), ("0", "warning")):
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
        (one,) = problems(found("precision"))
        assert one[0] == level and "unset NVIDIA_TF32_OVERRIDE" in one[2]
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    with matmul.tf32():
        (one,) = problems(found("precision"))
    assert one[0] == "wrong"


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 64 << 20)
    options = ["--data.batch_size=4096", "--data.workers=8", "--model.vision.image_size=224"]
    (one,) = problems(found("shared memory", *options))
    assert one[0] == "wrong" and "0.07 GB free" in one[1] and "--shm-size=" in one[2]
    assert problems(found("shared memory", "--data.workers=0")) == []


def test_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        (one,) = problems(found("open files"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert one[0] == "wrong" and "may open 300 files" in one[1] and "ulimit -n 65536" in one[2]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    options = [f"--run.folder={tmp_path}/runs", f"--data.cache_dir={tmp_path}/cache", "--data.cache_gb=2"]
    run, cache = problems(found("disk space", *options))
    assert run[0] == "wrong" and f"{tmp_path}/runs (run folder) has 0.0 GB free, 3 checkpoints take" in run[1]
    assert cache[0] == "warning" and "data.cache_gb take 2.00 GB" in cache[1] and "data.cache_dir" in cache[2]


def test_disks_that_are_slow_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disks.written_per_second(tmp_path, 1 << 20) > 0 and list(tmp_path.iterdir()) == []
    options = [f"--run.folder={tmp_path}/runs", f"--data.cache_dir={tmp_path}"]
    monkeypatch.setattr(disks, "written_per_second", lambda folder: 1e6)
    run, cache = problems(found("disk speed", *options))
    assert run[0] == cache[0] == "warning" and "written at 1 MB/s, 3 checkpoints in" in run[1]

    def full(folder: Path) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disks, "written_per_second", full)
    assert [one[0] for one in problems(found("disk speed", *options))] == ["wrong", "wrong"]


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("shards") == []
    folder = str(demo_shards(tmp_path / "data", 40))
    (good, *_) = found("shards", shards=folder)
    assert good.figures["shards, MB/s"] > 0 and good.figures["shards, pairs/s"] > 0
    monkeypatch.setattr(shards, "read_per_second", lambda paths: 1e4)
    (slow,) = problems(found("shards", shards=folder))
    assert slow[0] == "warning" and "pairs/s" in slow[1] and "data.cache_dir" in slow[2]
    (missing,) = problems(found("shards", shards=f"{tmp_path}/nothing"))
    assert missing[0] == "wrong" and "nothing" in missing[1]
    assert shards.fetched_per_second([f"file://{folder}/00000.tar"]) > 0
