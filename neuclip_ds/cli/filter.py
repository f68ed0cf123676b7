"""Select samples by a numeric column and write their uids, which `build-manifest --uids` reads.

FILES are the features that `neuclip-ds embed` wrote, or other parquet files with a column of uids, such as DataComp's
metadata. In features of the joint space, the `similarity` column contains the image-caption similarity, which DFN uses
for filtering. A uid consists of 32 hex digits.

Examples:
  neuclip-ds filter features/pool --top=0.2 --out=kept.npy
  neuclip-ds filter features/pool --near-duplicates=0.95 --out=kept.npy
  neuclip-ds filter metadata/ --column=clip_l14_similarity_score --min=0.28 --within=english.npy --out=kept.npy
  neuclip-ds build-manifest manifests/kept /data/pool --uids kept.npy
"""

import math
from collections.abc import Sequence
from functools import partial

from neuclip_ds.cli.program import Parser, local_path
from neuclip_ds.errors import UserError, counted

_MANY_NEAR = 0.5  # share of near-duplicates above which a warning is printed


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds filter", description=__doc__)
    parser.add_argument("files", nargs="+", type=local_path, help="parquet files, or folders of them")
    parser.add_argument("--out", type=local_path, required=True, help=".npy file to write, with the sorted uids")
    parser.add_argument("--column", default="similarity", help="column with the numbers by which samples are selected")
    parser.add_argument("--min", type=float, help="smallest value to keep")
    parser.add_argument("--max", type=float, help="largest value to keep")
    top = "fraction of the column's values to keep, the largest ones; values outside --min and --max are counted too"
    parser.add_argument("--top", type=float, help=top)
    near = "drop samples whose image has a cosine similarity of COSINE (such as 0.95) or more to that of a kept sample"
    parser.add_argument("--near-duplicates", type=float, metavar="COSINE", help=near)
    parser.add_argument("--uid-column", default="uid", help="column of uids")
    parser.add_argument(
        "--within",
        nargs="+",
        type=local_path,
        default=[],
        help="keep only uids that are in all of these sorted .npy files",
    )
    options = parser.parse(arguments)
    rules = (options.min, options.max, options.top, options.near_duplicates)
    if all(value is None for value in rules):
        raise UserError("No rule selects samples: set --min, --max, --top or --near-duplicates.")
    if options.near_duplicates is not None and not 0 < options.near_duplicates <= 1:
        raise UserError(f"--near-duplicates={options.near_duplicates:g} must be a cosine above 0 and at most 1.")
    if options.near_duplicates is not None and options.uid_column != "uid":
        raise UserError(
            "--near-duplicates finds samples by the column uid of `neuclip-ds embed`: omit --uid-column, or omit "
            "--near-duplicates."
        )
    if options.top is not None and not 0 < options.top <= 1:
        raise UserError(f"--top={options.top:g} must be above 0 and at most 1: the fraction of values to keep.")
    from neuclip_ds.embedding.select import Rule, select  # pyarrow takes a moment to import

    refine = []
    if options.near_duplicates is not None:
        from neuclip_ds.embedding.near_duplicates import drop_near_duplicates  # torch takes seconds to import

        list_path = options.out.with_suffix(".near_duplicates.csv")
        drop = partial(drop_near_duplicates, options.files, options.column, options.near_duplicates, list_path)
        refine = [drop]
    bounds = {"minimum": options.min, "maximum": options.max, "top": options.top}
    rule = Rule(**{name: value for name, value in bounds.items() if value is not None})
    selected = select(options.files, options.column, rule, options.out, options.uid_column, options.within, *refine)
    kept = f"{counted(selected.kept, 'uid')} of {counted(selected.samples, 'sample')}"
    bound = ""
    if not math.isinf(selected.minimum):
        bound = f"; the {options.column} of every kept sample is at least {selected.minimum:.6g}"
    print(f"{options.out}: {kept}{bound}.")
    if options.near_duplicates is not None:
        candidates = selected.kept + selected.refined
        dropped = counted(selected.refined, "near-duplicate")
        print(f"Dropped {dropped} among {candidates:,} samples; {list_path} lists them.")
        if selected.refined > _MANY_NEAR * candidates:
            print(
                f"warning: {selected.refined / candidates:.0%} of the samples were dropped as near-duplicates. A model "
                "that has barely trained gives nearly all images similar features: look at some of the listed pairs, "
                "raise --near-duplicates, or embed with a better model."
            )
    if selected.without_value or selected.without_uid:
        print(f"Omitted: {selected.without_value:,} samples without a value, {selected.without_uid:,} without a uid.")
