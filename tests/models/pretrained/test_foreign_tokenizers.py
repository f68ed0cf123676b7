"""Compare ids with those of the libraries, for tokenizers as they and their older versions write them."""

import json
import pickle
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from miniatures import CAPTIONS, LETTERS, SAVERS, clip_tokenizer, save_siglip, siglip_tokenizer, xlm_roberta_tokenizer
from torch import Tensor
from transformers import AutoTokenizer, GemmaTokenizer, LlamaTokenizer
from transformers_4 import needs_transformers_4, run_transformers_4

from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.pretrained.locate import locate, open_checkpoint
from neuclip_ds.models.pretrained.open_clip_models import clip_bpe
from neuclip_ds.models.tokenizer import CaptionTokenizer, load_tokenizer

LENGTH = 16
UNCLEAN = [
    "salt &amp; pepper",
    "it&#39;s &quot;here&quot;",
    "&amp;lt;b&amp;gt; twice",
    "\u201ccurly\u201d and \u2018single\u2019 quotes, it\u2019s",
    "\ufeffa byte order mark",
    "schÃ¶n and donâ€™t",  # UTF-8 that was read as Latin-1
    "ＦＵＬＬ width",
    "ﬁne ﬂowers",
    "  A  Dog\nruns ",
    "a dog &copy",
]


def edit_config(folder: Path, **options: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


def ids_of(folder: Path, captions: list[str] = CAPTIONS) -> Tensor:
    return open_checkpoint(locate(str(folder))).own_tokenizer()(captions)


@pytest.mark.parametrize("family", ["clip", "metaclip_2", "siglip"])
def test_captions_are_padded_and_truncated_on_the_right(family: str, tmp_path: Path) -> None:
    """Padding on the left would make CLIP read every feature at position 0, because CLIP pads with EOS."""
    SAVERS[family](tmp_path)
    right = ids_of(tmp_path)
    edit_config(tmp_path, padding_side="left", truncation_side="left")
    assert torch.equal(ids_of(tmp_path), right)


def siglip_2_tokenizer(**options: Any) -> GemmaTokenizer:
    """Return a tokenizer with the options of fixed-resolution SigLIP 2's published tokenizers, and other options."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS[:30], "▁d"]
    return GemmaTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[("▁", "d")],
        add_bos_token=False,
        add_eos_token=True,
        do_lower_case=True,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"padding_side": "right"}], ids=str)  # the class pads on the left
def test_siglip_2_lower_cases_captions(options: dict[str, Any], tmp_path: Path) -> None:
    save_siglip(tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    siglip_2_tokenizer(**options).save_pretrained(tmp_path)
    lower = siglip_2_tokenizer(padding_side="right")(["a dog runs"], max_length=LENGTH, padding="max_length")[
        "input_ids"
    ]
    assert ids_of(tmp_path, ["A Dog RUNS", "a dog runs"]).tolist() == [*lower, *lower]


def test_clip_bpe_returns_open_clips_ids(tmp_path: Path) -> None:
    """The ids are equal even after the tokenizer has been pickled, or saved and loaded."""
    wanted = open_clip.SimpleTokenizer(context_length=LENGTH)([*CAPTIONS, *UNCLEAN])
    tokenize = clip_bpe(LENGTH)
    tokenize.save(tmp_path)
    for other in (tokenize, pickle.loads(pickle.dumps(tokenize)), CaptionTokenizer.load(tmp_path, LENGTH)):
        ids = other([*CAPTIONS, *UNCLEAN])
        is_caption = (ids != other.pad_id).long().sum(dim=1, keepdim=True) + 1  # tokens up to EOS, which pads
        ids[torch.arange(LENGTH) >= is_caption] = 0  # open_clip's padding
        assert torch.equal(ids, wanted)


def test_runs_from_before_keep_their_ids(tmp_path: Path) -> None:
    """A saved tokenizer without the option does not clean captions, as when its run was trained."""
    clip_bpe(LENGTH).save(tmp_path)
    cleaned = CaptionTokenizer.load(tmp_path, LENGTH)(UNCLEAN[:1])
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["clean_captions"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert not torch.equal(CaptionTokenizer.load(tmp_path, LENGTH)(UNCLEAN[:1]), cleaned)


def lower_casing(folder: Path) -> Any:
    """Return SigLIP 2's tokenizer as a checkpoint's loader opens it."""
    siglip_2_tokenizer().save_pretrained(folder)
    return load_tokenizer(folder)


def with_special_tokens(folder: Path) -> Any:
    tokenizer = siglip_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_0>", "<extra_1>"]})
    return tokenizer


def llama(folder: Path) -> Any:
    """Return a tokenizer whose class ends captions without EOS, as `model.text.tokenizer` makes it."""
    tokens = ["<unk>", "<s>", "</s>", "▁", *LETTERS]
    tokenizer = LlamaTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[])
    return CaptionTokenizer.closed(tokenizer, LENGTH).inner


TOKENIZERS = {
    "own": lambda folder: train_bpe(["a dog runs", *CAPTIONS], 300, LENGTH).inner,
    "clip": lambda folder: clip_tokenizer(),
    "metaclip_2": lambda folder: xlm_roberta_tokenizer(),
    "siglip": with_special_tokens,
    "siglip_2": lower_casing,
    "llama": llama,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_exported_tokenizers_return_the_same_ids_in_transformers(name: str, tmp_path: Path) -> None:
    tokenize = exported(name, tmp_path)
    options = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")([*CAPTIONS, "A Dog"], **options)["input_ids"]
    assert ids == tokenize([*CAPTIONS, "A Dog"]).tolist()


@pytest.mark.slow
@needs_transformers_4
@pytest.mark.parametrize("name", TOKENIZERS)
def test_exported_tokenizers_return_the_same_ids_in_transformers_4(name: str, tmp_path: Path) -> None:
    tokenize = exported(name, tmp_path)
    program = (
        "import json, sys; from transformers import AutoTokenizer; captions = json.load(sys.stdin);"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]);"
        f"ids = tokenizer(captions, padding='max_length', truncation=True, max_length={LENGTH})['input_ids'];"
        "print(json.dumps(ids))"
    )
    output = run_transformers_4(program, str(tmp_path / "out"), text=json.dumps([*CAPTIONS, "A Dog"]))
    assert json.loads(output.splitlines()[-1]) == tokenize([*CAPTIONS, "A Dog"]).tolist()


def exported(name: str, folder: Path) -> CaptionTokenizer:
    """Save a tokenizer as an export has it, to the folder `out`."""
    tokenize = CaptionTokenizer(TOKENIZERS[name](folder / "from"), LENGTH)
    tokenize.save(folder / "out")
    return tokenize
