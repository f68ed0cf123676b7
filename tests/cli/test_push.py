"""`neuclip-ds push` against a hub on this machine, and a model by its name on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import running_hub
from huggingface_hub import constants
from miniatures import save_clip

from neuclip_ds.cli.main import main
from neuclip_ds.models.pretrained import locate, open_checkpoint


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    save_clip(tmp_path / "exported")
    (tmp_path / "exported" / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return tmp_path / "exported"


def test_an_export_goes_to_the_hub_and_loads_by_its_name(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_hub(tmp_path / "cache") as hub:
        main(["push", str(exported), "someone/clip", "--private"])
        assert hub.private == {"someone/clip": True}
        assert f"{hub.url}/someone/clip/commit/" in capsys.readouterr().out
        assert hub.repositories["someone/clip"] == {
            path.name: path.read_bytes() for path in exported.iterdir() if path.is_file()
        }
        loaded = open_checkpoint(locate("someone/clip"))
        assert loaded.load().logits.temperature == pytest.approx(0.018315638)
        assert Path(loaded._folder).is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize(
    ("repository", "token", "words"),
    [
        ("someone/clip", "hf_of_nobody", "log in with `hf auth login` or HF_TOKEN with write access"),
        ("some/one/clip", "", "Check the name"),
    ],
)
def test_what_the_hub_refuses(
    repository: str, token: str, words: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_hub(tmp_path / "cache", token), pytest.raises(SystemExit) as ended:
        main(["push", str(exported), repository])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line and "hf_of" not in line


def test_a_hub_that_cannot_be_reached(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemExit):
        main(["push", str(exported), "someone/clip"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "was not uploaded to someone/clip at http://127.0.0.1:9" in line


def test_a_folder_that_is_no_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["push", str(tmp_path), "someone/clip"])
    assert "is no exported model; write one with `neuclip-ds export" in capsys.readouterr().err
