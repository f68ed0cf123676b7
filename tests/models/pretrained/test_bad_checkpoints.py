"""Check that the error for an unusable checkpoint names what is missing and where to put it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from miniatures import OPEN_CLIP_CONFIG as OPEN_CLIP_TREE
from miniatures import SAVERS, clip_tokenizer, save_clip, save_open_clip, small
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.locate import locate, open_checkpoint
from neuclip_ds.models.pretrained.open_clip_models import architecture

OPEN_CLIP_FILE = "open_clip_model.safetensors"
AUTO = ("AutoConfig", "AutoModel", "AutoTokenizer")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    """Return the error message of the first step that refuses the checkpoint."""
    with pytest.raises(UserError) as caught:
        checkpoint = open_checkpoint(locate(str(folder)))
        checkpoint.own_tokenizer()
        checkpoint.load()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("openai/clip-vit-base-patch32", "not a local folder and cannot be downloaded from the hub"),
        (
            "open_clip:ViT-B-32/laion2b_s34b_b79k",
            "download laion/CLIP-ViT-B-32-laion2B-s34B-b79K on a machine with network",
        ),
        ("open_clip:ViT-H-14-quickgelu/dfn5b", "open_clip:ViT-H-14-quickgelu/FILE"),
        ("open_clip:ViT-B-32/openai", "use open_clip:ViT-B-32-quickgelu/openai"),
        (
            "open_clip:ViT-B-32/imagenet",
            "names neither a file nor one of open_clip's weights for ViT-B-32: use one of the tags openai",
        ),
    ],
)
def test_a_name_that_cannot_be_located_without_network_is_explained(name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        locate(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_are_not_a_checkpoint_are_refused(tmp_path: Path) -> None:
    save_open_clip(tmp_path)
    with pytest.raises(UserError, match="pass open_clip:ARCHITECTURE/"):
        locate(str(tmp_path / OPEN_CLIP_FILE))
    with pytest.raises(UserError, match="put the checkpoint under the same path on every node"):
        open_checkpoint(locate(str(tmp_path))._replace(path="/nowhere"))
    (tmp_path / OPEN_CLIP_CONFIG).unlink()
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "type clip, metaclip_2, siglip, or with open_clip's" in refusal(tmp_path)


def config(change: Callable[[dict[str, Any]], object], name: str = "config.json") -> Callable[[Path], object]:
    """Return a function that edits a JSON file of a checkpoint."""
    return lambda folder: edit(folder / name, change)


def without(pattern: str) -> Callable[[Path], object]:
    """Return a function that removes matching files of a checkpoint."""
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


PROCESSOR, OPEN_CLIP_CONFIG = "preprocessor_config.json", "open_clip_config.json"
SIZE = len(clip_tokenizer())
# name -> family, the damage to its files, and words in the error message
DAMAGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "config is no JSON": ("clip", lambda folder: (folder / "config.json").write_text("{"), "a valid JSON object"),
    "no processor": ("clip", without(PROCESSOR), f"contains no {PROCESSOR}; put the checkpoint's file there"),
    "no mean": ("clip", config(lambda tree: tree.pop("image_mean"), PROCESSOR), "contains no image_mean and image_std"),
    "foreign tokenizer": (
        "siglip",
        lambda folder: (
            without("tokenizer*")(folder),
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))).save_pretrained(folder),
        ),
        "has no padding, EOS or SEP token, so it is not the model's",
    ),
    "weights that are none": (
        "clip",
        lambda folder: (folder / "model.safetensors").write_bytes(b"nothing of use"),
        "transformers cannot read the weights",
    ),
    "another tokenizer": (
        "clip",
        config(lambda tree: tree["text_config"].update(eos_token_id=3)),
        "pools at token id 3, but the tokenizer ends captions with",
    ),
    "small vocabulary": (
        "clip",
        config(lambda tree: tree["text_config"].update(vocab_size=SIZE - 1)),
        f"has ids up to {SIZE - 1}, but the model's vocabulary ends at {SIZE - 2}",
    ),
    "no weights": ("clip", without("model.safetensors"), "contains no weights; put model.safetensors"),
    "left-over adapter": (
        "clip",
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "merge the adapter with peft's merge_and_unload and save the result, or remove the adapter's files",
    ),
    "other width": ("clip", config(lambda tree: tree.update(projection_dim=24)), "2 tensors are of the wrong shape"),
    "no weights of open_clip": (
        "open_clip",
        without(OPEN_CLIP_FILE),
        f"contains no weights; put {OPEN_CLIP_FILE} there",
    ),
    "weights left over": (
        "open_clip",
        lambda folder: edit_weights(folder / OPEN_CLIP_FILE, lambda tensors: tensors.update(extra=torch.zeros(2))),
        "1 tensor is unexpected (first: extra)",
    ),
    "no model_cfg": ("open_clip", config(lambda tree: tree.pop("model_cfg"), OPEN_CLIP_CONFIG), "has no model_cfg"),
    "unknown parts": (
        "open_clip",
        config(lambda tree: tree["model_cfg"]["text_cfg"].update(magic=1), OPEN_CLIP_CONFIG),
        "cannot build",
    ),
    "no tokenizer of open_clip": (
        "open_clip",
        config(lambda tree: tree["model_cfg"]["text_cfg"].update(hf_tokenizer_name="x/y"), OPEN_CLIP_CONFIG),
        "open_clip cannot read the tokenizer",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_the_error_for_a_damaged_checkpoint_names_the_damage_and_its_file(case: str, tmp_path: Path) -> None:
    family, damage, words = DAMAGED[case]
    SAVERS[family](tmp_path)
    damage(tmp_path)
    assert words in refusal(tmp_path)


class Malicious:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (Path.touch, ("/tmp/should_not_exist",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "open_clip_pytorch_model.bin"])
def test_weights_that_would_run_code_are_refused(name: str, tmp_path: Path) -> None:
    (save_clip if name == "pytorch_model.bin" else save_open_clip)(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    torch.save({"state_dict": Malicious()}, tmp_path / name)
    refusal(tmp_path)
    assert not Path("/tmp/should_not_exist").exists()


@pytest.mark.parametrize("family", ["clip", "open_clip"])
def test_a_checkpoint_without_a_temperature_has_none(family: str, tmp_path: Path) -> None:
    (save_clip if family == "clip" else save_open_clip)(tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    edit_weights(path, lambda tensors: tensors.pop("logit_scale"))
    assert open_checkpoint(locate(str(tmp_path))).load().logits == (None, None)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put code next to a model, and fail if the code runs or the user is asked whether to run it."""
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()"
    for folder in (tmp_path, tmp_path / "encoder"):
        folder.mkdir(exist_ok=True)
        (folder / "code.py").write_text(code)
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("the user was asked"))
    yield
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("family", ["clip", "open_clip"])
def test_code_of_a_model_is_never_run(family: str, tmp_path: Path) -> None:
    """Models and tokenizers are built from the library's classes."""
    save_clip(tmp_path)
    if family == "open_clip":
        text = {**OPEN_CLIP_TREE["text_cfg"], "hf_tokenizer_name": "tokenizer", "vocab_size": SIZE}
        save_open_clip(tmp_path, {**OPEN_CLIP_TREE, "text_cfg": text})
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).unlink()
        text["tokenizer_kwargs"] = {"trust_remote_code": True}
        edit(tmp_path / OPEN_CLIP_CONFIG, lambda tree: tree["model_cfg"].update(text_cfg=text))
    else:
        edit(tmp_path / "config.json", lambda tree: tree.update(auto_map=dict.fromkeys(AUTO, "code.Made")))
    edit(tmp_path / "tokenizer_config.json", lambda tree: tree.update(auto_map={"AutoTokenizer": ["code.Made", None]}))
    checkpoint = open_checkpoint(locate(str(tmp_path)))
    checkpoint.own_tokenizer()
    checkpoint.load()


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("known", [True, False])
def test_code_of_open_clips_text_encoders_is_never_run(known: bool, tmp_path: Path) -> None:
    """An encoder that transformers implements is built from transformers' class; any other encoder is refused."""
    encoder = tmp_path / "encoder"
    tree = {"model_type": "roberta" if known else "made", **small(24), "vocab_size": 60, "pad_token_id": 1}
    tree["auto_map"] = {"AutoConfig": "code.Made", "AutoModel": "code.Made"}
    (encoder / "config.json").write_text(json.dumps(tree))
    config = {**OPEN_CLIP_TREE, "text_cfg": {"hf_model_name": str(encoder)}}
    if known:
        assert type(architecture(config, "it").text.transformer).__name__ == "RobertaModel"
    else:
        with pytest.raises(UserError, match=r"cannot read the text encoder .* of it"):
            architecture(config, "it")
