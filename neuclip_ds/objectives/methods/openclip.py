"""OpenCLIP's loss: the cross-entropy over the mini-batch (MBCL; Radford et al. 2021, Ilharco et al. 2021).

    L = 1/2 1/B sum_i [ log(1 + sum_{j != i} exp((s_ij - s_ii)/tau)) + log(1 + sum_{j != i} exp((s_ji - s_ii)/tau)) ]

Its gradient is the common one with w_i = 1/(1/(B-1) + g_i) and scale 1/2 (normalizers/batch.py). tau is learned through
log(1/tau) by the gradient of L.
"""

from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig, Search


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.composed import ContrastiveObjective, scale_half
    from neuclip_ds.objectives.normalizers.batch import BatchNormalizer
    from neuclip_ds.objectives.pair_loss import PairLoss
    from neuclip_ds.objectives.temperature import LogTemperature

    temperature = LogTemperature(config.temperature, context)
    return ContrastiveObjective(config, context, PairLoss(), BatchNormalizer(), temperature, scale_half)


METHOD = Method(
    source="Radford et al. 2021",
    normalizer="this batch: 1/(1/(B-1) + g_i)",
    scale="1/2",
    temperature="learnable through log(1/tau), in [0.01, 1]",
    compose=compose,
    # the baseline of FastCLIP Table 7: tau is learned at the encoders' learning rate and schedule
    starts={"temperature": {"initial": 0.07}},
    search=Search(),
)
