"""Pack image-caption pairs from a table (CSV, TSV, JSON Lines or Parquet) or a folder of images into training shards.

Examples:
  neuclip-ds pack pairs.csv /data/mine
  neuclip-ds pack /data/images_and_texts /data/mine
  neuclip-ds pack '/data/tables/*.parquet' /data/mine --image jpg --captions txt=alt_text syn.txt=recaption

Each cell of the image column is a path (absolute, or relative to the folder of the table's file), a URL, or the encoded
image itself, possibly in base64. In a folder of images without a table, the caption of dog.jpg is the text in dog.txt.

Rows with the same image become one sample with several captions, one per line. If a caption column gives any sample
several captions, line breaks in all captions of this column become spaces. Rows that cannot be used are counted and
listed in broken.jsonl. Rows whose images could not be fetched because the storage failed are also written to
retry.jsonl, a table that you can later pack to another folder; if these are more than 1% of the rows, the exit code is
2. Train on the output folder, or build a manifest of it first (neuclip-ds build-manifest).
"""

import math
from collections.abc import Sequence

from neuclip_ds.cli.program import Parser, local_path, progress_bar
from neuclip_ds.errors import UserError, counted

_MAX_LOST = 0.01  # largest fraction of rows that may be lost because their storage failed


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds pack", description=__doc__)
    parser.add_argument(
        "table", help="a table (a file, a folder or a glob of files), or a folder of images with captions in .txt files"
    )
    parser.add_argument("out", type=local_path, help="folder for the shards; must be absent or empty")
    parser.add_argument("--image", help="column of images (default: image, filepath, path or a similar name)")
    captions = (
        "columns of captions, optionally with the member to write each to instead of txt (default: caption, text or a "
        "similar name)"
    )
    parser.add_argument("--captions", nargs="+", default=[], metavar="[MEMBER=]COLUMN", help=captions)
    parser.add_argument("--shard-size", type=int, default=10_000, help="samples per shard")
    quotes = (
        "whether quotes enclose cells in CSV and TSV files; auto means on, but refuses a cell that seems to contain "
        "other rows, unless the file is comma-separated and all of its quotes are valid"
    )
    parser.add_argument("--quotes", choices=("auto", "on", "off"), default="auto", help=quotes)
    options = parser.parse(arguments)
    from neuclip_ds.data.pack import RETRY, choose_columns, pack  # decoders import torch, which takes seconds
    from neuclip_ds.data.tables import open_table

    if options.shard_size < 1:
        raise UserError(f"--shard-size={options.shard_size} must be at least 1.")
    table = open_table(options.table, options.quotes)
    columns = choose_columns(table, options.image, options.captions)
    with progress_bar("rows") as on_progress:
        packed = pack(table, options.out, columns, options.shard_size, on_progress)
    shards = math.ceil(packed.pairs / options.shard_size)
    used = packed.rows - packed.causes.total()
    samples = f"{counted(packed.pairs, 'sample')} in {counted(shards, 'shard')}"
    print(f"{options.out}: packed {used:,} of {packed.rows:,} rows into {samples}.")
    if packed.causes:
        causes = ", ".join(f"{cause}: {count:,}" for cause, count in packed.causes.most_common())
        unused = counted(packed.causes.total(), "row")
        print(f"{unused} could not be used ({causes}); {options.out}/broken.jsonl has the details.")
    if packed.several:
        several = counted(packed.several, "sample has", "samples have")
        sources = ",".join(
            f"{member}:lines" if member in packed.members_of_lines else member for member in columns.captions
        )
        print(f"{several} several captions: train with --data.captions={sources}.")
    if packed.lost > _MAX_LOST * packed.rows:
        raise UserError(
            f"The storage failed for the images of {packed.lost:,} of {packed.rows:,} rows; the other usable rows are "
            f"packed. When the storage works again, pack {options.out / RETRY} to another folder, and train on both "
            "folders."
        )
