"""Train a byte-level BPE tokenizer on a run's captions."""

from collections.abc import Iterable
from itertools import chain

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from neuclip_ds.errors import UserError
from neuclip_ds.models.tokenizer import CaptionTokenizer

BOS = "<|startoftext|>"
EOS = "<|endoftext|>"
_MIN_VOCAB_SIZE = 258  # 256 bytes and the two special tokens, so that any caption can be encoded


def train_bpe(captions: Iterable[str], vocab_size: int, context_length: int) -> CaptionTokenizer:
    """Train a byte-level BPE tokenizer deterministically on captions normalized to NFC and lowercase.

    Args:
        captions: training captions, read once as a stream.
        vocab_size: maximum number of tokens; a small set of captions yields fewer.
        context_length: number of tokens per caption, including special tokens and padding.

    Raises:
        UserError: no caption contains text, or `vocab_size` is too small for the 256 bytes, BOS and EOS.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise UserError(
            f"model.text.vocab_size={vocab_size} is too small for a byte-level BPE: use {_MIN_VOCAB_SIZE} or more."
        )
    nonempty_captions = (caption for caption in captions if caption.strip())
    first_caption = next(nonempty_captions, None)
    if first_caption is None:
        raise UserError(
            "No caption contains text to train a BPE on; check data.train and data.captions, or set "
            "model.text.tokenizer."
        )

    # The text is normalized, split into words, encoded in bytes, and framed by BOS and EOS.
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # a word has the same tokens everywhere
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)]
    )

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],  # ids 0 and 1
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(chain([first_caption], nonempty_captions), trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    return CaptionTokenizer(tokenizer, context_length)
