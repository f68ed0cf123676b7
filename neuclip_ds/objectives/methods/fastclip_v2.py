"""FastCLIP-v2: iSogCLR's loss with gamma on a cosine (FastCLIP eq. 2 and 9).

L = 1/n sum_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ],   w_i = 1/(eps + u_i)
"""

from __future__ import annotations

from neuclip_ds.objectives.method import Method, Search
from neuclip_ds.objectives.methods.isogclr import compose
from neuclip_ds.objectives.sogclr_family import COSINE, INDIVIDUAL, SECTIONS, TEST_OPTIONS

METHOD = Method(
    source="FastCLIP eq. 2 and 9",
    pair_loss="identity",
    normalizer=COSINE,
    scale="tau_i",
    temperature="one for each sample and direction",
    compose=compose,
    sections=SECTIONS,
    # as tuned in FastCLIP's study of temperatures; the released code differs as for isogclr
    defaults={"temperature": {"schedule": "constant"}},
    starts={"temperature": {"initial": 0.03}},
    test_options=TEST_OPTIONS,
    search=Search(INDIVIDUAL),
)
