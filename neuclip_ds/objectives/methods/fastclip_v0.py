"""FastCLIP-v0: the global contrastive loss without its leading tau, which is learned (FastCLIP eq. 8).

    L = 1/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   w_i = 1/(eps + u_i), gamma on a cosine

log(1/tau) follows the gradient of L.
"""

from __future__ import annotations

from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig, Search
from neuclip_ds.objectives.sogclr_family import COSINE, SECTIONS, TEST_OPTIONS, compose_average


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.composed import scale_one
    from neuclip_ds.objectives.temperature import LogTemperature

    return compose_average(config, context, LogTemperature(config.temperature, context), scale_one)


METHOD = Method(
    source="FastCLIP eq. 8",
    pair_loss="identity",
    normalizer=COSINE,
    scale="1",
    temperature="learnable, gradient of the loss",
    compose=compose,
    sections=SECTIONS,
    starts={"temperature": {"initial": 0.03}},  # FastCLIP's study of temperatures; the README's script starts at 0.07
    test_options=TEST_OPTIONS,
    search=Search(),
)
