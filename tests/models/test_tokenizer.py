import multiprocessing
import os
import pickle
import subprocess
import sys

import huggingface_hub.constants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from neuclip_ds.errors import UserError
from neuclip_ds.models.tokenizer import BOS, EOS, CaptionTokenizer, train_bpe

CAPTIONS = ["A dog runs over the grass", "two cats sleep on a sofa", "a dog and a cat", "Ein Hund läuft"] * 3
TOKENIZE = train_bpe(CAPTIONS, vocab_size=320, context_length=12)


def word_level(**special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of six words whose special tokens have the given roles."""
    vocab = {word: place for place, word in enumerate(["[UNK]", "<s>", "</s>", "[PAD]", "a", "dog"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special)


def test_a_row_is_bos_tokens_eos_padding() -> None:
    row = TOKENIZE(["a dog"])[0]
    assert row.dtype == torch.int64
    end = row.tolist().index(TOKENIZE.eos_id)
    assert row[0] == TOKENIZE.bos_id
    assert 1 < end < 11
    assert (row[end:] == TOKENIZE.pad_id).all()


def test_special_tokens_are_0_and_1() -> None:
    assert (TOKENIZE.bos_id, TOKENIZE.eos_id, TOKENIZE.pad_id) == (0, 1, 1)


def test_empty_caption_is_bos_eos() -> None:
    assert TOKENIZE(["", " \n\t "]).tolist() == [[0, *[1] * 11]] * 2


def test_no_captions_give_no_rows() -> None:
    assert TOKENIZE([]).shape == (0, 12)


def test_case_form_and_whitespace_do_not_count() -> None:
    rows = TOKENIZE(["caf\u00e9 au  lait", " CAFE\u0301 \n au lait "])
    assert torch.equal(rows[0], rows[1])


def test_a_rows_tokens_do_not_depend_on_its_neighbours() -> None:
    captions = ["a dog", "a " * 100, ""]
    assert torch.equal(TOKENIZE(captions), torch.cat([TOKENIZE([caption]) for caption in captions]))


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
    tokenize = CaptionTokenizer(TOKENIZE._tokenizer, 200)
    first, end = tokenize([word]), tokenize([word])[0].tolist().index(1)
    text = TOKENIZE._tokenizer.decode(first[0, 1:end].tolist())
    assert torch.equal(tokenize([text]), first)  # what is decoded again is the same caption


def test_a_long_caption_is_cut_so_that_eos_fits() -> None:
    row = TOKENIZE(["dog " * 50])[0]
    assert row[-1] == TOKENIZE.eos_id
    assert (row[:-1] != TOKENIZE.eos_id).all()


def test_vocabulary_is_bounded_and_learnt() -> None:
    assert 258 < TOKENIZE.vocab_size <= 320
    assert len(TOKENIZE._tokenizer.tokenize("a dog")) == 2


def test_training_is_deterministic_across_processes(tmp_path) -> None:
    code = (
        "import sys; from neuclip_ds.models.tokenizer import train_bpe; "
        f"train_bpe({CAPTIONS!r}, 320, 12).save(sys.argv[1])"
    )
    TOKENIZE.save(tmp_path / "a")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, env=environment)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_captions_may_be_a_stream() -> None:
    assert train_bpe((text for text in CAPTIONS), 320, 12)._tokenizer.get_vocab() == TOKENIZE._tokenizer.get_vocab()


@pytest.mark.parametrize("captions", [[], ["", "  \n"]])
def test_nothing_to_train_on_is_a_user_error(captions: list[str]) -> None:
    with pytest.raises(UserError, match="no caption"):
        train_bpe(captions, 300, 12)


def test_too_small_a_vocabulary_is_a_user_error() -> None:
    with pytest.raises(UserError, match="258"):
        train_bpe(CAPTIONS, 100, 12)


def test_saved_and_pickled_tokenizers_are_the_same(tmp_path) -> None:
    TOKENIZE.save(tmp_path)
    for other in (CaptionTokenizer.load(tmp_path, 12), pickle.loads(pickle.dumps(TOKENIZE))):
        assert torch.equal(other([*CAPTIONS, EOS, ""]), TOKENIZE([*CAPTIONS, EOS, ""]))
        ids = other.vocab_size, other.bos_id, other.eos_id, other.pad_id, other.context_length
        assert ids == (TOKENIZE.vocab_size, 0, 1, 1, 12)


def test_cls_and_sep_stand_in_for_bos_and_eos() -> None:
    tokenize = CaptionTokenizer(word_level(cls_token="<s>", sep_token="</s>", pad_token="[PAD]"), 6)
    assert tokenize(["a dog", ""]).tolist() == [[1, 4, 5, 2, 3, 3], [1, 2, 3, 3, 3, 3]]


def test_a_tokenizer_with_eos_only_has_no_bos() -> None:
    tokenize = CaptionTokenizer(word_level(eos_token="</s>"), 5)
    assert tokenize.bos_id is None
    assert tokenize(["a dog", "", "a " * 9]).tolist() == [[4, 5, 2, 2, 2], [2] * 5, [4, 4, 4, 4, 2]]


def test_one_token_for_both_ends_is_an_end_only() -> None:  # GPT-2: a row that began with EOS would be read there
    tokenize = CaptionTokenizer(word_level(bos_token="</s>", eos_token="</s>"), 5)
    assert tokenize(["a dog"]).tolist() == [[4, 5, 2, 2, 2]]


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="neither an EOS nor a SEP"):
        CaptionTokenizer(word_level(bos_token="<s>", pad_token="[PAD]"), 5)


def test_unknown_names_are_user_errors(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="neither as a local folder nor on the hub"):
        CaptionTokenizer.load("no-such/tokenizer", 12)
    with pytest.raises(UserError, match="holds no tokenizer"):
        CaptionTokenizer.load(tmp_path, 12)


def _tokenize_in_child() -> None:
    TOKENIZE(CAPTIONS)


def test_a_forked_worker_is_silent(capfd) -> None:
    TOKENIZE(CAPTIONS * 50)
    child = multiprocessing.get_context("fork").Process(target=_tokenize_in_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert "parallelism" not in capfd.readouterr().err
