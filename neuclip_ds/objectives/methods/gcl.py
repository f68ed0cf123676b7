"""TuneCLIP's global contrastive loss without the hinge, its supervised case (TuneCLIP, GCL).

    L = tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   g1_i = 1/B sum_{j != i} exp((s_ij - s_ii)/tau)

The margin is for false negatives, which supervised captions (the paper's are Flickr30k's) have few of. tau is constant.
"""

from neuclip_ds.objectives.method import Context, Objective, ObjectiveConfig
from neuclip_ds.objectives.sogclr_family import average_method, compose_average


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.pair_loss import OverBatch

    return compose_average(config, context, "constant", OverBatch())


METHOD = average_method(
    "constant",
    source="TuneCLIP, GCL",
    pair_loss="identity, sum over B",
    compose=compose,
    defaults={"moving_average": {"gamma_min": 0.9, "gamma_epochs": 4}},  # those of tuneclip
    search=None,  # fastclip_v1 but for the divisor
)
