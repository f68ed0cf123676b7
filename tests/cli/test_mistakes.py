"""A user's mistake gives one line with the fix and exit code 2, on one or two ranks, without a traceback or a hang."""

from pathlib import Path

import pytest
from small_runs import SMALL, call


def check(options: list[str], ranks: int, folder: Path, *parts: str) -> None:
    """Check that all ranks exit with code 2 and that one line reports the mistake."""
    done = call("train.py", *options, f"--run.output_dir={folder}/runs", folder=folder, ranks=ranks, code=2)
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed
    lines = [line for line in printed.splitlines() if "error: " in line]
    (line,) = [line for line in lines if "neuclip" not in line.split("error: ")[0]]
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("ranks", "option", "word"),
    [
        (1, "--data.btach_size=3", "--data.batch-size"),
        (1, "--deepspeed=zero9", "zero1_bf16"),
        (1, "--model.text.vocab_size=100", "300"),
        (2, "--data.batch_size=255", "not divisible by the 2 ranks"),
        (2, "--data.train=/no/such/folder", "/no/such/folder"),
    ],
)
def test_mistakes_that_are_found_before_and_after_the_ranks_connect(
    ranks: int, option: str, word: str, tmp_path: Path
) -> None:
    check(["demo", option], ranks, tmp_path, word)


@pytest.mark.slow
def test_an_error_of_one_rank_ends_both_ranks(tmp_path: Path) -> None:
    """Only rank 1 reads a corrupt zero-shot image, and both ranks exit with the same error."""
    import webdataset as wds

    from neuclip_ds.data.demo import make_demo_data

    make_demo_data(tmp_path / "data", pairs=40, held_out=10, zero_shot=80, size=32, processes=1)
    tar = tmp_path / "data" / "zero_shot" / "test" / "0.tar"
    read = wds.WebDataset(str(tar), shardshuffle=False)
    samples = [{key: value for key, value in sample.items() if key in ("__key__", "jpg", "cls")} for sample in read]
    samples[1]["jpg"] = b"none"
    with wds.TarWriter(str(tar)) as out:
        for sample in samples:
            out.write(sample)
    options = ["demo", *SMALL, f"--data.train={tmp_path}/data/train", "--data.batch_size=16", "--max_steps=1"]
    check(options, 2, tmp_path, "rank 1 on ", "0.tar", samples[1]["__key__"], "cannot be decoded")
