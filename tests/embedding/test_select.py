"""Check which uids a rule keeps, and that the files have the format that the data engine and DataComp read."""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from embedded_shards import uid

from neuclip_ds.data.uids import UID, UidFiles, parse_uid
from neuclip_ds.embedding import near_duplicates
from neuclip_ds.embedding.near_duplicates import drop_near_duplicates
from neuclip_ds.embedding.select import Rule, Selection, select
from neuclip_ds.errors import UserError

SCORES = [0.5, None, 0.1, 0.9, float("nan"), 0.9, 0.3, 0.7]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Write metadata to two files; sample 7 has no uid, and sample 5 has the uid of sample 3."""
    uids = [uid(n) for n in (0, 1, 2, 3, 4, 3, 6)] + [None]
    table = pa.table({"uid": uids, "score": SCORES, "words": ["a"] * 8})
    (tmp_path / "pool" / "deep").mkdir(parents=True)
    pq.write_table(table[:3], tmp_path / "pool" / "a.parquet")
    pq.write_table(table[3:], tmp_path / "pool" / "deep" / "b.parquet")
    return tmp_path / "pool"


def listed(path: Path) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in np.load(path).tolist()]


def words(*numbers: int) -> list[tuple[int, int]]:
    return sorted(found for n in numbers if (found := parse_uid(uid(n))) is not None)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Rule(minimum=0.5), (0, 3)),
        (Rule(maximum=0.3), (2, 6)),
        (Rule(0.2, 0.5), (0, 6)),
        (Rule(top=0.5), (3,)),  # 0.9, 0.9 and 0.7; the sample with 0.7 has no uid
        (Rule(top=1 / 6), (3,)),  # one of two equal values
        (Rule(top=1.0), (0, 2, 3, 6)),
        (Rule(minimum=0.2, top=1.0), (0, 3, 6)),
    ],
)
def test_rules(tmp_path: Path, pool: Path, rule: Rule, kept: tuple[int, ...]) -> None:
    found = select([pool], "score", rule, tmp_path / "kept.npy")
    assert listed(tmp_path / "kept.npy") == words(*kept)
    assert found.kept == len(kept) and (found.samples, found.without_value) == (8, 2)
    UidFiles([tmp_path / "kept.npy"]).check_order()
    assert np.load(tmp_path / "kept.npy").dtype == np.dtype("u8,u8")
    if rule == Rule(top=0.5):
        assert found == Selection(kept=1, samples=8, without_value=2, without_uid=1, minimum=0.7)


def test_within_other_lists(tmp_path: Path, pool: Path) -> None:
    np.save(tmp_path / "list.npy", np.array(words(0, 1, 6), dtype=UID))
    np.save(tmp_path / "other.npy", np.array(words(0, 3), dtype=UID))
    select([pool], "score", Rule(minimum=0.0), tmp_path / "kept.npy", within=[tmp_path / "list.npy"])
    assert listed(tmp_path / "kept.npy") == words(0, 6)
    both = [tmp_path / "list.npy", tmp_path / "other.npy"]
    select([pool], "score", Rule(minimum=0.0), tmp_path / "kept.npy", within=both)
    assert listed(tmp_path / "kept.npy") == words(0)


@pytest.mark.parametrize(
    ("column", "rule", "uid_column", "message"),
    [
        ("similarity", Rule(), "uid", "has no column similarity: choose --column from uid, score, words"),
        ("words", Rule(minimum=0.0), "uid", "choose another --column"),
        ("score", Rule(minimum=2.0), "uid", "None of 8 samples is kept"),
        ("score", Rule(minimum=0.0), "words", "has a uid of 32 hex digits: name the column"),
    ],
)
def test_mistakes(tmp_path: Path, pool: Path, column: str, rule: Rule, uid_column: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        select([pool], column, rule, tmp_path / "kept.npy", uid_column)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_of_near_duplicates_the_best_stays(tmp_path: Path, monkeypatch, dtype: str) -> None:
    """Blocks of 16 rows give the same result as a loop over all pairs; the images form noisy clusters."""
    monkeypatch.setattr(near_duplicates, "_ROWS", 16)
    random, n = np.random.default_rng(0), 120
    image = random.normal(size=(n // 3, 8))[random.integers(0, n // 3, n)] + 0.1 * random.normal(size=(n, 8))
    image = (image / np.linalg.norm(image, axis=1, keepdims=True)).astype(dtype)
    scores = random.uniform(0, 1, n)
    names = [uid(number) for number in range(n)]
    names[7], names[50] = "none", names[51]
    out = tmp_path / "out"
    out.mkdir()
    (out / "embedding.json").write_text("{}")
    for part, rows in enumerate(np.array_split(np.arange(n), 3)):
        columns = {"uid": pa.array([names[row] for row in rows]), "similarity": pa.array(scores[rows])}
        columns["image"] = pa.FixedSizeListArray.from_arrays(pa.array(image[rows].reshape(-1)), 8)
        pq.write_table(pa.table(columns), out / f"part-{part:08d}.parquet")
    best = 50 if scores[50] > scores[51] else 51
    cosines, kept = image.astype(np.float32) @ image.astype(np.float32).T, list[int]()
    for row in sorted(set(range(n)) - {7, 101 - best}, key=lambda row: -scores[row]):
        if scores[row] >= 0.2 and not any(cosines[row, other] >= 0.95 for other in kept):
            kept.append(row)
    found = select(
        [out],
        "similarity",
        Rule(minimum=0.2),
        tmp_path / "kept.npy",
        refine=partial(drop_near_duplicates, [out], "similarity", 0.95),
    )
    assert listed(tmp_path / "kept.npy") == sorted(parse_uid(names[row]) for row in kept)
    assert found.kept == len(kept) < 60 and found.refined > 20
    with pytest.raises(UserError, match="lacks features"):
        drop_near_duplicates([tmp_path], "similarity", 0.95, np.load(tmp_path / "kept.npy"))
