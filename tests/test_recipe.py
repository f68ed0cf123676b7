"""Test how the command line and YAML become a validated config, and how the config divides a global batch."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from neuclip_ds.config import Config, dump
from neuclip_ds.errors import UserError
from neuclip_ds.losses.neuclip_options import NpnConfig
from neuclip_ds.recipe import load_recipe, option_fields, parse, recipe_config, recipe_names, recipe_summary, validate
from neuclip_ds.training.checks import check_config


def test_every_recipe_is_valid_and_survives_its_dump() -> None:
    for name in recipe_names():
        config = recipe_config(name, {})
        assert config.run.name == name
        assert validate(yaml.safe_load(dump(config))) == config, name


def test_options_override_the_recipe_and_change_nothing_else() -> None:
    before = parse(["demo", "--objective.method=neuclip"]).config
    options = ["--optimizer.lr=2e-3", "--data.micro_batch=32", "--optimizer.betas=[0.8,0.9]", "--run.name=mine"]
    after = parse(["demo", "--objective.method=neuclip", *options, "--objective.npn.alpha_grad=stop"]).config
    assert after.optimizer.lr == 2e-3
    assert after.optimizer.betas == (0.8, 0.9)
    assert after.data.micro_batch == 32
    assert after.run.name == "mine"
    assert after.objective.npn.alpha_grad == "stop"
    assert after.objective.npn.prototypes == before.objective.npn.prototypes
    assert after.model == before.model


def test_without_a_recipe_the_demo_is_used_and_the_last_value_of_an_option_counts() -> None:
    asked = parse(["--max_steps=3"])
    assert asked.command.recipe is None
    assert asked.config == parse(["demo", "--max_steps=9", "--max_steps=3"]).config
    assert asked.config.run.evaluate_every > 0, "scores have curves, not single points"


def test_null_switches_and_dashes_are_understood() -> None:
    """`null` clears a value, a switch takes no value, and dashes and underscores are equivalent."""
    assert parse(["demo"]).config.objective.temperature.lr is not None
    assert parse(["demo", "--objective.temperature.lr=null"]).config.objective.temperature.lr is None
    vision = parse(["demo", "--model.vision.mean=null", "--model.vision.std=[0.2,0.2,0.2]"]).config.model.vision
    assert vision.mean is None
    assert vision.std == (0.2, 0.2, 0.2)
    asked = parse(["demo", "--dry-run", "--hostfile=hostfiles/8node"]).command
    assert (asked.dry_run, asked.hostfile, asked.print_config) == (True, Path("hostfiles/8node"), False)
    with_dashes = parse(["demo", "--data.batch-size", "32", "--print-config", "--objective.comm-dtype=bfloat16"])
    assert with_dashes == parse(["demo", "--data.batch_size=32", "--print_config", "--objective.comm_dtype=bfloat16"])
    assert with_dashes.config.data.batch_size == 32
    assert parse(["demo", "--run.name=with-dashes_and_more"]).config.run.name == "with-dashes_and_more"


def test_the_name_of_a_run_is_by_default_that_of_its_recipe(tmp_path: Path) -> None:
    assert parse(["demo", "--run.name=null"]).config.run.name == "demo"
    for number, text in enumerate(("run: {name: }", "run:", "epochs: 2", "run: {name: null, seed: 3}")):
        path = tmp_path / f"mine{number}.yaml"
        path.write_text(text)
        assert recipe_config(str(path), {}).run.name == f"mine{number}"
        assert recipe_config(str(path), {"run": {"name": None}}).run.name == f"mine{number}"
        assert recipe_config(str(path), {"run.name": "other"}).run.name == "other"


def test_a_recipe_overrides_its_includes(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.yaml").write_text("data: {batch_size: 8, workers: 1}\noptimizer: {lr: 0.5}\n")
    (tmp_path / "parts" / "b.yaml").write_text("data: {workers: 3}\n")
    (tmp_path / "mine.yaml").write_text("include: [parts/a, parts/b.yaml]\noptimizer: {lr: 0.25}\n")
    assert load_recipe(str(tmp_path / "mine.yaml")) == {
        "data": {"batch_size": 8, "workers": 3},
        "optimizer": {"lr": 0.25},
    }


def test_a_methods_defaults_override_the_sections_and_the_recipe_overrides_both(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("objective: {method: sogclr, moving_average: {gamma_min: 0.5}}\n")
    average = parse([str(path), "--objective.moving_average.gamma_epochs=3"]).config.objective.moving_average
    assert (average.gamma, average.gamma_min, average.gamma_epochs) == ("constant", 0.5, 3)
    assert parse([str(path)]).config.objective.temperature.initial == 0.03


def test_a_pretrained_model_starts_at_its_own_temperature_and_bias(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {pretrained: a/model}\nobjective: {method: siglip}\n")
    tree = yaml.safe_load(dump(parse([str(path)]).config))["objective"]
    assert (tree["temperature"]["initial"], tree["siglip"]["bias"]) == (None, None)
    tree = yaml.safe_load(dump(parse([str(path), "--objective.siglip.bias=-3", "--model.pretrained="]).config))
    assert (tree["objective"]["temperature"]["initial"], tree["objective"]["siglip"]["bias"]) == (0.1, -3)


def test_sections_of_other_methods_apply_only_to_them() -> None:
    """A recipe's sections are ignored if a different method is chosen, and apply again to a method that reads them."""
    assert parse(["demo"]).config.objective.npn == NpnConfig()
    average = parse(["demo", "--objective.method=fastclip_v1"]).config.objective.moving_average
    assert average.gamma_epochs == 2
    again = parse(["demo_openclip", "--objective.method=neuclip"]).config.objective.npn
    assert again == parse(["demo", "--objective.method=neuclip"]).config.objective.npn
    assert again.prototypes == 1024
    assert set(yaml.safe_load(dump(parse(["demo_openclip"]).config))["objective"]) & {"npn", "moving_average"} == set()


def test_the_saved_config_of_another_method_has_the_default_temperature_rule(tmp_path: Path) -> None:
    path = tmp_path / "saved.yaml"
    path.write_text(dump(parse(["demo_openclip"]).config))
    config = parse([str(path), "--objective.method=neuclip_queue"]).config
    assert config.objective.temperature.rule == "learned"
    cleared = parse(["demo", "--objective.method=neuclip_queue", "--objective.temperature.rule=null"]).config
    assert cleared.objective.temperature.rule == "learned"


@pytest.mark.parametrize("cleared", ["null", "{}"])
def test_a_mapping_is_merged_unless_it_is_cleared(cleared: str, tmp_path: Path) -> None:
    options = parse(["demo", '--model.vision.options={"depth": 2}']).config.model.vision.options
    assert options["depth"] == 2 and options["patch_size"] == 16
    assert parse(["demo", f"--model.vision.options={cleared}"]).config.model.vision.options == {}
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"include: [demo]\nmodel:\n  vision: {{name: convnext_atto, options: {cleared}}}\n")
    vision = recipe_config(str(recipe), {}).model.vision
    assert (vision.name, vision.options, vision.image_size) == ("convnext_atto", {}, 64)
    later = recipe_config(str(recipe), {"model.vision.options": {"depth": 3}})
    assert later.model.vision.options == {"depth": 3}


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave the `~` of --NAME=~/PATH as it is, and so does YAML."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("include: [demo]\nrun: {output_dir: ~/runs}\nrecovery: {epochs: 1, reuse: ~/r}")
    options = ["--data.train=~/a.tar::~/b.tar", "--data.cache-dir=~/c", "--data.evaluation-sets=~/e", "--deepspeed=~/d"]
    config = parse(["~/mine.yaml", *options, "--run.remote=file://~/copy", "--model.text.tokenizer=~/t"]).config
    assert config.data.train == f"{tmp_path}/a.tar::{tmp_path}/b.tar"
    folders = [config.run.output_dir, config.recovery.reuse, config.data.cache_dir, config.data.evaluation_sets]
    assert folders == [tmp_path / name for name in ("runs", "r", "c", "e")]
    assert (config.deepspeed, config.model.text.tokenizer) == (f"{tmp_path}/d", f"{tmp_path}/t")
    assert config.run.remote == "file://~/copy"


@pytest.mark.parametrize(
    ("option", "value", "setting"),
    [
        ("optimizer.cooldown_steps", 5, {"optimizer": {"schedule": "wsd"}}),
        ("optimizer.momentum", 0.5, {"optimizer": {"name": "sgd"}}),
        ("data.evaluation_tasks", ["flickr"], {"data": {"evaluation_sets": "sets"}}),
        ("model.lora.alpha", 8, {"model": {"lora": {"rank": 2}, "vision": {"trainable": "frozen"}}}),
        ("recovery.loss", "gcl", {"recovery": {"epochs": 1}}),
        ("recovery.restore", ["moments"], {"recovery": {"reuse": "runs/other"}}),
    ],
)
def test_options_without_effect_are_refused(option: str, value: Any, setting: dict[str, Any]) -> None:
    config = recipe_config("demo", {option: value})
    assert validate(yaml.safe_load(dump(config))) == config, "the configs of earlier runs are read"
    with pytest.raises(UserError, match=rf"{option} has no effect without .*, or omit {option} \(or, .* its default, "):
        check_config(config, 1)
    check_config(recipe_config("demo", {**setting, option: value}), 1)


@pytest.mark.parametrize("option", ["data: {val", "run: {evaluate_every", "optimizer: {lr", "data: {captions"])
def test_yes_is_not_the_number_1(option: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{option}: yes}}")
    with pytest.raises(UserError, match="true is not a value of this option"):
        parse([str(path)])
    path.write_text("model: {activation_checkpointing: yes, text: {packed: yes}}\ndata: {drop_last: yes, val: no}")
    config = parse([str(path)]).config
    assert (config.model.activation_checkpointing, config.model.text.packed, config.data.drop_last) == (True,) * 3
    assert config.data.val == 0


def test_patterns_and_joined_paths_may_be_long() -> None:
    for train in ("::".join(f"/data/{number}.tar" for number in range(500)), "{" + ",".join(["a"] * 300) + "}.tar"):
        assert parse(["demo", f"--data.train={train}"]).config.data.train == train


def test_a_folder_of_an_unknown_user_is_not_created() -> None:
    for option in ("run.output_dir", "data.cache_dir"):
        with pytest.raises(UserError, match=f"{option}=~nosuchuser/x names a user that does not exist"):
            check_config(parse(["demo", f"--{option}=~nosuchuser/x"]).config, 1)


def test_every_recipe_says_what_it_trains() -> None:
    assert [name for name in recipe_names() if len(recipe_summary(name)) < 10] == []
    assert "default recipe" in recipe_summary("demo")
    assert recipe_summary("laion315m_fastclip_v3").endswith("(FastCLIP Table 7 and App. D).")
    assert "CC12M" in recipe_summary("lit_cc12m"), "a period after 'et al' ends no sentence"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["demo", "--data.bach-size=3"], "Unknown option --data.bach-size; did you mean --data.batch-size?"),
        (["demo", "--batch_size=3"], "did you mean --data.batch-size?"),
        (["demo", "--lr=1e-3"], "did you mean --optimizer.lr?"),
        *(
            (["demo", f"--run.name={name}"], "run.name")
            for name in ("..", "../x", "/x", "a/b", "a\nb", "\x1b[1m", "a*", "")
        ),
        (
            ["demo", "--run.name=" + 130 * "\u00e9"],
            "has 260 bytes in UTF-8, which is too long for",
        ),
        (["demo", "--deepspeed=" + 256 * "x"], "deepspeed: the path contains a name of more than 255 bytes"),
        (["demo", f"--run.output-dir=a/{256 * 'x'}/b"], "run.output_dir: the path contains a name of more than 255"),
        (["demo", "--gpu-memory=0", "--dry-run"], "gpu_memory='0': Input should be greater than 0"),
        (["demo", "--hostfile=hostfiles/8node"], "work only with --dry-run"),
        (["demo", "--data.batch_size=few"], "data.batch_size='few'"),
        (["demo", "--data.batch_size=1"], "greater than or equal to 2"),
        (["demo", "--data.decoder=zip"], "'simplejpeg' or 'pil'"),
        (["demo", "--model.text.heads=5"], "heads=5 does not divide width=128"),
        (["demo", "--objective.temperature.initial=3"], "initial=3.0 is outside"),
        (
            ["demo", "--objective.temperature.minimum=0.5", "--objective.temperature.maximum=0.2"],
            "0.5 is above maximum",
        ),
        (["dmeo"], "did you mean demo"),
        (["no-such"], "`neuclip-ds recipes` lists the recipes"),
        (["demo", "--optimizer.learning_rate=1e-3"], "did you mean --optimizer.lr?"),
        (["demo", "--optimizer.wd=0.1"], "did you mean --optimizer.weight-decay?"),
        (["demo", "--model.vision.name=null"], "model.vision.name=None"),
        (["demo", "--objective.method=openclp"], "did you mean openclip?"),
        (
            ["demo_openclip", "--objective.npn.lr=3"],
            "does not use objective.npn.lr; these methods do: neuclip",
        ),
        (
            ["demo", "--objective.method=siglip", "--objective.npn.lr=3"],
            "or choose one of these methods. siglip uses objective.siglip",
        ),
    ],
)
def test_mistakes_name_the_option_and_the_fix(options: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(options)
    assert words in str(caught.value)


def test_every_option_is_explained() -> None:
    assert [name for name, field in option_fields(Config) if not field.description] == []


def config(batch_size: int, micro_batch: int | None = None) -> Config:
    return Config.model_validate({"data": {"batch_size": batch_size, "micro_batch": micro_batch}})


def test_a_global_batch_is_divided_over_ranks_and_micro_batches() -> None:
    assert config(96).rank_batch(4) == 24
    assert config(96).micro_batch(4) == 24
    assert config(96, 8).micro_batch(4) == 8
    for batch_size, ranks, fix in ((255, 2, "254 or 256"), (3, 4, "4, or a different"), (10, 4, "8 or 12")):
        with pytest.raises(UserError, match=f"not divisible by the {ranks} ranks; use {fix}"):
            config(batch_size).rank_batch(ranks)
    for micro_batch, divisor in ((10, 8), (25, 24), (1000, 24)):
        with pytest.raises(UserError, match=rf"does not divide the rank's batch of 24 .*; use {divisor}\."):
            config(96, micro_batch).micro_batch(4)
