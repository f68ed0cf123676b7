"""Check which uids a rule keeps, and that the files have the format that the data engine and DataComp read."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from embedded_shards import uid

from neuclip_ds.data.feature_parts import FeaturePart, write_part
from neuclip_ds.data.uids import UID, UidFiles, parse_uid
from neuclip_ds.embedding.near_duplicates import drop_near_duplicates
from neuclip_ds.embedding.select import Rule, Selection, select
from neuclip_ds.errors import UserError

SCORES = [0.5, None, 0.1, 0.9, float("nan"), 0.9, 0.3, 0.7]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write metadata to two files; sample 7 has no uid, and sample 5 has the uid of sample 3."""
    folder = tmp_path_factory.mktemp("pool")
    uids = [uid(index) for index in (0, 1, 2, 3, 4, 3, 6)] + [None]
    table = pa.table({"uid": uids, "score": SCORES, "words": ["a"] * 8})
    (folder / "deep").mkdir()
    pq.write_table(table[:3], folder / "a.parquet")
    pq.write_table(table[3:], folder / "deep" / "b.parquet")
    return folder


def read_uids(path: Path) -> list[tuple[int, int]]:
    return [tuple(words) for words in np.load(path).tolist()]


def uids_of(*indices: int) -> list[tuple[int, int]]:
    """Return the uids of samples as a file lists them."""
    uids = []
    for index in indices:
        words = parse_uid(uid(index))
        assert words is not None
        uids.append(words)
    return sorted(uids)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Rule(minimum=0.5), (0, 3)),
        (Rule(maximum=0.3), (2, 6)),
        (Rule(minimum=0.2, maximum=0.5), (0, 6)),
        (Rule(top=0.5), (3,)),  # 0.9, 0.9 and 0.7; the sample with 0.7 has no uid
        (Rule(top=1 / 6), (3,)),  # one of two equal values
        (Rule(top=1.0), (0, 2, 3, 6)),
        (Rule(minimum=0.2, top=1.0), (0, 3, 6)),
    ],
)
def test_a_rule_keeps_the_uids_of_the_values_in_its_bounds(
    tmp_path: Path, pool: Path, rule: Rule, kept: tuple[int, ...]
) -> None:
    selection = select([pool], "score", rule, tmp_path / "kept.npy")
    assert read_uids(tmp_path / "kept.npy") == uids_of(*kept)
    assert selection.kept == len(kept)
    assert selection.samples == 8
    assert selection.without_value == 2
    UidFiles([tmp_path / "kept.npy"]).check_order()
    assert np.load(tmp_path / "kept.npy").dtype == np.dtype("u8,u8")
    if rule == Rule(top=0.5):
        assert selection == Selection(kept=1, samples=8, without_value=2, without_uid=1, minimum=0.7)


def test_a_list_that_cannot_be_written_names_the_fix(tmp_path: Path, pool: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written .*, or choose another --out\.$"):
        select([pool], "score", Rule(minimum=0.1), tmp_path / "file/kept.npy")


def test_only_uids_in_every_other_list_are_kept(tmp_path: Path, pool: Path) -> None:
    lists = [tmp_path / "first.npy", tmp_path / "second.npy"]
    np.save(lists[0], np.array(uids_of(0, 1, 6), dtype=UID))
    np.save(lists[1], np.array(uids_of(0, 3), dtype=UID))
    select([pool], "score", Rule(minimum=0.0), tmp_path / "kept.npy", within=lists[:1])
    assert read_uids(tmp_path / "kept.npy") == uids_of(0, 6)
    select([pool], "score", Rule(minimum=0.0), tmp_path / "kept.npy", within=lists)
    assert read_uids(tmp_path / "kept.npy") == uids_of(0)
    # sample 7 has no uid, but that is not why none is kept
    with pytest.raises(UserError, match=r"None of the 8 samples is kept .* the files in --within contain uids"):
        select([pool], "score", Rule(minimum=0.6), tmp_path / "kept.npy", within=lists[:1])
    np.save(lists[1], np.array(uids_of(0, 3)[::-1], dtype=UID))
    with pytest.raises(UserError, match=r"second\.npy is not sorted"):
        select([pool], "score", Rule(minimum=0.0), tmp_path / "kept.npy", within=lists)


@pytest.mark.parametrize(
    ("column", "rule", "uid_column", "message"),
    [
        ("similarity", Rule(), "uid", "has no column similarity: choose --column from uid, score, words"),
        ("words", Rule(minimum=0.0), "uid", "choose another --column"),
        ("score", Rule(minimum=2.0), "uid", "None of the 8 samples is kept"),
        ("score", Rule(minimum=0.0), "words", "has a uid of 32 hex digits: pass the column of uids"),
    ],
)
def test_a_wrong_column_or_an_empty_selection_is_an_error(
    tmp_path: Path, pool: Path, column: str, rule: Rule, uid_column: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        select([pool], column, rule, tmp_path / "kept.npy", uid_column)


@pytest.mark.parametrize("values", [[b"\xff" * 16], [["0"]], [{"high": 1}]])
def test_uids_that_are_not_texts_are_an_error(tmp_path: Path, values: list[object]) -> None:
    pq.write_table(pa.table({"uid": values, "score": [1.0]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"column uid does not contain texts .*choose another --uid-column"):
        select([tmp_path], "score", Rule(minimum=0), tmp_path / "kept.npy")
    with pytest.raises(UserError, match="column uid is not numeric"):
        select([tmp_path], "uid", Rule(minimum=0), tmp_path / "kept.npy", "score")


@pytest.mark.parametrize("content", [b"uid,score\n", b"", b"<html>", b"PAR1"])
@pytest.mark.parametrize("name", ["a.csv", "0.parquet", "z.parquet"])
def test_a_file_that_is_not_parquet_is_named(tmp_path: Path, pool: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} cannot be read"):
        select([tmp_path / name, pool], "score", Rule(minimum=0.0), tmp_path / "kept.npy")
    with pytest.raises(UserError, match=rf"cannot be read.*{name}"):
        select([pool, tmp_path / name], "score", Rule(minimum=0.0), tmp_path / "kept.npy")


def test_unfinished_features_are_refused(tmp_path: Path) -> None:
    """Features are complete if every shard has a part, or once embed has listed the parts' sizes at its end."""
    folder = tmp_path / "pool/features"
    folder.mkdir(parents=True)
    embedding: dict[str, Any] = {"shards": 3}
    description = folder / "embedding.json"

    def selected(source: Path) -> int:
        return select([source], "score", Rule(minimum=0), tmp_path / "kept.npy").samples

    def refused(words: str) -> None:
        for source in (folder, folder.parent):
            with pytest.raises(UserError, match=words):
                selected(source)

    description.write_text(json.dumps(embedding))
    with pytest.raises(UserError, match=r"lacks the features of 3 of 3 shards: let `neuclip-ds embed` finish first"):
        selected(folder)
    for shard in range(2):
        pq.write_table(pa.table({"score": [1.0], "uid": [uid(shard)]}), folder / f"part-{shard:08d}.parquet")
    refused(r"lacks the features of 1 of 3 shards: let `neuclip-ds embed` finish first")
    description.write_text(json.dumps({**embedding, "part_bytes": [9, 9, 9]}))
    refused(r"lacks the features of 1 of 3 shards")
    description.write_text(json.dumps({**embedding, "part_bytes": [9, 9, 0]}))  # the last shard cannot be read
    assert selected(folder) == selected(folder.parent) == 2
    description.write_text(json.dumps({"shards": 2}))
    assert selected(folder) == 2


def test_linked_folders_count_and_hidden_files_do_not(tmp_path: Path, pool: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "._a.parquet").write_bytes(b"\0\5\x16\7")
    (tmp_path / "root" / "link").symlink_to(pool)
    assert select([tmp_path / "root"], "score", Rule(minimum=0.0), tmp_path / "kept.npy").samples == 8


def noisy_clusters(count: int, dtype: str) -> np.ndarray:
    """Return (count, 8) unit vectors near a third as many centers."""
    random = np.random.default_rng(0)
    centers = random.normal(size=(count // 3, 8))
    vectors = centers[random.integers(0, count // 3, count)] + 0.1 * random.normal(size=(count, 8))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("normalized", [True, False])  # features of a single encoder are not normalized
def test_of_near_duplicates_the_best_stays(tmp_path: Path, dtype: str, normalized: bool) -> None:
    """Chunks of 16 rows give the same result as a loop over all pairs."""
    count = 120
    image = noisy_clusters(count, dtype)
    norms = np.ones(count) if normalized else 2.0 ** np.random.default_rng(2).integers(-3, 4, count)
    stored = (image * norms[:, None]).astype(dtype)
    scores = np.random.default_rng(1).uniform(0, 1, count)
    uids = [uid(index) for index in range(count)]
    uids[7] = "none"
    uids[50] = uids[51]
    features = tmp_path / "features"
    features.mkdir()
    (features / "embedding.json").write_text('{"shards": 3}')
    for part, rows in enumerate(np.array_split(np.arange(count), 3)):
        columns = {
            "uid": pa.array([uids[row] for row in rows]),
            "similarity": pa.array(scores[rows]),
        }
        write_part(features, FeaturePart(job="", shard=part, samples=len(rows), index=rows, image=stored[rows, None]))
        pq.write_table(pa.table(columns), features / f"part-{part:08d}.parquet")

    # the reference visits the rows by decreasing score
    worse_twin = 50 if scores[50] < scores[51] else 51
    cosines = image.astype(np.float32) @ image.astype(np.float32).T
    kept: list[int] = []
    for row in sorted(range(count), key=lambda row: -scores[row]):
        is_candidate = row not in (7, worse_twin) and scores[row] >= 0.2
        if is_candidate and not any(cosines[row, other] >= 0.95 for other in kept):
            kept.append(row)

    out = tmp_path / "kept.npy"
    listed = tmp_path / "listed.csv"
    refine = partial(drop_near_duplicates, [features], "similarity", 0.95, listed, chunk=16)
    selection = select([features], "similarity", Rule(minimum=0.2), out, refine=refine)
    assert read_uids(out) == sorted(parse_uid(uids[row]) for row in kept)
    assert selection.kept == len(kept) < 60
    assert selection.refined > 20
    with pytest.raises(UserError, match="needs image features"):
        drop_near_duplicates([tmp_path], "similarity", 0.95, listed, np.load(out))

    # every dropped sample is listed with a kept one that is near it: here, always the nearest
    header, *lines = listed.read_text().splitlines()
    assert header == "dropped,kept,cosine"
    assert len(lines) == selection.refined
    row_of = {text: row for row, text in enumerate(uids) if row != worse_twin}
    for line in lines:
        dropped, near, cosine = line.split(",")
        row = row_of[dropped]
        earlier = [other for other in kept if scores[other] > scores[row]]
        best = max(cosines[row, other] for other in earlier)
        assert near in {uids[other] for other in earlier}
        assert float(cosine) == pytest.approx(best, abs=1e-3) and best >= 0.95
