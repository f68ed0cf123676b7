"""Check single encoders: features of padded captions equal those of single captions, and images those of timm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from miniatures import CAPTIONS, clip_tokenizer, images, save_clip, siglip_tokenizer, small, xlm_roberta_tokenizer
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2Model,
    T5Config,
    T5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from neuclip_ds.config import ModelConfig, VisionConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.image_encoder import locate_image_encoder, open_image_encoder
from neuclip_ds.models.pretrained.text_encoder import (
    PADDING,
    POOLINGS,
    Pooling,
    PretrainedTextEncoder,
    open_text_encoder,
)
from neuclip_ds.models.source import INITIAL_LOGITS, locate_on_rank_zero, model_source, open_saved

LENGTH = 16  # tokens


def new_bert() -> tuple[Any, PreTrainedTokenizerBase]:
    tokenizer = xlm_roberta_tokenizer()
    config = BertConfig(**small(24), vocab_size=len(tokenizer), max_position_embeddings=LENGTH, pad_token_id=1)
    return BertModel(config), tokenizer


def new_xlm_roberta() -> tuple[Any, PreTrainedTokenizerBase]:
    """Return an XLM-R, whose positions start after the padding id, so that two fewer tokens fit."""
    tokenizer = xlm_roberta_tokenizer()
    config = XLMRobertaConfig(**small(24), vocab_size=len(tokenizer), max_position_embeddings=LENGTH + 2)
    return XLMRobertaModel(config), tokenizer


def new_qwen() -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a decoder like Qwen3, whose tokenizer pads on the left, with its EOS token."""
    tokenizer = clip_tokenizer()
    tokenizer.padding_side = "left"
    sizes = small(24, num_key_value_heads=1, max_position_embeddings=LENGTH)
    return Qwen2Model(Qwen2Config(**sizes, vocab_size=len(tokenizer))), tokenizer


def new_t5() -> tuple[Any, PreTrainedTokenizerBase]:
    tokenizer = siglip_tokenizer()
    config = T5Config(d_model=24, d_kv=12, d_ff=32, num_layers=2, num_heads=2, vocab_size=len(tokenizer))
    return T5EncoderModel(config), tokenizer


def new_modernbert() -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a ModernBERT: every second layer has global attention, the others attend to 4 tokens on each side."""
    tokenizer = xlm_roberta_tokenizer()
    ids = {"pad_token_id": 1, "bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    sizes = small(24, local_attention=8, global_attn_every_n_layers=2, max_position_embeddings=LENGTH)
    return ModernBertModel(ModernBertConfig(**sizes, **ids, vocab_size=len(tokenizer))), tokenizer


def new_gemma() -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a model like EmbeddingGemma: a decoder with bidirectional attention, in a window in the first layer."""
    tokenizer = siglip_tokenizer()
    sizes = small(24, head_dim=12, num_key_value_heads=1, sliding_window=8, max_position_embeddings=LENGTH)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**sizes, layer_types=kinds, use_bidirectional_attention=True, vocab_size=len(tokenizer))
    return Gemma3TextModel(config), tokenizer


FAMILIES = {
    "bert": new_bert,
    "modernbert": new_modernbert,
    "xlm_roberta": new_xlm_roberta,
    "qwen": new_qwen,
    "gemma": new_gemma,
    "t5": new_t5,
}


def save_text_encoder(family: str, folder: Path) -> Any:
    """Save a model and its tokenizer in a folder, and return the model."""
    torch.manual_seed(0)
    model, tokenizer = FAMILIES[family]()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save a model of each family, and return its folder and the model."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_text_encoder(request.param, folder)


def pooled(hidden: Tensor, pooling: Pooling) -> Tensor:
    """Return the feature of (T, width) hidden states without padding."""
    if pooling == "cls":
        return hidden[0]
    return hidden.mean(dim=0) if pooling == "mean" else hidden[-1]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_does_not_change_the_features_of_captions(saved: tuple[Path, Any], pooling: Pooling) -> None:
    folder, model = saved
    encoder = open_text_encoder(folder, pooling)
    tokens = encoder.tokenizer(CAPTIONS)
    assert tokens.shape[1] <= encoder.tokenizer.context_length
    if pooling == "eos":
        ends = [row[row != PADDING][-1].item() for row in tokens]
        assert set(ends) == {encoder.tokenizer.inner.eos_token_id}
    with torch.no_grad():
        features = encoder.tower.eval()(tokens)
        for row, feature in zip(tokens, features, strict=True):
            ids = row[row != PADDING].unsqueeze(0)
            expected = pooled(model(input_ids=ids).last_hidden_state[0], pooling)
            torch.testing.assert_close(feature, expected)


def save_sentence_transformer(folder: Path, **modes: Any) -> Path:
    """Save a BERT with the pooling modes of a sentence-transformers config."""
    model, tokenizer = new_bert()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **modes}))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    return folder


def test_pooling_and_length_come_from_a_sentence_transformers_config(tmp_path: Path) -> None:
    cls = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    encoder: PretrainedTextEncoder = open_text_encoder(save_sentence_transformer(tmp_path / "earlier", **cls))
    assert encoder.tower.pooling == "cls"
    assert encoder.tokenizer(CAPTIONS).shape[1] == 7
    for mode, pooling in {"lasttoken": "last", "cls": "cls", "mean": "mean"}.items():
        folder = save_sentence_transformer(tmp_path / mode, pooling_mode=mode)
        assert open_text_encoder(folder).tower.pooling == pooling
    folder = save_sentence_transformer(tmp_path / "two", pooling_mode=["cls", "max"])
    with pytest.raises(UserError, match=r"pools with cls, max, which is not supported: set --pooling"):
        open_text_encoder(folder)
    folder = save_sentence_transformer(tmp_path / "max", pooling_mode_max_tokens=True)
    with pytest.raises(UserError, match=r"pools with pooling_mode_max_tokens, which is not supported: set --pooling"):
        open_text_encoder(folder)
    encoder = open_text_encoder(folder, "mean", context_length=9)
    assert encoder.tower.pooling == "mean"
    assert encoder.tokenizer(CAPTIONS).shape[1] == 9
    with pytest.raises(UserError, match=r"--context-length=17 is more than the 16 tokens"):
        open_text_encoder(folder, "mean", context_length=LENGTH + 1)


def test_other_modules_of_sentence_transformers_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_sentence_transformer(tmp_path / "dense", pooling_mode_mean_tokens=True)
    path = folder / "modules.json"
    modules = json.loads(path.read_text())
    modules.append({"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"})
    path.write_text(json.dumps(modules))
    assert open_text_encoder(folder).tower.pooling == "mean"
    modules.insert(2, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    path.write_text(json.dumps(modules))
    with pytest.raises(UserError, match=r"module Dense \(2_Dense\), which is not supported.*set --pooling"):
        open_text_encoder(folder)
    assert open_text_encoder(folder, "mean").tower.pooling == "mean"


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_weights_of_another_model(folder: Path) -> None:
    save_file({"other": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})


def with_foreign_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "unknown", "auto_map": {"AutoModel": "code.Model", "AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise AssertionError('the code of a checkpoint was run')")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_weights, "contains no weights"),
        (with_weights_of_another_model, r"tensors are missing"),
        (with_foreign_code, "transformers cannot load a text encoder"),
    ],
)
def test_folders_without_a_usable_text_encoder_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    model, tokenizer = new_bert()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no modules.json, .*set --pooling"):
        open_text_encoder(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        open_text_encoder(tmp_path, "mean")


def test_a_dual_encoder_is_not_a_text_encoder(tmp_path: Path) -> None:
    save_clip(tmp_path)
    with pytest.raises(UserError, match=r"without `hf:`"):
        open_text_encoder(tmp_path, "eos")


@pytest.fixture(scope="module")
def image_model() -> Any:
    torch.manual_seed(1)  # not the seed with which missing weights are found
    return timm.create_model("test_vit").eval()


def save_timm_folder(folder: Path, model: Any) -> None:
    save_file(model.state_dict(), folder / "model.safetensors")
    settings = {"input_size": [3, 160, 160], "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7], "crop_mode": "squash"}
    options = {"img_size": 160, "pretrained": False}
    config = {"architecture": "test_vit", "model_args": options, "pretrained_cfg": settings}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_run_squashes_images_like_the_encoder_whose_weights_it_loads(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    vision = VisionConfig(name="dm_nfnet_f0", pretrained=str(weights))
    config = ModelConfig(vision=vision)
    source = model_source(config, locate_on_rank_zero(config, Communicator()))
    assert source.preprocessing == locate_image_encoder(f"dm_nfnet_f0/{weights}", 224).preprocessing
    assert source.preprocessing.squash
    source.save(tmp_path / "saved", INITIAL_LOGITS)
    assert open_saved(config, tmp_path / "saved")[0].preprocessing == source.preprocessing


def test_image_features_equal_timms(tmp_path: Path, image_model: Any) -> None:
    save_timm_folder(tmp_path, image_model)
    by_folder = locate_image_encoder(str(tmp_path))
    by_file = locate_image_encoder(f"test_vit/{tmp_path}/model.safetensors")
    assert by_folder.preprocessing.mean == (0.1, 0.2, 0.3)
    assert by_folder.preprocessing.squash
    assert by_file.preprocessing.size == 160
    for ref in (by_folder, by_file):
        tower = open_image_encoder(ref).eval()
        pixels = images(160)
        with torch.no_grad():
            normalized = tower.normalize(pixels)
            expected = image_model.forward_head(image_model.forward_features(normalized), pre_logits=True)
            torch.testing.assert_close(tower(pixels), expected)


def test_position_embeddings_are_resampled_to_the_image_size(tmp_path: Path, image_model: Any) -> None:
    save_timm_folder(tmp_path, image_model)
    tower = open_image_encoder(locate_image_encoder(str(tmp_path), image_size=96)).eval()
    with torch.no_grad():
        assert tower(images(96)).shape == (4, image_model.num_features)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_vit", "timm has no model 'no_such_vit', and there is no folder"),
        ("test_vit.no_tag", "neither a file nor a tag"),
        ("test_vit/nowhere.safetensors", "neither a file nor a tag"),
    ],
)
def test_unknown_image_encoders_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        locate_image_encoder(name)
