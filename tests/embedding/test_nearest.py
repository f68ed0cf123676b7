"""Search in features: exact, and with indices of the real FAISS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from embedded_shards import DIM, write
from torch.nn import functional

from neuclip_ds.data.manifest import Manifest
from neuclip_ds.embedding import nearest as module
from neuclip_ds.embedding.nearest import FaissIndex, Match, nearest
from neuclip_ds.embedding.parts import Parts
from neuclip_ds.errors import UserError


@pytest.fixture
def parts(tmp_path: Path, manifest: Manifest) -> Parts:
    write(tmp_path / "out", manifest, file_format="npy")
    return Parts(tmp_path / "out")


QUERIES = functional.normalize(torch.randn(3, DIM, generator=torch.Generator().manual_seed(1)), dim=1)


def expected(parts: Parts, kind: str, count: int) -> list[list[str]]:
    features = np.concatenate([parts.features(number, kind) for number in parts.numbers])
    keys = [key for number in parts.numbers for key in parts.table(number).column("key").to_pylist()]
    order = np.argsort(-(QUERIES.numpy() @ features.T), axis=1)[:, :count]
    return [[keys[row] for row in one] for one in order]


def keys_of(found: list[list[Match]]) -> list[list[str]]:
    return [[match.key for match in one] for one in found]


@pytest.mark.parametrize("kind", ["image", "text"])
def test_exact_search_and_flat_index_agree(parts: Parts, kind: str) -> None:
    exact = nearest(parts, kind, QUERIES, 6)
    assert keys_of(exact) == expected(parts, kind, 6)
    indexed = FaissIndex(parts, kind, "Flat").nearest(QUERIES, 6)
    assert [[match[1:] for match in one] for one in indexed] == [[match[1:] for match in one] for one in exact]
    first = exact[0][0]
    assert first.key == f"k{first.index:04d}" and first.part == int(np.searchsorted([5, 12, 15], first.index, "right"))
    assert indexed[0][0].similarity == pytest.approx(first.similarity, abs=1e-5)


def test_more_are_asked_for_than_there_are(parts: Parts) -> None:
    assert len(nearest(parts, "image", QUERIES, 50)[0]) == 19
    assert len(FaissIndex(parts, "image", "Flat").nearest(QUERIES, 50)[0]) == 19


def test_an_index_is_kept_until_the_features_change(
    parts: Parts, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TRAINING_ROWS", 8)
    found = FaissIndex(parts, "image", "IVF2,Flat", nprobe=2).nearest(QUERIES, 4)
    assert keys_of(found) == expected(parts, "image", 4)
    with monkeypatch.context() as patch:
        patch.setattr(Parts, "features", None)  # nothing is read again
        assert FaissIndex(parts, "image", "IVF2,Flat", nprobe=2).nearest(QUERIES, 4) == found
    (parts.folder / "metadata" / "00000002.parquet").unlink()
    fewer = Parts(parts.folder)
    assert keys_of(FaissIndex(fewer, "image", "IVF2,Flat", nprobe=2).nearest(QUERIES, 4)) == expected(fewer, "image", 4)


def test_mistakes(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="FAISS cannot build or read the index Flatt"):
        FaissIndex(parts, "image", "Flatt")
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UserError, match=r"pip install '.\[faiss\]'"):
        FaissIndex(parts, "image", "Flat")
