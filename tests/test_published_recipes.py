"""Compare the shipped recipes with the papers' tables and with the docs page that lists the papers' experiments."""

import math
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from braceexpand import braceexpand

from neuclip_ds.config import CLIP_BPE, Config
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.launch import read_hostfile
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.planning import memory
from neuclip_ds.planning.activations import Activations
from neuclip_ds.planning.dry_run import print_dry_run
from neuclip_ds.recipe import parse, recipe_config, recipe_names

pytestmark = pytest.mark.usefixtures("quick_meta_models")
ROOT = Path(__file__).parents[1]


def encoders(
    batch_size: int,
    epochs_or_steps: float,
    lr: float,
    weight_decay: float,
    warmup_steps: int,
    eps_of_u: float,
    *,
    beta2: float = 0.98,
    eps: float = 1e-6,
) -> dict[str, Any]:
    """Return a row of FastCLIP Table 7 or NeuCLIP Tables 2 and 3; by default, with the betas and eps of ViTs."""
    row = {"name": "adamw", "batch_size": batch_size, "epochs_or_steps": epochs_or_steps, "eps_of_u": eps_of_u}
    row |= {"lr": lr, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
    return {**row, "betas": (0.9, beta2), "eps": eps}


ENCODERS = {
    "cc3m": encoders(1024, 37, 1e-3, 0.1, 10_000, 1e-14, beta2=0.999, eps=1e-8),  # ResNet-50
    "cc12m": encoders(2048, 33, 4e-4, 0.1, 10_000, 1e-14),
    "laion315m": encoders(5120, 42, 2e-4, 0.2, 13_000, 1e-6),
    "dfn14m": encoders(4096, 78_125, 5e-4, 0.2, 500, 1e-14),
    "dfn192m": encoders(5120, 253_907, 3.125e-4, 0.2, 500, 1e-6),
    "dfn1b": encoders(5120, 195_313, 3.125e-4, 0.2, 500, 1e-6),
    "dfn2b": encoders(5120, 9.5, 2e-4, 0.2, 13_000, 1e-6),  # not published; as laion315m, except for the epochs
}
PUBLISHED = [name for name in recipe_names() if name.split("_")[0] in ENCODERS]  # the other recipes are our own
# differences from the dataset's row: AmorLIP's epochs and weight decay, and the optimizers of FastCLIP Table 10
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cc3m_amorlip": {"epochs_or_steps": 30},
    "cc12m_amorlip": {"weight_decay": 0.2},
    "cc12m_amorlip_released_code": {"weight_decay": 0.2},
    "dfn192m_drrho": {"epochs_or_steps": 7, "eps_of_u": 1e-4},  # the script of DRRho-CLIP
    "cc3m_fastclip_v3_lamb": {"name": "lamb", "lr": 2e-3, "weight_decay": 0.1},
    "cc12m_fastclip_v3_lamb": {"name": "lamb", "lr": 2e-3, "weight_decay": 0.1},
    "cc3m_fastclip_v3_lion": {"name": "lion", "lr": 2e-4, "weight_decay": 0.3},
    "cc12m_fastclip_v3_lion": {"name": "lion", "lr": 1e-4, "weight_decay": 0.3},
    "cc3m_fastclip_v3_sgdm": {"name": "sgd", "lr": 1.0, "weight_decay": 3e-6, "momentum": 0.9},
    "cc12m_fastclip_v3_sgdm": {"name": "sgd", "lr": 2.0, "weight_decay": 3e-6, "momentum": 0.9},
}
# FastCLIP Tables 12 to 14: batch size, lr, and lr of FastCLIP-v3's tau, scaled linearly to 1, 4 and 8 nodes
NODES = {
    "cc3m": {"1node": (512, 5e-4, 1e-4), "4nodes": (2048, 2e-3, 4e-4), "8nodes": (4096, 4e-3, 8e-4)},
    "cc12m": {"1node": (1024, 2e-4, 5e-5), "4nodes": (4096, 8e-4, 2e-4), "8nodes": (8192, 1.6e-3, 4e-4)},
}
EXCEPTIONS |= {
    f"{data}_{method}_{nodes}": {"batch_size": batch, "lr": lr}
    for data, by_nodes in NODES.items()
    for nodes, (batch, lr, _) in by_nodes.items()
    for method in ("openclip", "fastclip_v3")
}
# initial tau, lr of tau, rho
TEMPERATURES: dict[str, tuple[float, float | None, Any]] = {
    "cc3m_isogclr": (0.03, 1e-2, 9.0),
    "cc12m_isogclr": (0.03, 1e-2, 9.0),
    "cc3m_fastclip_v2": (0.03, 1e-2, 7.0),
    "cc12m_fastclip_v2": (0.03, 1e-4, 8.5),
    "cc3m_fastclip_v2_gamma_study": (0.03, 1e-2, 9.0),
    "cc12m_fastclip_v2_gamma_study": (0.03, 1e-2, 9.0),
    "cc3m_fastclip_v3": (0.07, 2e-4, 6.5),
    "cc12m_fastclip_v3": (0.07, 1e-4, 8.5),
    "laion315m_fastclip_v3": (0.07, 5e-5, 16.0),
    "dfn2b_fastclip_v3": (0.07, 5e-5, 16.0),
    "cc3m_neuclip": (0.07, 1.25e-4, 6.5),
    "cc12m_neuclip": (0.07, 5e-5, 8.5),
    "dfn14m_neuclip": (0.07, 6.25e-5, 11.0),
    "dfn192m_neuclip": (0.07, 3.9e-5, 11.0),
    "dfn1b_neuclip": (0.07, 3.9e-5, 11.0),
    "cc3m_amorlip": (0.07, 2e-4, [6.5, 6.5, 6.5, -8.0]),
    "cc12m_amorlip": (0.07, 1e-4, [8.5, 8.5, -8.5]),
    "cc12m_amorlip_released_code": (0.07, 1e-4, [8.5, -8.5, -8.5]),
    # not published: rho from NeuCLIP or from AmorLIP on CC12M, and a quarter of the encoders' lr
    "dfn14m_fastclip_v3": (0.07, 1.25e-4, 11.0),
    "dfn192m_fastclip_v3": (0.07, 7.8e-5, 11.0),
    "dfn1b_fastclip_v3": (0.07, 7.8e-5, 11.0),
    "dfn14m_amorlip": (0.07, 1.25e-4, [8.5, 8.5, -8.5]),
    "dfn192m_amorlip": (0.07, 7.8e-5, [8.5, 8.5, -8.5]),
    "dfn1b_amorlip": (0.07, 7.8e-5, [8.5, 8.5, -8.5]),
}
TEMPERATURES |= {
    f"{data}_fastclip_v3_{nodes}": (0.07, lr, TEMPERATURES[f"{data}_fastclip_v3"][2])
    for data, by_nodes in NODES.items()
    for nodes, (_, _, lr) in by_nodes.items()
}
FIXED_OR_OF_THE_ENCODERS = {"openclip": 0.07, "siglip": 0.1, "sogclr": 0.03, "fastclip_v0": 0.03, "fastclip_v1": 0.03}
# schedule and minimum of gamma in recipes that do not use FastCLIP's cosine to 0.2
GAMMAS = {
    "cc3m_sogclr": ("constant", 0.6),
    "cc12m_sogclr": ("constant", 0.6),
    "cc3m_isogclr": ("constant", 0.6),
    "cc12m_isogclr": ("constant", 0.8),
    "cc12m_fastclip_v2_gamma_study": ("cosine", 0.6),
    "cc3m_fastclip_v3_constant_gamma": ("constant", 0.6),
    "cc12m_fastclip_v3_constant_gamma": ("constant", 0.6),
    "laion315m_fastclip_v3": ("cosine", 0.8),
    "dfn2b_fastclip_v3": ("cosine", 0.8),
    "dfn192m_fastclip_v3": ("cosine", 0.8),
    "dfn1b_fastclip_v3": ("cosine", 0.8),
}
GAMMA_EPOCHS = {"cc3m": 18, "cc12m": 16, "laion315m": 10, "dfn14m": 12, "dfn192m": 3, "dfn1b": 1, "dfn2b": 2}
# number of parameters without the temperature -> datasets with that model (open_clip's RN50, ViT-B-32, ViT-B-16)
MODELS = {
    102_007_136: ("cc3m",),
    151_277_312: ("cc12m", "dfn14m"),
    149_620_736: ("laion315m", "dfn192m", "dfn1b"),
}


@cache
def config_of(name: str) -> Config:
    return recipe_config(name, {})


def data_of(name: str) -> str:
    return name.split("_")[0]


def test_encoders_are_trained_as_published() -> None:
    for name in PUBLISHED:
        config = config_of(name)
        expected = ENCODERS[data_of(name)] | EXCEPTIONS.get(name, {})
        assert config.data.batch_size == expected.pop("batch_size"), name
        assert (config.max_steps or config.epochs) == expected.pop("epochs_or_steps"), name
        assert config.objective.eps == expected.pop("eps_of_u"), name
        assert {key: getattr(config.optimizer, key) for key in expected} == expected, name
        assert config.model.text.tokenizer == CLIP_BPE, name
        assert config.data.val == "", f"{name}: all pairs train"


@pytest.mark.parametrize(("data", "pairs"), [("cc3m", 128), ("cc12m", 256)])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_a_gpu_has_the_same_number_of_pairs_on_any_number_of_nodes(data: str, pairs: int, nodes: int) -> None:
    """As in FastCLIP section 6 and Tables 12 to 22, nodes have 4 GPUs; recipes without a suffix are for 2 nodes."""
    slots = read_hostfile(ROOT / "hostfiles" / f"{nodes}node4gpu")
    assert list(slots.values()) == [4] * nodes
    suffix = {1: "_1node", 2: ""}.get(nodes, f"_{nodes}nodes")
    for method in ("openclip", "fastclip_v3"):
        assert config_of(f"{data}_{method}{suffix}").rank_batch(4 * nodes) == pairs


def test_a_hostfile_with_a_byte_order_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("gpu01 slots=4\n", encoding="utf-8-sig")
    with pytest.raises(UserError, match="byte order mark"):
        read_hostfile(tmp_path / "hostfile")


def test_temperatures_are_as_published() -> None:
    for name in PUBLISHED:
        config = config_of(name)
        tau = config.objective.temperature
        if name == "dfn192m_drrho":
            wanted = (0.01, None, 0.0)
        elif config.objective.method in FIXED_OR_OF_THE_ENCODERS:
            wanted = (FIXED_OR_OF_THE_ENCODERS[config.objective.method], None, 0.0)
        else:  # a variant of a recipe has the recipe's temperature unless the table lists the variant
            wanted = TEMPERATURES.get(name) or TEMPERATURES[f"{data_of(name)}_{config.objective.method}"]
        assert (tau.initial, tau.lr, tau.rho) == wanted, name


def test_tau_uses_the_optimizer_of_the_encoders() -> None:
    """Tau uses the optimizer in FastCLIP Table 10; for LAMB that is Adam, because LAMB's trust ratio for tau is 1."""
    wanted = {"lion": "lion", "sgdm": "sgd", "lamb": "adam"}
    for data in ("cc3m", "cc12m"):
        for suffix, optimizer in wanted.items():
            assert config_of(f"{data}_fastclip_v3_{suffix}").objective.temperature.optimizer == optimizer


def test_gamma_is_as_published() -> None:
    for name in PUBLISHED:
        if re.search("sogclr|fastclip", name):
            average = config_of(name).objective.moving_average
            assert (average.gamma, average.gamma_min) == GAMMAS.get(name, ("cosine", 0.2)), name
            assert average.gamma_epochs == GAMMA_EPOCHS[data_of(name)], name


def test_drrho_has_a_reference_and_a_constant_gamma() -> None:
    objective = config_of("dfn192m_drrho").objective
    average = objective.moving_average
    assert (objective.method, average.gamma_min, average.gamma_epochs) == ("fastclip_v1", 1.0, 7)
    assert objective.reference_model is not None


def test_neuclips_network_is_as_published() -> None:
    for data in ("cc3m", "cc12m", "dfn14m", "dfn192m", "dfn1b"):
        npn = config_of(f"{data}_neuclip").objective.npn
        assert (npn.optimizer, npn.rate, npn.weight_decay) == ("adagrad", 1.0, 0.0)
        assert (npn.prototypes, npn.redraw_every, npn.inner_steps) == (4096, 500, 10)


def test_amorlip_is_as_published() -> None:
    """The last value of a row is T in the schedule of beta, the number of epochs of the run."""

    def row(name: str) -> tuple[float, ...]:
        network = config_of(name).objective.amortized
        return (
            network.width,
            network.inner_steps,
            network.target_every,
            network.online_every,
            network.ema,
            network.previous_weight,
            network.lr,
            network.previous_epochs,
        )

    large = (1.0, 3, 2, 1, 0.92, 0.8, 1e-3)
    assert row("cc3m_amorlip") == (0.5, 3, 2, 8, 0.999, 0.8, 1e-3, 30)
    assert row("cc12m_amorlip") == (*large, 33)
    scales = [config_of(f"cc12m_amorlip{end}").objective.reference for end in ("", "_released_code")]
    assert scales == ["paper", "released_code"]
    for data, pairs in (("dfn14m", 13.7e6), ("dfn192m", 192e6), ("dfn1b", 1.0e9)):
        name = f"{data}_amorlip"
        steps_per_epoch = pairs / ENCODERS[data]["batch_size"]
        if data == "dfn1b":  # each pair is seen once; an epoch is as long as CC12M's
            steps_per_epoch = config_of(name).objective.epoch_steps or 0
            assert steps_per_epoch == 8_059_642 // 2048
        assert row(name) == (*large, math.ceil(ENCODERS[data]["epochs_or_steps"] / steps_per_epoch - 1e-3))


def test_every_recipe_builds_its_loss() -> None:
    for name in PUBLISHED:
        config = config_of(name)
        loss_fn = ContrastiveLoss(config.objective, dim=config.model.embed_dim, samples=1000, steps_per_epoch=100)
        assert all(value.isfinite().all() for value in loss_fn.function.replicated_state().values()), name


@pytest.mark.parametrize("parameters", MODELS)
def test_models_are_the_published_ones(
    parameters: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run builds the models on the meta device, and then fails because the data is missing."""
    monkeypatch.setattr(memory, "count_activations", lambda *_: Activations(0, 0))  # the count takes seconds
    config, *others = (config_of(f"{data}_openclip") for data in MODELS[parameters])
    assert all(other.model == config.model for other in others)
    with pytest.raises(UserError, match="training data"):
        print_dry_run(config, RankEnvironment(0, 0, 1), None)
    assert f"= {parameters:,} parameters" in capsys.readouterr().out


# TuneCLIP Table 7: checkpoint, global batch size over 8 GPUs (not published for ViT-H/14)
FINE_TUNED = {
    "vitb32_tuneclip": ("openai/clip-vit-base-patch32", 512 * 8),
    "vitb16_tuneclip": ("openai/clip-vit-base-patch16", 256 * 8),
    "laion_vitb32_tuneclip": ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", 512 * 8),
    "siglip_vitb16_tuneclip": ("google/siglip-base-patch16-224", 256 * 8),
    "vith14_tuneclip": ("open_clip:ViT-H-14-quickgelu/dfn5b", 256 * 8),
}


@pytest.mark.parametrize("name", FINE_TUNED)
def test_fine_tuning_is_as_published(name: str) -> None:
    config = config_of(name)
    objective, optimizer = config.objective, config.optimizer
    assert (config.model.pretrained, config.data.batch_size) == FINE_TUNED[name]
    assert config.data.workers == 6
    hinge = objective.hinge
    assert (objective.method, hinge.margin) == ("tuneclip", 0.1)
    assert objective.temperature.initial is None  # taken from the checkpoint
    average = objective.moving_average
    assert (average.gamma, average.gamma_min, average.gamma_epochs) == ("cosine", 0.9, 4)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas) == (1e-5, 0.02, (0.9, 0.98))
    assert (config.recovery.epochs, config.epochs) == (5, 5)


@pytest.mark.parametrize(
    ("name", "temperature"), [("vitb32", 0.01), ("vitb16", 0.01), ("laion_vitb32", 0.01), ("siglip_vitb16", 0.0085)]
)
def test_baselines_of_fine_tuning_recover_nothing_and_keep_tau(name: str, temperature: float) -> None:
    """As in TuneCLIP Tables 9 and 16, baselines differ from TuneCLIP only in the loss and in having no recovery."""
    tuned = config_of(f"{name}_tuneclip")
    for baseline, method in (("openclip", "openclip"), ("fastclip", "gcl")):
        config = config_of(f"{name}_{baseline}")
        assert config.objective.method == method
        assert config.recovery.epochs == 0
        loss_fn = ContrastiveLoss(
            config.objective, dim=512, samples=1000, steps_per_epoch=100, encoder_temperature=temperature
        )
        is_constant = "temperature.theta" not in loss_fn.function.replicated_state()
        assert is_constant or config.objective.temperature.lr == 0
        assert loss_fn.temperature == pytest.approx(temperature)  # the bounds for a learned tau do not change it
        for part in ("model", "data", "optimizer", "epochs"):
            assert getattr(config, part) == getattr(tuned, part)


@pytest.mark.parametrize("name", ["vitb32", "vitb16", "siglip_vitb16"])
def test_the_supervised_form_differs_in_loss_and_captions(name: str) -> None:
    plain, supervised = config_of(f"{name}_tuneclip"), config_of(f"{name}_gcl")
    assert supervised.objective.model_copy(update={"method": "tuneclip"}) == plain.objective
    assert (supervised.objective.method, supervised.data.captions) == ("gcl", ["txt:lines"])
    assert (supervised.recovery, supervised.optimizer) == (plain.recovery, plain.optimizer)


PAGE = (ROOT / "docs" / "tutorials" / "papers.md").read_text(encoding="utf-8")
EXPERIMENTS = re.findall(r"^\| .* \| `(.*)` \|$", PAGE.split("| experiment |")[1], re.MULTILINE)  # second column
COMMANDS = [shlex.split(cell)[1:] for cell in EXPERIMENTS if cell.startswith("train.py ")]


def test_the_page_of_experiments_lists_every_published_recipe() -> None:
    listed: set[str] = set()
    for cell in EXPERIMENTS:
        if not cell.startswith("train.py "):
            listed |= set(braceexpand(cell))
    papers = {name for name in recipe_names() if re.match("cc|dfn|laion|vit|siglip", name)}
    assert listed == papers - {"vitb32_gcl", "vith14_openclip"}  # recipes that are not from a paper


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_experiment_of_the_page_changes_its_recipe(command: list[str]) -> None:
    """Removing any one option from the command changes the config."""
    recipe, *options = command
    config = parse(command).config
    for removed in options:
        others = [option for option in options if option != removed]
        assert (parse([recipe, *others]).config if others else config_of(recipe)) != config
