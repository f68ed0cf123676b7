"""SogCLR: the global contrastive loss with a moving average of each normaliser (Yuan et al. 2022; FastCLIP eq. 1).

    L = tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ]   over the data set,  w_i = 1/(eps + u_i)

u_i averages g_i over the sample's visits with a constant gamma, and tau is constant.
"""

from __future__ import annotations

from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig, Search
from neuclip_ds.objectives.sogclr_family import (
    CONSTANT,
    CONSTANT_GAMMA,
    SECTIONS,
    TEST_OPTIONS,
    TUNED_GAMMA,
    compose_average,
)


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.temperature import ConstantTemperature

    return compose_average(config, context, ConstantTemperature(config.temperature, context))


METHOD = Method(
    source="Yuan et al. 2022",
    pair_loss="identity",
    normalizer=CONSTANT,
    scale="tau",
    temperature="constant",
    compose=compose,
    sections=SECTIONS,
    defaults={"moving_average": TUNED_GAMMA},
    starts={"temperature": {"initial": 0.03}},  # as tuned in FastCLIP's study of gamma
    test_options=TEST_OPTIONS,
    search=Search(CONSTANT_GAMMA),
)
