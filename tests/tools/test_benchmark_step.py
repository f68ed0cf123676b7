"""Check how the step benchmark reads speeds, that its programs train equal models, and that its tables are complete."""

import argparse
import csv
import re
import shlex
import sys
from pathlib import Path

import benchmark_step
import pytest
import torch
from benchmarking.launches import ON_CPU, count_launches
from benchmarking.random_pairs import FULL, caption_lengths, random_tokens
from benchmarking.step_speed import Measured, rows_of_table, samples_per_second, write_csv
from small_runs import ROOT, SMALL, demo_shards, ends, start
from torch.utils.tensorboard import SummaryWriter

from neuclip_ds.errors import UserError
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.memory import StandInTokenizer
from neuclip_ds.recipe import load_recipe, parse, validate


def test_speed_is_that_between_the_points_after_the_warm_up(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step, wall in ((0, 100.0), (5, 160.0), (10, 170.0), (15, 172.0), (19, 174.0)):
            writer.add_scalar("loss", 1.0, step, walltime=wall)
    assert samples_per_second(tmp_path, "loss", 7, batch=32) == pytest.approx(9 * 32 / 4)
    with pytest.raises(UserError, match="raise --steps, or lower --log-every"):
        samples_per_second(tmp_path, "loss", 19, batch=32)
    with pytest.raises(UserError, match="two TensorBoard points of train/loss"):
        samples_per_second(tmp_path, "train/loss", 0, batch=32)


def lengths(caption_tokens: str, captions: int = 20_000) -> torch.Tensor:
    return caption_lengths(caption_tokens, captions, 77, torch.Generator().manual_seed(0)).double()


def test_lengths_of_captions_have_the_requested_mean_or_come_from_a_file(tmp_path: Path) -> None:
    assert set(lengths(FULL).tolist()) == {77}
    assert lengths("20").mean() == pytest.approx(20, rel=0.02)
    assert lengths("20").std() == pytest.approx(0.53 * 20, rel=0.05)
    file = tmp_path / "lengths.txt"
    file.write_text("9\n9\n12\n500\n")
    drawn = lengths(str(file))
    assert set(drawn.tolist()) == {9, 12, 77}
    assert (drawn == 9).double().mean() == pytest.approx(0.5, abs=0.02)
    file.write_text("many\n")
    for wrong in (str(file), str(tmp_path / "missing"), "1", "78"):
        with pytest.raises(UserError, match="--caption-tokens"):
            lengths(wrong)


def test_shares_need_a_timed_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark_step.parse_arguments(["--parts=shares", "--share-steps=0"])
    assert "--share-steps: '0' is not a positive integer" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--data", "demo:train"], ["--parts", "shares", "--data", "random"]])
def test_lengths_of_captions_need_random_captions(options: list[str]) -> None:
    arguments = benchmark_step.parse_arguments([*options, "--caption-tokens=20"])
    with pytest.raises(UserError, match="--caption-tokens has no effect"):
        benchmark_step.require_captions(arguments)
    arguments.parts = ["speed", "throughput"]
    benchmark_step.require_captions(arguments)


def test_random_captions_end_at_their_length() -> None:
    tokenizer = StandInTokenizer(parse(["demo", *SMALL, "--model.text.context_length=20"]).config.model.text)
    tokens = random_tokens("8", 50, tokenizer, torch.Generator().manual_seed(1))
    expected = caption_lengths("8", 50, 20, torch.Generator().manual_seed(1))
    assert tokens.shape == (50, 20)
    assert (tokens.eq(tokenizer.eos_id).int().argmax(dim=1) + 1).tolist() == expected.tolist()
    assert (tokens[:, 0] == tokenizer.bos_id).all()


def test_launches_are_operations_that_compute() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    assert count_launches(lambda: x.t().t().view(16)) == 0
    assert count_launches(lambda: (x * 2).exp()) == 2
    assert count_launches(lambda: (x * 2).exp().sum().backward()) > 3  # the backward pass counts too


def test_ratios_pair_the_turns_in_which_both_programs_ran(tmp_path: Path) -> None:
    fast = Measured(source="noise", program="here", ranks=1, rows=8, speeds={0: 10.0, 1: 30.0, 2: 90.0}, launches=7)
    slow = Measured(source="noise", program="peer", ranks=1, rows=8, speeds={1: 10.0, 2: 60.0}, problem="time limit")
    other = Measured(source="noise", program="peer", ranks=2, rows=8, problem="no compiler")
    head, *rows = rows_of_table([fast, slow, other], ["here"], "launches")
    assert [dict(zip(head, row, strict=True))["here / this row"] for row in rows] == ["1.00", "2.25", "-"]
    assert dict(zip(head, rows[0], strict=True))["launches"] == "7"
    assert "not run: no compiler" in rows[2]
    write_csv(tmp_path / "speeds.csv", ["today"], [head, *rows])
    assert (tmp_path / "speeds.csv").read_text().startswith("# today\ninput,program,")


def test_variants_switch_our_options_and_never_those_of_peers(tmp_path: Path) -> None:
    options = ["--rows", "8", "4", "--methods", "openclip", "neuclip", "--variants", "default"]
    options += ["baseline", "packed", "all"]
    options += ["--peers", "ddp_compiled", "open_clip", "--peer-flags=", "--peer-flags=--torchcompile"]
    arguments = benchmark_step.parse_arguments([*options, f"--out={tmp_path}", *SMALL])
    names: dict[int, list[str]] = {}
    configs = {}
    for rows in (8, 4):
        programs = benchmark_step.programs(benchmark_step.setting_for(arguments, 1, rows))
        names[rows] = [program.name for program in programs]
        for program in programs:
            configs[rows, program.name] = validate(load_recipe(program.options[0]))
    ours = [f"here: openclip{variant}" for variant in ("", ", baseline", ", packed", ", all")]
    neuclip = [f"here: neuclip{variant}" for variant in ("", ", baseline", ", all")]
    peers = ["plain DDP, compiled", "open_clip", "open_clip --torchcompile"]
    assert names[8] == [*ours, *neuclip, *peers]
    assert names[4] == [ours[0], ours[1], ours[3], *peers]
    switches = {}
    for name in (ours[2], ours[3], "open_clip", "plain DDP, compiled"):
        config = configs[8, name]
        model = config.model
        switches[name] = (
            config.optimizer.lean_zero1,
            model.text.packed,
            model.vision.class_token_only,
            model.compile,
        )
    assert switches[ours[2]] == (False, True, False, False)
    assert switches[ours[3]] == (False, True, True, "blocks"), "the lean step needs bf16"
    assert switches["open_clip"] == (False, False, False, False)
    assert switches["plain DDP, compiled"] == (False, False, False, "towers")


def test_open_clip_trains_a_model_of_the_same_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_clip = pytest.importorskip("open_clip")
    params = pytest.importorskip("open_clip_train.params")
    pytest.importorskip("pandas")  # open_clip_train imports it
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools" / "peers"), str(ROOT / "tools"), *sys.path])
    import open_clip_program

    tokenizer = train_bpe([f"dog {number} and cat {7 * number}" for number in range(200)], 300, 8)
    tokenizer.save(tmp_path / "tokenizer")
    options = [f"--model.text.tokenizer={tmp_path}/tokenizer", f"--model.text.vocab_size={tokenizer.vocab_size}"]
    options += ["--model.text.context_length=8", "--data.batch_size=64", "--max_steps=3", "--data.train=unused"]
    config = parse(["demo", *SMALL, *options]).config
    open_clip_program.add_model(config, tmp_path)
    theirs = open_clip.create_model("benchmark_dual_encoder")
    ours = build_dual_encoder(config.model, tokenizer)
    assert Parameters.of(theirs).total == Parameters.of(ours).total + 1, "the temperature"
    captions = ["a dog and a cat", "dog"]
    assert open_clip.get_tokenizer("benchmark_dual_encoder")(captions).tolist() == tokenizer(captions).tolist()
    flags = "--torchcompile --precision pure_bf16"
    arguments = argparse.Namespace(out=tmp_path / "run", random=True, bf16=False, flags=flags)
    command_line = open_clip_program.command_line(config, arguments, 2)
    parsed = params.parse_args(command_line)
    assert parsed.batch_size == 32
    assert parsed.train_num_samples == 192
    assert parsed.grad_clip_norm == config.optimizer.max_grad_norm
    assert parsed.torchcompile
    assert parsed.precision == "pure_bf16"


@pytest.mark.slow
def test_every_program_runs_on_two_ranks(tmp_path: Path) -> None:
    shards = demo_shards(tmp_path / "demo", 2000)
    options = [*SMALL[1:], "--rows=8", "--steps=4", "--warmup=2", "--log-every=2", "--repeats=1", "--ranks=2"]
    options += ["--objective.npn.prototypes=32", "--share-model=demo", "--share-rows=8", "--paper-batch=32"]
    options += ["--paper-ranks=2", "--data", str(shards), "random", "--parts", "speed", "shares"]
    (done,) = ends(start("tools/benchmark_step.py", *options, folder=tmp_path), timeout=900)  # twelve programs
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("here: openclip", "here: neuclip", "plain DDP"):
        assert len(re.findall(rf"\| {name} \| 2 \| 8 \| [\d.]+ \|", done.stdout)) == 2, done.stdout
    assert len(re.findall(r"\| neuclip \| [\d.,]+ \| [\d.,-]+ \|", done.stdout)) == 2, done.stdout


@pytest.mark.slow
def test_the_command_for_one_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    """Run the command of docs/how-to/plan_and_profile.md with a tiny model, few steps, and fewer programs."""
    page = (ROOT / "docs/how-to/plan_and_profile.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"benchmark_step\.py (--recipe models/vitb16 --precision bf16 [^`]+)```", page)
    options = [option for option in shlex.split(command) if not option.startswith("--peer-flags")]
    options += [*SMALL, "--recipe=demo", "--rows=8", "--steps=4", "--warmup=2", "--log-every=2", "--threads=1"]
    options += ["--variants", "baseline", "lean", "all", "--methods=openclip", "--peers=open_clip"]
    options += ["--caption-tokens=10", "--time-limit=3000"]
    (done,) = ends(start("tools/benchmark_step.py", *options, folder=tmp_path), timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs/benchmark_step/speeds.csv").read_text(encoding="utf-8").splitlines()
    table = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    counts = {}
    for row in table:
        assert float(row["samples/s"]) > 0
        counts[row["program"]] = row[ON_CPU]
    assert list(counts) == [*(f"here: openclip, {variant}" for variant in ("baseline", "lean", "all")), "open_clip"]
    assert int(counts["here: openclip, lean"]) < int(counts["here: openclip, baseline"])
