"""FastCLIP-v2: iSogCLR's loss with gamma on a cosine (FastCLIP eq. 2 and 9).

L = 1/n sum_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ],   w_i = 1/(eps + u_i)
"""

from neuclip_ds.objectives.method import Search
from neuclip_ds.objectives.sogclr_family import INDIVIDUAL, average_method

METHOD = average_method(
    "individual",
    source="FastCLIP eq. 2 and 9",
    # as tuned in FastCLIP's study of temperatures; the released code differs as for isogclr
    defaults={"temperature": {"schedule": "constant"}},
    starts={"temperature": {"initial": 0.03}},
    search=Search(INDIVIDUAL),
)
