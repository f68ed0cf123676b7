"""The loop of docs/tutorials/own_loop.md: two processes and a resumed run print what one process prints."""

import re
import sys
from pathlib import Path

import pytest
from small_runs import call

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own_loop.md"


def write_loop(file: Path, epochs: int) -> None:
    """Write the page's loop, for fewer epochs of fewer pairs."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for length, shorter in (("LR = 32, 20, 2e-3", f"LR = 32, {epochs}, 2e-3"), ("make_pairs(2048,", "make_pairs(256,")):
        assert length in code
        code = code.replace(length, shorter)
    file.write_text(code, encoding="utf-8")


def numbers(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", output)]


def test_the_loop_resumes_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_loop(tmp_path / "loop.py", epochs=3)
    code = compile((tmp_path / "loop.py").read_text(encoding="utf-8"), "loop.py", "exec")
    outputs: list[str] = []
    for folder, options in (("whole", []), ("parts", ["--stop-after", "1"]), ("parts", [])):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setattr(sys, "argv", ["loop.py", "--method", "sogclr", *options])
        exec(code, {"__name__": "__main__"})
        outputs.append(capsys.readouterr().out)
    whole, _, resumed = outputs
    assert whole.splitlines()[1:] == resumed.splitlines()


@pytest.mark.slow  # 20 s of CPU with two processes; test_data_parallel.py compares ranks in other loops
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    write_loop(tmp_path / "loop.py", epochs=1)
    outputs: list[list[float]] = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        done = call(str(tmp_path / "loop.py"), "--method", "sogclr", folder=tmp_path / str(ranks), ranks=ranks)
        outputs.append(numbers(done.stdout))
    assert outputs[1] == pytest.approx(outputs[0], abs=2e-3)
