"""The steps of the tutorials exist on the pages, and their times are those of the commands."""

from pathlib import Path

import pytest
from time_tutorials import Step, link_flickr8k, pages_of, read_steps, run

from neuclip_ds.errors import UserError

BUSY = "python -c 'import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass'"


def test_every_command_and_file_is_on_its_page() -> None:
    """If this fails, adapt tools/tutorials.yaml to the page."""
    steps = read_steps()
    assert "fine_tuning" in pages_of(steps)
    assert all(step.commands for step in steps)


def test_a_step_runs_its_commands_with_the_files_of_the_reader(tmp_path: Path) -> None:
    files = {"mine.yaml": "epochs: 3\n"}
    step = Step(page="page", name="step", commands=["cp mine.yaml copy.yaml", BUSY, "sleep 0.3"], files=files)
    seconds, cpu_seconds = run(step, tmp_path)
    assert (tmp_path / "copy.yaml").read_text() == "epochs: 3\n"
    assert seconds >= 0.6
    assert 0.3 <= cpu_seconds < seconds


def test_a_failed_command_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    step = Step(page="page", name="step", commands=["echo no such shard; false", "touch never"], files={})
    with pytest.raises(UserError, match=r"page, step, ended with exit code 1:\nno such shard"):
        run(step, tmp_path)
    assert not (tmp_path / "never").exists()


def test_the_images_are_links_in_a_folder_that_can_be_written(tmp_path: Path) -> None:
    source = tmp_path / "flickr8k"
    with pytest.raises(UserError, match=r"captions\.txt"):
        link_flickr8k(source, tmp_path / "unused")
    (source / "Images").mkdir(parents=True)
    (source / "Images" / "a.jpg").write_bytes(b"image")
    (source / "captions.txt").write_text("image,caption\n")
    target = tmp_path / "clone" / "data" / "flickr8k"
    link_flickr8k(source, target)
    (target / "Images" / "train.csv").write_text("image,caption\n")
    assert (target / "Images" / "a.jpg").read_bytes() == b"image"
    assert [path.name for path in (source / "Images").iterdir()] == ["a.jpg"]
