"""Features on disk, in one part for each shard, by the number of the shard in the manifest.

    OUT/embedding.json                  what made them: model, data, options
    OUT/part-00000012.parquet           format parquet: index, key, uid, image, text, similarity
    OUT/metadata/00000012.parquet       format npy: index, key, uid, similarity
    OUT/image/00000012.npy, text/...    (n, d), in the rows of the metadata

`image` and `text` are L2-normalised, `similarity` is their cosine. A part appears when it is complete.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.errors import UserError

IMAGE, TEXT = "image", "text"
SIMILARITY = "similarity"
IDENTITY = "embedding.json"
_METADATA = "metadata"
_NUMBER = re.compile(r"(?:part-)?(\d{8})\.parquet")


class Part(NamedTuple):
    """The n usable samples of a shard."""

    index: Sequence[int]  # type: ignore[assignment]  # global indices
    key: Sequence[str]
    uid: Sequence[str | None]
    features: Mapping[str, NDArray[np.floating]]  # (n, d) by kind, `image` or `text`
    similarity: NDArray[np.float32] | None = None  # (n,), where both kinds are there


class Parts:
    """The parts in a folder.

    Args:
        folder: the folder, which `create` has made.

    Raises:
        UserError: it holds no features.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.identity: dict[str, Any] = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder} holds no features ({IDENTITY} cannot be read: {error}); write some with neuclip-ds embed."
            ) from error
        self._is_npy = self.identity["format"] == "npy"

    @classmethod
    def create(cls, folder: Path, identity: Mapping[str, Any], manifest: Manifest) -> "Parts":
        """Open a folder for writing, with the parts that it has.

        Raises:
            UserError: its features are of another model, of other options or of other data. The data may have grown.
        """
        written = {**identity, "shards": manifest.n_shards, "data": manifest.content_hash}
        if (folder / IDENTITY).is_file():
            found = cls(folder).identity
            known = {**written, "shards": found["shards"], "data": manifest.hash_of_first(found["shards"])}
            differing = [name for name in known if found.get(name) != known[name]]
            if differing:
                name = differing[0]
                raise UserError(
                    f"{folder} has features with {name}={found.get(name)}, not {known[name]}: choose another --out, or "
                    "delete it."
                )
        for place in (_METADATA, *identity["features"]) if identity["format"] == "npy" else ("",):
            (folder / place).mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / IDENTITY) as temporary:
            temporary.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        return cls(folder)

    @property
    def kinds(self) -> list[str]:
        """What was encoded: `image`, `text` or both."""
        return list(self.identity["features"])

    @cached_property
    def numbers(self) -> list[int]:
        """The numbers of the parts that were complete at the first use, in ascending order."""
        found = (_NUMBER.fullmatch(path.name) for path in self._table(0).parent.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def write(self, number: int, part: Part) -> None:
        """Write a part, which replaces one of that number."""
        dtype = np.dtype(self.identity["dtype"])
        features = {kind: rows.astype(dtype, copy=False) for kind, rows in part.features.items()}
        columns: dict[str, pa.Array] = {
            "index": pa.array(part.index, pa.int64()),
            "key": pa.array(part.key, pa.string()),
            "uid": pa.array(part.uid, pa.string()),
        }
        for kind, rows in features.items():
            if self._is_npy:
                with atomic_write(self._array(number, kind)) as temporary, temporary.open("wb") as file:
                    np.save(file, rows)
            else:
                columns[kind] = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        if part.similarity is not None:
            columns[SIMILARITY] = pa.array(part.similarity, pa.float32())
        with atomic_write(self._table(number)) as temporary:  # last: it says that the part is complete
            pq.write_table(pa.table(columns), temporary, compression="zstd", use_dictionary=False)

    @property
    def tables(self) -> list[Path]:
        """The parquet files with index, key, uid and, if it is there, similarity."""
        return [self._table(number) for number in self.numbers]

    def rows(self, number: int) -> int:
        """Return the number of samples of a part."""
        return int(pq.read_metadata(self._table(number)).num_rows)

    def table(self, number: int) -> pa.Table:
        """Return index, key, uid and, if it is there, similarity of a part."""
        file = pq.ParquetFile(self._table(number))
        return file.read([name for name in file.schema_arrow.names if name not in (IMAGE, TEXT)])

    def features(self, number: int, kind: str) -> NDArray[np.floating]:
        """Return (n, d) features of a part, `image` or `text`."""
        if self._is_npy:
            return np.load(self._array(number, kind), mmap_mode="r")
        column = pq.read_table(self._table(number), columns=[kind]).column(kind).combine_chunks()
        return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), column.type.list_size)

    def _table(self, number: int) -> Path:
        return self.folder / (f"{_METADATA}/{number:08d}.parquet" if self._is_npy else f"part-{number:08d}.parquet")

    def _array(self, number: int, kind: str) -> Path:
        return self.folder / kind / f"{number:08d}.npy"
