import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Wav2Vec2CTCTokenizer

from neuclip_ds.errors import UserError
from neuclip_ds.models.bpe import BOS, EOS, train_bpe
from neuclip_ds.models.pretrained.text_encoder import TextEncoderTokenizer
from neuclip_ds.models.tokenizer import CaptionTokenizer

CAPTIONS = ["A dog runs over the grass", "two cats sleep on a sofa", "a dog and a cat", "Ein Hund läuft"] * 3
TOKENIZE = train_bpe(CAPTIONS, vocab_size=320, context_length=12)


def word_level(**special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a vocabulary of six words and the given special tokens."""
    vocab = {word: number for number, word in enumerate(["[UNK]", "<s>", "</s>", "[PAD]", "a", "dog"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special)


def test_a_row_is_bos_tokens_eos_padding() -> None:
    """BOS is 0, and EOS and padding are 1; long captions are cut so that EOS fits, and rows are independent."""
    assert (TOKENIZE.bos_id, TOKENIZE.eos_id, TOKENIZE.pad_id) == (0, 1, 1)
    rows = TOKENIZE(["a dog", "", " \n\t ", "dog " * 50])
    assert rows.dtype == torch.int64
    end = rows[0].tolist().index(1)
    assert 1 < end < 11 and rows[0, 0] == 0 and (rows[0, end:] == 1).all()
    assert rows[1:3].tolist() == [[0, *[1] * 11]] * 2
    assert rows[3, -1] == 1 and (rows[3, :-1] != 1).all()
    assert torch.equal(rows[:1], TOKENIZE(["a dog"]))
    assert TOKENIZE([]).shape == (0, 12)


def test_case_unicode_form_and_whitespace_do_not_change_tokens() -> None:
    rows = TOKENIZE(["caf\u00e9 au  lait", " CAFE\u0301 \n au lait "])
    assert torch.equal(rows[0], rows[1])


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from([BOS, EOS, "dog", " "]), max_size=8).map("".join)))
def test_any_text_has_one_eos_before_the_padding(caption: str) -> None:
    row = TOKENIZE([caption])[0].tolist()
    end = row.index(1)
    assert row[0] == 0
    assert 0 not in row[1:]
    assert row[end:] == [1] * (12 - end)
    assert max(row) < TOKENIZE.vocab_size


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Zs", "Cc"]), min_size=1, max_size=8))
def test_no_byte_is_out_of_vocabulary(word: str) -> None:
    tokenize = CaptionTokenizer(TOKENIZE.inner, 200)
    first, end = tokenize([word]), tokenize([word])[0].tolist().index(1)
    text = TOKENIZE.inner.decode(first[0, 1:end].tolist())
    assert torch.equal(tokenize([text]), first)  # decoding and encoding again gives the same tokens


@pytest.mark.slow
def test_training_is_deterministic_across_processes(tmp_path) -> None:
    code = (
        f"import sys; from neuclip_ds.models.bpe import train_bpe; train_bpe({CAPTIONS!r}, 320, 12).save(sys.argv[1])"
    )
    TOKENIZE.save(tmp_path / "a")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, env=environment)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("captions", "vocab_size", "message"),
    [([], 300, "No caption"), (["", "  \n"], 300, "No caption"), (CAPTIONS, 100, "258")],
)
def test_captions_without_text_and_tiny_vocabularies_are_refused(
    captions: list[str], vocab_size: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train_bpe(captions, vocab_size, 12)


def test_saved_and_pickled_tokenizers_return_the_same_tokens(tmp_path) -> None:
    TOKENIZE.save(tmp_path)
    for other in (CaptionTokenizer.load(tmp_path, 12), pickle.loads(pickle.dumps(TOKENIZE))):
        assert torch.equal(other([*CAPTIONS, EOS, ""]), TOKENIZE([*CAPTIONS, EOS, ""]))
        ids = other.vocab_size, other.bos_id, other.eos_id, other.pad_id, other.context_length
        assert ids == (TOKENIZE.vocab_size, 0, 1, 1, 12)


@pytest.mark.parametrize(
    ("special", "rows"),
    [
        ({"cls_token": "<s>", "sep_token": "</s>", "pad_token": "[PAD]"}, [[1, 4, 5, 2, 3], [1, 2, 3, 3, 3]]),
        ({"eos_token": "</s>"}, [[4, 5, 2, 2, 2], [2] * 5]),
        # GPT-2 uses one token as BOS and EOS: if a row began with it, the feature would be read there
        ({"bos_token": "</s>", "eos_token": "</s>"}, [[4, 5, 2, 2, 2], [2] * 5]),
    ],
    ids=["bert", "only eos", "one token for both ends"],
)
def test_rows_of_tokenizers_with_other_special_tokens(special: dict[str, str], rows: list[list[int]]) -> None:
    assert CaptionTokenizer.closed(word_level(**special), 5)(["a dog", ""]).tolist() == rows


@pytest.mark.parametrize(
    "tokenizer", [TOKENIZE, TextEncoderTokenizer(word_level(eos_token="</s>"), 8, False)], ids=["own", "text encoder"]
)
def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_file_system(
    tokenizer: CaptionTokenizer | TextEncoderTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        tokenizer.save(tmp_path)


def test_a_tokenizer_in_python_that_cannot_add_eos_is_refused(tmp_path) -> None:
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4}))
    with pytest.raises(UserError, match=r"\(Wav2Vec2CTCTokenizer\) cannot be made to end captions with EOS"):
        CaptionTokenizer.closed(Wav2Vec2CTCTokenizer(str(vocabulary)), 5)


def test_a_tokenizer_without_an_end_token_and_a_missing_one_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="has no EOS or SEP token"):
        CaptionTokenizer.closed(word_level(bos_token="<s>", pad_token="[PAD]"), 5)
    for name in ("no-such/tokenizer", tmp_path):
        with pytest.raises(UserError, match=r"cannot load the tokenizer.*'neuclip_ds\[siglip\]'"):
            CaptionTokenizer.load(name, 12)
