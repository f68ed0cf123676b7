"""Repeat the papers' comparisons in miniature, with small towers that train on two CPU cores.

`methods`: every method with the same data, towers, budget and search, in several regimes (batch size and epochs) and
over paired seeds. Stages: `search` runs first where a later stage needs its rates; `finals` (all arms in all regimes),
`ablations` (in the first regime), `cost` (time of a step, one run at a time).

`tuneclip`: models pretrained on one part of the data are fine-tuned on another, with and without recovered statistics.

The same command resumes a study that was interrupted: OUT/results.jsonl has a line for each run that ended.

Examples:
  neuclip-ds reproduce methods demo:train --out runs/reproduction
  neuclip-ds reproduce methods demo:train --regimes 32x3 --arms openclip neuclip neuclip_queue --stages finals
  neuclip-ds reproduce methods --results docs/reference/reproduction.jsonl --out runs/report
  neuclip-ds reproduce methods ../shared/data/flickr8k/train --packaged-towers --regimes 32x3 --out runs/flickr \\
    --arms openclip "neuclip, at OpenCLIP's rate and start" "neuclip_queue, at OpenCLIP's rate and start"
  neuclip-ds reproduce tuneclip demo:train --out runs/cold_start
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser
from neuclip_ds.reproduction.study import ARMS, REGIMES

STAGES = ("finals", "ablations", "cost")


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds reproduce", description=__doc__)
    parser.add_argument("study", choices=("methods", "tuneclip"), help="which comparison")
    parser.add_argument("source", nargs="?", default="demo:train", help="folder of img2dataset shards, or demo:train")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduction"), help="folder for data, runs and report")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="of `methods`")
    regimes = [str(regime) for regime in REGIMES]
    parser.add_argument("--regimes", nargs="+", default=regimes, help="of `methods`: BATCHxEPOCHS, /10 for n/10 pairs")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="of `methods`: what the finals compare")
    parser.add_argument("--pairs", type=int, default=8000, help="training pairs n of `methods`; tuneclip takes all")
    parser.add_argument("--pretrained", type=Path, help="of `methods`: exported model that every run starts from")
    packaged = "of `methods`, for photographs: start from EfficientNet-Lite0 and MiniLM, which Python packages ship"
    parser.add_argument("--packaged-towers", action="store_true", help=packaged)
    parser.add_argument("--batch", type=int, default=64, help="of `tuneclip`: global batch B")
    parser.add_argument("--epochs", type=int, default=5, help="of fine-tuning in `tuneclip`")
    parser.add_argument("--pretraining-epochs", type=int, default=8, help="of `tuneclip`")
    parser.add_argument("--pretraining-temperature", type=float, help="of `tuneclip`: constant tau; default: learned")
    checkpoints = "of `tuneclip`: pretrained models, which the seeds share in turn; default: one for each seed"
    parser.add_argument("--checkpoints", type=int, help=checkpoints)
    parser.add_argument("--tuning-pairs", type=int, default=4000, help="of `tuneclip`: pairs to fine-tune on")
    duplicates = "of `tuneclip`, demo: share of the fine-tuning pairs that show the scene of another one, drawn anew"
    parser.add_argument("--duplicates", type=float, default=0.0, help=duplicates)
    mismatched = "of `tuneclip`: share with another pair's caption in its noisy pairs"
    parser.add_argument("--mismatched", type=float, default=0.3, help=mismatched)
    rate = "of `tuneclip`: learning rate of all variants with AdamW; default: each one's best of the search"
    parser.add_argument("--rate", type=float, help=rate)
    captions = "of `tuneclip`: captions to fine-tune on, as data.captions names them"
    parser.add_argument("--captions", nargs="+", default=["txt"], help=captions)
    parser.add_argument("--variants", nargs="+", help="of `tuneclip`: ways to fine-tune; default: all")
    results = "print the tables of a study's results.jsonl or tuneclip.jsonl instead of running it"
    parser.add_argument("--results", type=Path, help=results)
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each arm, the same for all")
    parser.add_argument("--search-seeds", type=int, default=1, help="of `methods`: seeds of each point of a search")
    after = "of the tables of `methods`: omit the seeds up to this one, such as those that suggested a claim"
    parser.add_argument("--after-seed", type=int, default=0, help=after)
    parser.add_argument("--anchors", type=int, default=1000, help="anchors for the error of the normalizer")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    options = parser.parse(arguments)
    from neuclip_ds.cli.reproduce_studies import methods  # torch and matplotlib take seconds to import
    from neuclip_ds.cli.reproduce_tuneclip import tuneclip

    {"methods": methods, "tuneclip": tuneclip}[options.study](options)
