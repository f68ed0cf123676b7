"""`neuclip-ds reproduce tuneclip`: the study of fine-tuning, from jobs to its report."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from neuclip_ds import api
from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.checkpoint.export import export_run
from neuclip_ds.cli.reproduce_studies import prepared, run
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import nearest
from neuclip_ds.reproduction import cold_start, cold_start_data, cold_start_report
from neuclip_ds.reproduction.cold_start_record import Record, read_records, record_of, write_records
from neuclip_ds.reproduction.data import shrunken
from neuclip_ds.reproduction.nearest_negatives import nearest_negatives
from neuclip_ds.reproduction.recovery_difference import recovery_difference

PRETRAINING_SHARE = 0.6  # of the shards


def tuneclip(arguments: argparse.Namespace) -> None:
    """Compare fine-tuning with and without recovered statistics, or print the tables of a study that has ended."""
    out: Path = arguments.out
    path = arguments.results or out / "tuneclip.jsonl"
    if arguments.results is None:
        write_records(path, _Study(arguments).records())
    out.mkdir(parents=True, exist_ok=True)
    print(cold_start_report.write(read_records(path), out, f"Fine-tuning with and without recovery, {path}"))
    print(f"The report is {out}/tuneclip.html (tuneclip.md and .png are next to it); its runs are in {path}.")


class _Study:
    """Runs the study and collects its records."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._variants = chosen(arguments.variants)
        self._searched = dict.fromkeys(cold_start.VARIANTS[name].searched or name for name in self._variants)
        self._rate: float | None = arguments.rate
        self._out = arguments.out.resolve()
        self._runner = prepared(arguments)
        self._plan = _plan(arguments)
        self._seeds = range(1, arguments.seeds + 1)  # 0 is the search's

    def records(self) -> list[Record]:
        models = sorted({self._plan.checkpoint(seed) for seed in (0, *self._seeds)})
        found = self._run([cold_start.pretraining(self._plan, seed) for seed in models], "pretraining")
        for seed in models:
            if not self._model(seed).is_dir():
                export_run(self._plan.runs / f"pretrain/seed{seed}", "transformers", self._model(seed))
        found += self._run(list(self._recoveries()), "recovery")
        searched, best = self._search()
        found += searched
        if self._rate is not None:
            best |= dict.fromkeys(filter(cold_start.has_adamw, best), self._rate)
        finals = [
            cold_start.final(self._plan, name, best[cold_start.VARIANTS[name].searched or name], seed)
            for seed in self._seeds
            for name in self._variants
        ]
        found += self._run(finals, "fine-tuning")
        return found + self._differences() + self._nearest()

    def _recoveries(self) -> Iterator[cold_start.Job]:
        """Yield the recoveries that the variants take over, for the search's model those of variants that search."""
        final = self._final_models()
        for model in sorted({self._plan.checkpoint(0), *final}):
            names = self._variants if model in final else self._searched
            recovered = (cold_start.VARIANTS[name].recovered for name in names)
            for name in dict.fromkeys([cold_start.NOTHING, *filter(None, recovered)]):
                yield cold_start.recovery(self._plan, name, model)

    def _final_models(self) -> list[int]:
        return sorted({self._plan.checkpoint(seed) for seed in self._seeds})

    def _model(self, seed: int) -> Path:
        return self._plan.models / f"seed{seed}"

    def _run(self, jobs: Sequence[cold_start.Job], title: str) -> list[Record]:
        results = run(self._runner, list(jobs), title)
        for job in jobs:
            if not results[job.name] and not job.name.startswith(cold_start.SEARCH):
                raise UserError(f"{job.name} diverged; see output.txt in its folder.")
        return [record_of(job, results[job.name], self._runner.curve(job.name), self._out) for job in jobs]

    def _search(self) -> tuple[list[Record], dict[str, float]]:
        """Search in rounds until no variant's best learning rate is on the edge of those tried."""
        scores: dict[str, dict[float, float]] = {name: {} for name in self._searched}
        found: list[Record] = []
        while jobs := {
            cold_start.searching(self._plan, name, rate).name: (name, rate)
            for name, known in scores.items()
            for rate in cold_start.rates_to_try(known, cold_start.VARIANTS[name].first)
        }:
            records = self._run([cold_start.searching(self._plan, *asked) for asked in jobs.values()], "search")
            for record in records:
                name, rate = jobs[record.name]
                scores[name][rate] = record.recall[-1] if record.recall else 0.0
            found += records
        return found, {name: max(known, key=lambda rate: known[rate]) for name, known in scores.items()}

    def _differences(self) -> list[Record]:
        """Return how the cached recovery differs from the full one, where variants have both."""
        found = []
        for seed in self._final_models():
            runs = [self._plan.runs / f"recover/{name}/seed{seed}" for name in (cold_start.FULL, cold_start.CACHED)]
            if all(run.is_dir() for run in runs):
                one, other = (max(complete_checkpoints(run / "recovery/checkpoints")) for run in runs)
                found.append(Record(f"difference/cached/seed{seed}", seed, {}, recovery_difference(one, other)))
        return found

    def _nearest(self) -> list[Record]:
        """Return how near the models put their negatives, at the start and at the end of fine-tuning."""
        pairs = list(shrunken(self._out / "data" / self._plan.tuning))
        images, texts = [pair["jpg"] for pair in pairs], [pair["txt"].decode() for pair in pairs]
        ends = [name for name in cold_start.MEASURED if name in self._variants]
        models = {(cold_start_report.START, seed): self._model(seed) for seed in self._final_models()}
        models |= {(name, s): self._plan.runs / f"tune/{name}/seed{s}" for s in self._seeds for name in ends}
        found = []
        for (name, seed), path in models.items():
            model = api.load(path, "cpu")
            measured = nearest_negatives(model.encode_images(images), model.encode_texts(texts))
            found.append(Record(f"nearest/{name}/seed{seed}", seed, {}, measured._asdict()))
        return found


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return names of variants, by default all of them.

    Raises:
        UserError: one is unknown.
    """
    for name in names or ():
        if name not in cold_start.VARIANTS:
            guess = nearest(name, cold_start.VARIANTS) or "."
            raise UserError(f"Unknown variant {name}{guess} Variants: {'; '.join(cold_start.VARIANTS)}.")
    return list(names or cold_start.VARIANTS)


def _plan(arguments: argparse.Namespace) -> cold_start.Plan:
    """Make the fine-tuning pairs, those with false negatives and those with mismatched captions.

    Raises:
        UserError: the source has too few shards, or false negatives are requested of photographs.
    """
    out = arguments.out.resolve()
    shards = sorted((out / "data" / "train").glob("*.tar"))
    first = int(PRETRAINING_SHARE * len(shards))
    if not first or first == len(shards):
        raise UserError(f"{arguments.source} has {len(shards)} shards of 500 pairs, but the study needs at least two.")
    tuning, noisy = (out / "data" / name for name in ("tuning", "mismatched"))
    pairs = arguments.tuning_pairs
    if not arguments.duplicates:
        cold_start_data.copy_shards(shards[first:][: -(-pairs // 500)], tuning)
    elif arguments.source.startswith("demo:"):
        cold_start_data.render_pairs(tuning, pairs, arguments.duplicates)
    else:
        raise UserError("--duplicates needs a renderer: use it with demo:train, or set it to 0 for pairs of your own.")
    cold_start_data.mismatch_captions(tuning, noisy, arguments.mismatched)
    return cold_start.Plan(
        pretraining=f"train/{{{','.join(path.stem for path in shards[:first])}}}.tar",
        tuning=tuning.name,
        noisy=noisy.name,
        batch=arguments.batch,
        pretraining_epochs=arguments.pretraining_epochs,
        temperature=arguments.pretraining_temperature,
        epochs=arguments.epochs,
        epoch_steps=-(-sum(1 for _ in shrunken(tuning)) // arguments.batch),
        captions=arguments.captions,
        models=out / "models",
        runs=out / "runs",
        checkpoints=arguments.checkpoints or arguments.seeds + 1,
    )
