"""Tables of pairs score as the same pairs in CLIP_benchmark's layout do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluation_sets import Model, captioned_set, image_of, tokenize, transform, words_of

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.caption_retrieval import caption_retrieval
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.pair_file import PairFile
from neuclip_ds.evaluation.sets import open_captioned


def write_tables(folder: Path) -> list[Path]:
    """Shards with several captions an image, and the same as a table of paths and as one that holds the images."""
    images, captions, image_of_text = captioned_set(folder / "shards", [2, 1, 3, 1, 2, 1, 1], noise=2)
    order = [image for shard in range(2) for image in range(7)[shard::2]]
    rows = {"filepath": [f"{image}.png" for image in image_of_text.tolist()], "title": list(map(words_of, captions))}
    for number, image in enumerate(images):
        (folder / f"{number}.png").write_bytes(image_of(image))
    pandas.DataFrame(rows).to_csv(folder / "pairs.csv", index=False)
    texts = [[text for text, of in zip(rows["title"], image_of_text.tolist(), strict=True) if of == n] for n in order]
    held = {"image": [{"bytes": image_of(images[n]), "path": None} for n in order], "caption": texts}
    pq.write_table(pa.table(held), folder / "pairs.parquet")
    return [folder / "shards", folder / "pairs.csv", folder / "pairs.parquet"]


def test_scores_equal_those_of_the_same_pairs_in_shards(tmp_path: Path, run_ranks: Any) -> None:
    def score(path: Path, world_size: int) -> dict[str, float]:
        captioned = open_captioned(path)
        return run_ranks(
            world_size, lambda rank: caption_retrieval(BatchEncoder(Model(), tokenize, rank, 2), captioned, transform)
        )[0]

    shards, *tables = write_tables(tmp_path)
    expected = score(shards, 1)
    assert 0 < expected["mean_recall@1"] < 1
    assert [score(table, ranks) for table in tables for ranks in (1, 2)] == [expected] * 4


def test_rows_of_an_image_are_its_captions(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('file_name,text\nx.jpg,one\ny.jpg,two\nx.jpg,"three\nlines"\n')
    samples = list(PairFile.read(tmp_path / "a.csv").samples())
    assert [sample.text("txt") for sample in samples] == ["one\nthree lines", "two"]
    with pytest.raises(UserError, match=r"a\.csv: x\.jpg cannot be read"):
        samples[0].image()


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("where,what\n1,2\n")
    with pytest.raises(UserError, match=r"a\.csv has no column of images .*, but where, what: rename one of them"):
        PairFile.read(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("image,caption\nx.jpg,one\n ,two\n")
    with pytest.raises(UserError, match=r"b\.csv: row 1 has no image in the column image"):
        list(PairFile.read(tmp_path / "b.csv").samples())
    (tmp_path / "a" / "x").mkdir(parents=True)
    for name in ("x/1.jpg", "y/2.jpg"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(b"")
    with pytest.raises(UserError, match="a classification set, not a retrieval set"):
        open_captioned(tmp_path / "a")
    with pytest.raises(UserError, match="does not exist; name an evaluation set"):
        open_captioned(tmp_path / "nothing")
