"""FastCLIP-v1: SogCLR's loss with gamma on a cosine (FastCLIP eq. 1-2).

L = tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   w_i = 1/(eps + u_i), tau constant
"""

from neuclip_ds.objectives.sogclr_family import average_method

METHOD = average_method(
    "constant",
    source="FastCLIP eq. 1-2",
    # FastCLIP's study of gamma. The README's script has 0.07, the code no factor tau (objective.scale=released_code)
    starts={"temperature": {"initial": 0.03}},
)
