"""Text towers from encoders of transformers: tiny ones of real architectures, against the library alone."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from host_reads import HostReads
from miniatures import CAPTIONS, no_training, save_clip, siglip_tokenizer, small, xlm_roberta_tokenizer
from test_image_weights import saved_timm
from torch import Tensor
from torch.nn import functional
from transformers import BertTokenizer, PreTrainedTokenizerFast

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.recompute import checkpoint_activations
from neuclip_ds.models.source import FromConfig, locate_model, model_source, open_saved
from neuclip_ds.models.towers import TextTower, new_projection

VISION = {"name": "test_vit", "image_size": 32}
WORDS = ["a", "dog", "runs", "on", "grass", "##s", "two", "cats", "##leeping", "schlaf", "犬"]


class Encoder(NamedTuple):
    model: Any  # the library's, in evaluation mode
    pad: int


def bert_tokenizer() -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)}, do_lower_case=False)


def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer without padding, which adds no special tokens."""
    tokenizer = siglip_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>", unk_token="<unk>")


def saved(folder: Path, kind: str, tokenizer: Any, head: str = "Model", **config: Any) -> Encoder:
    torch.manual_seed(0)
    tree = {**small(32), "vocab_size": len(tokenizer), "max_position_embeddings": 64, **config}
    model = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**tree)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Encoder(model.base_model, tokenizer.pad_token_id or 0)


def xlm_roberta(folder: Path, **config: Any) -> Encoder:
    tokenizer = xlm_roberta_tokenizer()
    specials = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "type_vocab_size": 1}
    return saved(folder, "XLMRoberta", tokenizer, **{"max_position_embeddings": 66, **specials, **config})


def multilingual_bert(folder: Path) -> Encoder:
    """With the heads of its pretraining, which are not read."""
    return saved(folder, "Bert", bert_tokenizer(), "ForPreTraining")


def distilbert(folder: Path) -> Encoder:
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
    return saved(folder, "DistilBert", bert_tokenizer(), **sizes)


def modernbert(folder: Path) -> Encoder:
    specials = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    return saved(folder, "ModernBert", bert_tokenizer(), local_attention=4, **specials)


def mt5(folder: Path) -> Encoder:
    """A whole encoder-decoder; the encoder alone is taken."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "pad_token_id": 0}
    encoder = saved(folder, "MT5", siglip_tokenizer(), **sizes, decoder_start_token_id=0)
    return encoder._replace(model=encoder.model.encoder)


def gpt2(folder: Path) -> Encoder:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_inner": 64}
    return saved(folder, "GPT2", gpt2_tokenizer(), "LMHeadModel", **sizes)


def qwen3(folder: Path) -> Encoder:
    sizes = {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    return saved(folder, "Qwen3", gpt2_tokenizer(), "ForCausalLM", **sizes)


def clip_text(folder: Path) -> Encoder:
    """The text tower of a whole CLIPModel."""
    return Encoder(save_clip(folder).text_model, 0)


ENCODERS: dict[str, tuple[Callable[[Path], Encoder], str]] = {  # with the pooling that is the default
    "xlm_roberta": (xlm_roberta, "mean"),
    "multilingual_bert": (multilingual_bert, "mean"),
    "distilbert": (distilbert, "mean"),
    "modernbert": (modernbert, "mean"),
    "mt5": (mt5, "mean"),
    "gpt2": (gpt2, "last"),
    "qwen3": (qwen3, "last"),
    "clip_text": (clip_text, "eos"),
}
CAUSAL = ("gpt2", "qwen3", "clip_text")


def config_of(folder: Path, **text: Any) -> ModelConfig:
    text = {"context_length": 16, "pretrained": str(folder), **text}
    return ModelConfig.model_validate({"vision": VISION, "text": text, "embed_dim": 16})


def source_of(config: ModelConfig) -> FromConfig:
    source = model_source(config, locate_model(config))
    assert isinstance(source, FromConfig)
    return source


def tower_of(source: FromConfig) -> tuple[TextTower, Any]:
    tokenizer = source.tokenizer(no_training)
    tower = source.load(tokenizer).model.eval().text
    assert isinstance(tower, TextTower)
    return tower, tokenizer


def hidden_states(encoder: Encoder, rows: Tensor, eos: int) -> list[Tensor]:
    """Return the library's hidden states of each caption alone, without padding, up to the first EOS."""
    found = []
    for row in rows:
        ends = (row == eos).nonzero()[:, 0].tolist()
        length = ends[0] + 1 if ends else len(row)
        with torch.no_grad():
            found.append(encoder.model(input_ids=row[None, :length]).last_hidden_state[0])
    return found


@pytest.mark.parametrize("name", ENCODERS)
def test_features_are_the_librarys_own(name: str, tmp_path: Path) -> None:
    """Padded rows in one batch give what each caption gives alone, at every pooling."""
    make, usual = ENCODERS[name]
    encoder = make(tmp_path)
    source = source_of(config_of(tmp_path))
    assert source._text is not None
    tokenizer, before = source._text.tokenizer(), torch.get_rng_state()
    source._text.tower(tokenizer, 16, weights=True)
    drawn = torch.get_rng_state()
    torch.set_rng_state(before)
    new_projection(encoder.model.config.hidden_size, 16)
    assert torch.equal(torch.get_rng_state(), drawn), "the projection alone is random"
    for pooling in (None, "cls", "mean", "last"):
        tower, tokenizer = tower_of(source_of(config_of(tmp_path, pooling=pooling)))
        assert tower.pooling == (pooling or usual)
        tower.projection = torch.nn.Identity()
        tokenizer = pickle.loads(pickle.dumps(tokenizer))  # as it reaches a loader process
        rows = tokenizer(CAPTIONS)
        states = hidden_states(encoder, rows, tokenizer.eos_id)
        pools = {"cls": lambda h: h[0], "mean": lambda h: h.mean(dim=0), "last": lambda h: h[-1]}
        wanted = torch.stack([pools["last" if tower.pooling == "eos" else tower.pooling](state) for state in states])
        with torch.no_grad():
            torch.testing.assert_close(tower(rows), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_masks_are_made_without_reading_the_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of transformers' own masks; causal encoders have none, which flash attention requires."""
    ENCODERS[name][0](tmp_path)
    tower, tokenizer = tower_of(source_of(config_of(tmp_path)))
    rows, attention, masks = tokenizer(CAPTIONS), functional.scaled_dot_product_attention, list[Tensor | None]()

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        masks.append(kwargs["attn_mask"])
        return attention(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    with torch.no_grad(), HostReads() as reads:
        features = tower(rows)
    assert reads.count == 0
    assert len(masks) == 2 and all((mask is None) == (name in CAUSAL) for mask in masks)
    tower.trunk.set_attn_implementation("sdpa")
    tower._pad_id = tokenizer.pad_id
    masks.clear()
    with torch.no_grad():
        assert torch.equal(features, tower(rows))
    assert None not in masks, "these captions are padded"


@pytest.mark.parametrize("name", ["xlm_roberta", "mt5", "gpt2"])
def test_every_parameter_is_trained_under_checkpointing(name: str, tmp_path: Path) -> None:
    ENCODERS[name][0](tmp_path)
    tower, tokenizer = tower_of(source_of(config_of(tmp_path)))
    checkpoint_activations(tower.train(), "text", True)
    tower(tokenizer(CAPTIONS)).square().sum().backward()
    assert [name for name, value in tower.named_parameters() if value.grad is None] == []


@pytest.mark.parametrize("name", ["xlm_roberta", "distilbert", "gpt2", "clip_text"])
def test_no_context_is_longer_than_the_learned_positions(name: str, tmp_path: Path) -> None:
    ENCODERS[name][0](tmp_path)
    longest = 16 if name == "clip_text" else 64
    tower, tokenizer = tower_of(source_of(config_of(tmp_path, context_length=longest)))
    with torch.no_grad():
        assert tower(tokenizer(["dog " * 200])).isfinite().all()
    assert f"has {longest} positions" in refusal(config_of(tmp_path, context_length=longest + 1))


def test_a_run_reopens_without_the_weights(tmp_path: Path) -> None:
    """Of both towers."""
    xlm_roberta(tmp_path / "published")
    saved_timm(tmp_path / "published" / "image.safetensors")
    config = config_of(tmp_path / "published")
    vision = config.vision.model_copy(update={"pretrained": f"{tmp_path}/published/image.safetensors"})
    config = config.model_copy(update={"vision": vision})
    source = source_of(config)
    tokenizer = source.tokenizer(no_training)
    model, logits = source.load(tokenizer)
    source.save(tmp_path / "run", logits)
    (tmp_path / "published").rename(tmp_path / "moved")
    again, _ = open_saved(config, tmp_path / "run")
    assert again.preprocessing == source.preprocessing
    assert torch.equal(again.tokenizer(no_training)(CAPTIONS), tokenizer(CAPTIONS))
    again.build(again.tokenizer(no_training)).load_state_dict(model.state_dict())


def refusal(config: ModelConfig) -> str:
    with pytest.raises(UserError) as caught:
        tower_of(source_of(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_refused(tmp_path: Path) -> None:
    assert "model.text.pretrained=a/b is not a local folder" in refusal(config_of(Path("a/b")))
    assert "config.json" in refusal(config_of(tmp_path))
    xlm_roberta(tmp_path / "small", vocab_size=10)
    assert "but the model's vocabulary ends at 9" in refusal(config_of(tmp_path / "small"))
    gpt2(tmp_path / "gpt2")
    assert "set model.text.pooling=last" in refusal(config_of(tmp_path / "gpt2", pooling="eos"))
    xlm_roberta(tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    assert "has no weights; put model.safetensors" in refusal(config_of(tmp_path / "bare"))
    xlm_roberta(tmp_path / "deep")
    config = tmp_path / "deep" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    assert "16 tensors are missing (first encoder.layer.2.attention" in refusal(config_of(tmp_path / "deep"))
