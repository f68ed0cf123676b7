"""FastCLIP-v0: the global contrastive loss without its leading tau, which is learned (FastCLIP eq. 8).

    L = 1/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   w_i = 1/(eps + u_i), gamma on a cosine

log(1/tau) follows the gradient of L.
"""

from neuclip_ds.objectives.sogclr_family import average_method

METHOD = average_method(
    "log",
    source="FastCLIP eq. 8",
    starts={"temperature": {"initial": 0.03}},  # FastCLIP's study of temperatures; the README's script starts at 0.07
)
