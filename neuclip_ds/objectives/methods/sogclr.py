"""SogCLR: the global contrastive loss with a moving average of each normaliser (Yuan et al. 2022; FastCLIP eq. 1).

    L = tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ]   over the data set,  w_i = 1/(eps + u_i)

u_i averages g_i over the sample's visits with a constant gamma, and tau is constant.
"""

from neuclip_ds.objectives.method import Search
from neuclip_ds.objectives.sogclr_family import CONSTANT, CONSTANT_GAMMA, TUNED_GAMMA, average_method

METHOD = average_method(
    "constant",
    source="Yuan et al. 2022",
    normalizer=CONSTANT,
    defaults={"moving_average": TUNED_GAMMA},
    starts={"temperature": {"initial": 0.03}},  # as tuned in FastCLIP's study of gamma
    search=Search(CONSTANT_GAMMA),
)
