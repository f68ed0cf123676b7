"""The table of methods: the components, option sections and published defaults of each objective.

All contrastive methods share the feature gradient of

    L = scale/B sum_i [ w1_i g1_i + w2_i g2_i ],   g1_i = 1/(B-1) sum_{j != i} exp(l(s_ij - s_ii)/tau),   g2_i with s_ji

with w and the scale held constant. The comment above each row gives the method's loss and its estimate of w_i.
A new method needs a row in the table; a new estimator also needs a section in options.py and a module in normalizers/.
This module does not import torch, because `--help` reads the table.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from neuclip_ds.errors import UserError

Options = Mapping[str, Any]
"""Options under `objective`, nested as in a recipe."""

DEFAULT = "openclip"  # it has no settings that need tuning on a new dataset


@dataclass(frozen=True, kw_only=True)
class Method:
    """Components of one method, from which compose.py builds the objective."""

    normalizer: str | None
    """Module in normalizers/ whose `build` creates the estimator of w_i; None for SigLIP's loss, which has no w_i."""
    temperature: Literal["constant", "log", "robust", "rescaled", "individual", "rule"]
    """Rule for tau; `rule` leaves the choice to `objective.temperature.rule`."""
    scale: Literal["half", "one", "tau"] = "tau"
    """Leading factor of the loss."""
    pair_loss: Literal["identity", "over_batch", "hinge"] = "identity"
    """Pair loss l, and whether a sum over negatives is divided by B - 1 or, as in TuneCLIP, by B."""
    defaults: Options = field(default_factory=dict)
    """Published settings that differ from the defaults of the sections."""
    starts: Options = field(default_factory=dict)
    """Published initial values of scalars; the values of a pretrained checkpoint take precedence."""

    @property
    def sections(self) -> tuple[str, ...]:
        """Sections and options under `objective` that this method reads but some other methods do not."""
        own = _SECTIONS.get(self.normalizer, (str(self.normalizer),))
        return (*own, "hinge") if self.pair_loss == "hinge" else own

    def reads(self, option: str) -> bool:
        """Return whether the method reads a dotted option; all methods read options outside `SECTIONS`."""
        parts = option.split(".")
        return parts[0] != "objective" or parts[1] in self.sections or parts[1] not in SECTIONS


_SECTIONS: dict[str | None, tuple[str, ...]] = {  # by normalizer; others read the section of the same name
    "batch": (),
    None: ("siglip",),
    "moving_average": ("moving_average", "epoch_steps"),
    "amortized": ("amortized", "epoch_steps"),
    "pooled_queue": ("queue",),
}


def _tau(initial: float) -> Options:
    return {"temperature": {"initial": initial}}


_TUNED_GAMMA = {"gamma": "constant", "gamma_min": 0.6}  # for SogCLR and iSogCLR in FastCLIP's study of gamma
# TuneCLIP Table 7: we read "decay every 4 epochs" as the length of gamma's cosine
_TUNECLIP_GAMMA = {"gamma_min": 0.9, "gamma_epochs": 4}

METHODS: dict[str, Method] = {
    # The cross-entropy over the mini-batch (MBCL; Radford et al. 2021, Ilharco et al. 2021), w_i = 1/(1/(B-1) + g_i):
    #   1/2 1/B sum_i [ log(1 + sum_{j != i} exp((s_ij - s_ii)/tau)) + log(1 + sum_{j != i} exp((s_ji - s_ii)/tau)) ]
    # log(1/tau) follows this loss's gradient, with the encoders' learning rate and schedule, as in FastCLIP Table 7.
    "openclip": Method(normalizer="batch", temperature="log", scale="half", starts=_tau(0.07)),
    # SigLIP: a sigmoid for every pair instead of a softmax (Zhai et al. 2023, eq. 1), with a learned bias:
    #   -1/B sum_{i, j} log sigmoid(z_ij (s_ij/tau + bias)),   z_ij = 1 where i = j, else -1
    "siglip": Method(
        normalizer=None,
        temperature="log",
        starts={**_tau(0.1), "siglip": {"bias": -10.0}},
    ),
    # SogCLR (Yuan et al. 2022; FastCLIP eq. 1), w_i = 1/(eps + u_i): u_i is a moving average of g_i.
    #   tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ]   over the dataset
    "sogclr": Method(
        normalizer="moving_average",
        temperature="constant",
        defaults={"moving_average": _TUNED_GAMMA},
        starts=_tau(0.03),  # as tuned in FastCLIP's study of gamma
    ),
    # iSogCLR (Qiu et al. 2023; FastCLIP eq. 6-7, 9): SogCLR with a temperature for each sample and direction.
    #   1/n sum_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ],   g1_i at tau1_i
    "isogclr": Method(
        normalizer="moving_average",
        temperature="individual",
        # as tuned in FastCLIP's study of gamma
        defaults={"temperature": {"lr": 1e-2, "schedule": "constant", "rho": 9.0}, "moving_average": _TUNED_GAMMA},
        starts=_tau(0.03),
    ),
    # FastCLIP-v0 (eq. 8): the global contrastive loss without the leading tau; its gradient trains log(1/tau).
    #   1/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ]
    "fastclip_v0": Method(
        normalizer="moving_average",
        temperature="log",
        scale="one",
        starts=_tau(0.03),  # FastCLIP's study of temperatures; the README's script starts at 0.07
    ),
    # FastCLIP-v1 (eq. 1-2): SogCLR's loss with gamma on a cosine.
    "fastclip_v1": Method(
        normalizer="moving_average",
        temperature="constant",
        starts=_tau(0.03),  # FastCLIP's study of gamma; the README's script has 0.07
    ),
    # FastCLIP-v2 (eq. 2 and 9): iSogCLR's loss with gamma on a cosine, tuned as in FastCLIP's study of temperatures.
    "fastclip_v2": Method(
        normalizer="moving_average",
        temperature="individual",
        defaults={"temperature": {"schedule": "constant"}},
        starts=_tau(0.03),
    ),
    # FastCLIP-v3 (RGCL-g, eq. 10): the robust global contrastive loss with one learned temperature.
    #   tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ] + 2 rho tau
    # See FastCLIP Table 7, whose values of rho were tuned with the released code (objective.reference=released_code).
    "fastclip_v3": Method(
        normalizer="moving_average",
        temperature="robust",
        defaults={"temperature": {"schedule": "third_below_0.03"}},
        starts=_tau(0.07),
    ),
    # AmorLIP (arXiv 2505.18983, eq. 6, rescaled by tau), w_i = exp(s_ii/tau)/lambda_i: an MLP predicts the partition
    # function, lambda_i, from the feature.
    #   tau (-2 mean s_ii/tau + mean C1_i/lambda1_i + mean C2_i/lambda2_i) + rho tau
    #   C1_i = 1/(B-1) [ sum_{j != i} exp(s_ij/tau) + c exp(s_ii/tau) ],   lambda1_i = exp(MLP(e1_i)), held constant
    # The schedule of tau is from the README's script, which also sets positive_weight=1e-3 and
    # encoder_normalizer=combined; all other settings are the paper's.
    "amorlip": Method(
        normalizer="amortized",
        temperature="rescaled",
        defaults={"temperature": {"schedule": "third_below_0.03"}},
        starts=_tau(0.07),
    ),
    # NeuCLIP (ICLR 2026, eq. 10-12 and Algorithm 1), w_i = exp(-alpha_i): a network predicts the normalizers.
    #   tau/n sum_i sum_{1, 2} [ exp(-alpha_i) (eps + g_i) + alpha_i - 1 ] + 2 rho tau
    #   alpha1_i = log(eps + 1/m sum_k exp((cos(e1_i, W1_k) - s_ii)/tau)),   alpha2_i with e2_i and W2
    # tau's initial value and schedule are not published. We use 0.07, and the encoders' schedule because tau's learning
    # rate (NeuCLIP Table 3) is an eighth of the encoders' on every dataset.
    "neuclip": Method(normalizer="npn", temperature="rule", starts=_tau(0.07)),
    # InfoNCE over the dataset, with normalizers pooled from the batch and a queue (this project, with MoCo's queue).
    #   1/2n sum_i sum_{1, 2} alpha_i + log(n-1),   eps = 1/(n-1)
    #   alpha_i = log(eps + (g_i + kappa ghat_i)/(1 + kappa)),   ghat1_i = 1/m sum_k exp((e1_i . W_k - s_ii)/tau)
    # W contains the last m features of the other modality. With `temperature.rule=robust`, the scale is tau, eps is
    # `objective.eps`, and 2 rho tau is added.
    "neuclip_queue": Method(
        normalizer="pooled_queue",
        temperature="rule",
        defaults={"temperature": {"rule": "learned"}},
        starts=_tau(0.07),
    ),
    # TuneCLIP's loss without the hinge (GCL), for supervised captions (Flickr30k in the paper). The hinge's margin is
    # for false negatives, which are rare among supervised captions.
    #   tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   g1_i = 1/B sum_{j != i} exp((s_ij - s_ii)/tau)
    "gcl": Method(
        normalizer="moving_average",
        temperature="constant",
        pair_loss="over_batch",
        defaults={"moving_average": _TUNECLIP_GAMMA},
    ),
    # TuneCLIP's hinged loss (eq. 8), for fine-tuning after recovery has filled u (training/recovery.py); tau keeps the
    # checkpoint's value.
    #   the loss of gcl with g1_i = 1/B sum_{j != i} exp(l(s_ij - s_ii)/tau),   l(x) = max(x + margin, 0)^2
    "tuneclip": Method(
        normalizer="moving_average",
        temperature="constant",
        pair_loss="hinge",
        defaults={"moving_average": _TUNECLIP_GAMMA},
    ),
}
SECTIONS = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.sections))
"""Every section or option under `objective` that some methods read and others do not."""


def find_method(name: str) -> Method:
    """Return the method with this name, or raise a `UserError` that suggests the nearest name."""
    if not isinstance(name, str) or name not in METHODS:
        name = " ".join(str(name).split())[:80]
        nearest = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "choose one."
        raise UserError(f"objective.method={name} is unknown; the methods are {', '.join(METHODS)}; {hint}")
    return METHODS[name]


def method_of(options: Options) -> Method:
    """Return the method named in a tree of options under `objective`, or the default method."""
    return find_method(options.get("method", DEFAULT))
