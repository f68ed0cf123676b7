"""Image size and context length of checkpoints, and options that a checkpoint replaces."""

from pathlib import Path

import pytest
import yaml

from neuclip_ds.config import dump
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import load_saved, parse

REPLACED = {
    "model.vision.name": "resnet50",
    "model.vision.options": '{"depth": 3}',
    "model.vision.patch_drop": "0.5",
    "model.vision.mean": "[0.5, 0.5, 0.5]",
    "model.text.tokenizer": "clip_bpe",
    "model.text.width": "64",
    "model.embed_dim": "64",
}


@pytest.mark.parametrize("name", REPLACED)
def test_options_that_a_checkpoint_replaces_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: no effect with model.pretrained"):
        parse(["demo", "--model.pretrained=x", f"--{name}={REPLACED[name]}"])


def test_a_recipes_architecture_gives_way_to_a_checkpoint(tmp_path: Path) -> None:
    """Sizes are kept only if they belong to a checkpoint, such as one whose path the command line replaces."""
    model = parse(["demo", "--model.pretrained=x"]).config.model
    assert (model.vision.image_size, model.text.context_length, model.vision.options) == (None, None, {})
    model = parse(["demo", "--model.pretrained=x", "--model.vision.image_size=64"]).config.model
    assert (model.vision.image_size, model.text.context_length) == (64, None)
    recipe = tmp_path / "larger.yaml"
    recipe.write_text("include: [demo]\nmodel: {pretrained: x, vision: {image_size: 336}}\n")
    model = parse([str(recipe), "--model.pretrained=copy_of_x"]).config.model
    assert (model.pretrained, model.vision.image_size) == ("copy_of_x", 336)


def test_configs_of_earlier_runs_with_such_options_can_be_read(tmp_path: Path) -> None:
    tree = yaml.safe_load(dump(parse(["demo"]).config))
    tree["model"]["pretrained"] = "x"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    model = load_saved(tmp_path / "config.yaml").model
    assert (model.pretrained, model.embed_dim) == ("x", 512)
