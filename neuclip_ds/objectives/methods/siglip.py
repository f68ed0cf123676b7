"""SigLIP: a sigmoid for every pair instead of a softmax (Zhai et al. 2023, eq. 1; sigmoid.py).

    L = -1/B sum_{i, j} log sigmoid(z_ij (s_ij / tau + bias)),   z_ij = 1 where i = j, else -1

There are no normalisers. tau and the bias are learned by the gradient of L.
"""

from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig, Search
from neuclip_ds.section import Section


class SiglipConfig(Section):
    bias: float | None = None
    """Learned bias of the logits at step 0. By default a pretrained checkpoint's, else -10."""


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.sigmoid import SigmoidObjective

    return SigmoidObjective(config, config.section(SiglipConfig).bias, context)


METHOD = Method(
    source="Zhai et al. 2023, eq. 1",
    pair_loss="sigmoid of every pair",
    normalizer=None,
    scale="-",
    temperature="learnable, with a learnable bias",
    compose=compose,
    sections={"siglip": SiglipConfig},
    # log(1/tau) starts at log 10 and the bias at -10
    starts={"temperature": {"initial": 0.1}, "siglip": {"bias": -10.0}},
    search=Search({"temperature.initial": 0.1}, "siglip.bias", (-10.0, -5.0)),
)
