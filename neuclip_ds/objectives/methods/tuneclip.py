"""TuneCLIP's hinged global contrastive loss, for fine-tuning after the recovery of statistics (TuneCLIP eq. 8).

    L = tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   g1_i = 1/B sum_{j != i} exp(l(s_ij - s_ii)/tau)
    l(x) = max(x + margin, 0)^power

Pairs beyond the margin give no gradient (pair_loss.Hinge). w_i = 1/(eps + u_i), where recovery has filled u
(training/recovery.py), and tau stays at the checkpoint's.
"""

from pydantic import Field

from neuclip_ds.objectives.method import Context, Objective, ObjectiveConfig, Search
from neuclip_ds.objectives.sogclr_family import SECTIONS, average_method, compose_average
from neuclip_ds.section import Section


class HingeConfig(Section):
    margin: float = Field(0.1, ge=0)
    """Margin m of TuneCLIP's pair loss max(s_ij - s_ii + m, 0)^power."""
    power: float = Field(2.0, ge=1)
    """Exponent of the pair loss; TuneCLIP eq. 8 squares."""


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.pair_loss import Hinge

    hinge = config.section(HingeConfig)
    return compose_average(config, context, "constant", Hinge(hinge.margin, hinge.power))


METHOD = average_method(
    "constant",
    source="TuneCLIP eq. 8",
    pair_loss="hinge max(x + 0.1, 0)^2, sum over B",
    compose=compose,
    sections={**SECTIONS, "hinge": HingeConfig},
    # TuneCLIP Table 7: "decay every 4 epochs" is read as the length of gamma's cosine, "margin smoothing 2.0" as power
    defaults={"moving_average": {"gamma_min": 0.9, "gamma_epochs": 4}},
    search=Search({"moving_average.gamma_min": 0.9}),
)
