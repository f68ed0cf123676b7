"""Find the samples whose features are nearest to texts or images; prints a line for each, with its similarity.

Examples:
  neuclip-ds nearest features/cc12m --text "a red bicycle" "rain at night"
  neuclip-ds nearest features/pool --image picture.jpg --count=20 --faiss=IVF4096,PQ64
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser
from neuclip_ds.errors import UserError


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds nearest", description=__doc__)
    parser.add_argument("features", type=Path, help="folder that neuclip-ds embed has written")
    parser.add_argument("--text", nargs="+", default=[], help="texts to search for")
    parser.add_argument("--image", nargs="+", type=Path, default=[], help="image files to search for")
    parser.add_argument("--of", choices=("image", "text"), help="features to search (default: the images' if there)")
    parser.add_argument("--count", type=int, default=10, help="samples per query")
    parser.add_argument("--faiss", help="search with this index of FAISS, kept with the features (default: exact)")
    parser.add_argument("--nprobe", type=int, default=32, help="lists of an IVF index that a query visits")
    parser.add_argument("--model", help="encoder of the queries (default: the model that made the features)")
    options = parser.parse(arguments)
    if not options.text and not options.image:
        raise UserError("Nothing to search for: give --text or --image.")
    from neuclip_ds.cli.embedding_work import Search, find_nearest  # torch takes seconds to import

    for query, matches in find_nearest(Search(**vars(options))):
        print(f"{query}\nsimilarity\tindex\tkey\tuid")
        for match in matches:
            print(f"{match.similarity:.4f}\t{match.index}\t{match.key}\t{match.uid or ''}")
