"""TuneCLIP's global contrastive loss without the hinge, for images with labels (TuneCLIP, GCL).

    L = tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   g1_i = 1/B sum_{j != i} exp((s_ij - s_ii)/tau)

A caption made of a class's name is never a false negative of another class, so no margin is needed. tau is constant.
"""

from __future__ import annotations

from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig
from neuclip_ds.objectives.sogclr_family import COSINE, SECTIONS, TEST_OPTIONS, compose_average


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.pair_loss import OverBatch
    from neuclip_ds.objectives.temperature import ConstantTemperature

    temperature = ConstantTemperature(config.temperature, context)
    return compose_average(config, context, temperature, pair_loss=OverBatch())


METHOD = Method(
    source="TuneCLIP, GCL",
    pair_loss="identity, sum over B",
    normalizer=COSINE,
    scale="tau",
    temperature="constant",
    compose=compose,
    sections=SECTIONS,
    defaults={"moving_average": {"gamma_min": 0.9, "gamma_epochs": 4}},  # those of tuneclip
    test_options=TEST_OPTIONS,
    search=None,  # fastclip_v1 but for the divisor
)
