"""FastCLIP-v3: the robust global contrastive loss with one learned temperature (RGCL-g, FastCLIP eq. 10).

    L = tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ] + 2 rho tau,   w_i = 1/(eps + u_i), gamma on a cosine

tau follows dL/dtau with u in place of g under the logarithms (temperature.RobustTemperature).
"""

from neuclip_ds.objectives.method import Search
from neuclip_ds.objectives.sogclr_family import TEST_OPTIONS, average_method

METHOD = average_method(
    "robust",
    source="FastCLIP eq. 10",
    # FastCLIP Table 7. Its rho were tuned with the released code, which counts the data term of tau's gradient twice
    # (objective.temperature.data_term=released_code)
    defaults={"temperature": {"schedule": "third_below_0.03"}},
    starts={"temperature": {"initial": 0.07}},
    test_options={
        **TEST_OPTIONS,
        "drift": {"moving_average": {"gamma_min": 0.3, "gamma_epochs": 2, "drift_rate": 0.4}},
    },
    search=Search({"temperature.rho": 6.5}),
)
