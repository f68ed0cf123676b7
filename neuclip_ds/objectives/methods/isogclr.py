"""iSogCLR: SogCLR with a temperature for each sample and direction (Qiu et al. 2023; FastCLIP eq. 6-7, 9).

    L = 1/n sum_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ]

g1_i is taken at tau1_i, and w_i = 1/(eps + u_i) with a constant gamma. Each tau_i has its own Adam
(individual_temperature.py).
"""

from neuclip_ds.objectives.method import Search
from neuclip_ds.objectives.sogclr_family import CONSTANT, CONSTANT_GAMMA, INDIVIDUAL, TUNED_GAMMA, average_method

METHOD = average_method(
    "individual",
    source="Qiu et al. 2023; FastCLIP eq. 9",
    normalizer=CONSTANT,
    # as tuned in FastCLIP's study of gamma; its code has no tau_i before the loss (objective.scale=released_code) and
    # another Adam (objective.temperature.individual=released_code)
    defaults={"temperature": {"lr": 1e-2, "schedule": "constant", "rho": 9.0}, "moving_average": TUNED_GAMMA},
    starts={"temperature": {"initial": 0.03}},
    search=Search({**INDIVIDUAL, **CONSTANT_GAMMA}),
)
