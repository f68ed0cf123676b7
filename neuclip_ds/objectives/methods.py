"""The table of methods: the parts of each objective, the sections of options that it reads, its published defaults.

All contrastive methods have the feature gradient of

    L = scale/B sum_i [ w1_i g1_i + w2_i g2_i ],   g1_i = 1/(B-1) sum_{j != i} exp(l(s_ij - s_ii)/tau),   g2_i likewise

with w and the scale held constant. The equation above a row is its loss, w_i its estimate of the weights. A new method
needs a row here, a section in options.py, and a module in normalizers/ if its estimator is new. This module does not
import torch, so that `--help` can read every method.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from neuclip_ds.errors import UserError

Options = Mapping[str, Any]
"""Options below `objective.`, as a recipe nests them."""

DEFAULT = "openclip"  # it has no setting that a new data set would need to tune


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method, as compose.py builds it."""

    normalizer: str | None
    """Module of normalizers/ whose `build` makes the estimator of w_i; None for SigLIP's loss, which has none."""
    temperature: Literal["constant", "log", "robust", "rescaled", "individual", "rule"]
    """Rule for tau; `rule` leaves the choice to `objective.temperature.rule`."""
    scale: Literal["half", "one", "tau"] = "tau"
    """Leading factor of the loss."""
    pair_loss: Literal["identity", "over_batch", "hinge"] = "identity"
    """Pair loss l, and whether a sum over negatives is divided by B - 1 or, as in TuneCLIP, by B."""
    defaults: Options = field(default_factory=dict)
    """Published settings where they differ from the sections' defaults."""
    starts: Options = field(default_factory=dict)
    """Published initial values of scalars; a pretrained checkpoint's own values take precedence."""

    @property
    def sections(self) -> tuple[str, ...]:
        """Sections below `objective.` that the method reads, and options there that not every method reads."""
        own = _SECTIONS.get(self.normalizer, (str(self.normalizer),))
        return (*own, "hinge") if self.pair_loss == "hinge" else own

    def reads(self, option: str) -> bool:
        """Whether the method reads a dotted option; options outside methods' sections are read by all."""
        parts = option.split(".")
        return parts[0] != "objective" or parts[1] in self.sections or parts[1] not in SECTIONS


_SECTIONS: dict[str | None, tuple[str, ...]] = {  # by normalizer, unless it reads only the section of its name
    "batch": (),
    None: ("siglip",),
    "moving_average": ("moving_average", "epoch_steps"),
    "amortized": ("amortized", "epoch_steps"),
    "pooled_queue": ("queue",),
}


def _tau(initial: float) -> Options:
    return {"temperature": {"initial": initial}}


_TUNED_GAMMA = {"gamma": "constant", "gamma_min": 0.6}  # for SogCLR and iSogCLR in FastCLIP's study of gamma
# TuneCLIP Table 7: "decay every 4 epochs" is read as the length of gamma's cosine
_TUNECLIP_GAMMA = {"gamma_min": 0.9, "gamma_epochs": 4}

METHODS: dict[str, Method] = {
    # The cross-entropy over the mini-batch (MBCL; Radford et al. 2021, Ilharco et al. 2021), w_i = 1/(1/(B-1) + g_i):
    #   1/2 1/B sum_i [ log(1 + sum_{j != i} exp((s_ij - s_ii)/tau)) + log(1 + sum_{j != i} exp((s_ji - s_ii)/tau)) ]
    # log(1/tau) follows its gradient. The baseline of FastCLIP Table 7: at the encoders' learning rate and schedule.
    "openclip": Method(normalizer="batch", temperature="log", scale="half", starts=_tau(0.07)),
    # A sigmoid for every pair instead of a softmax (Zhai et al. 2023, eq. 1), with a learned bias:
    #   -1/B sum_{i, j} log sigmoid(z_ij (s_ij/tau + bias)),   z_ij = 1 where i = j, else -1
    "siglip": Method(
        normalizer=None,
        temperature="log",
        starts={**_tau(0.1), "siglip": {"bias": -10.0}},
    ),
    # SogCLR (Yuan et al. 2022; FastCLIP eq. 1), w_i = 1/(eps + u_i): u_i averages g_i over the sample's visits.
    #   tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ]   over the data set
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
    # FastCLIP-v0 (eq. 8): the global contrastive loss without its leading tau, whose gradient log(1/tau) follows.
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
    # FastCLIP-v2 (eq. 2 and 9): iSogCLR's loss with gamma on a cosine; as tuned in FastCLIP's study of temperatures.
    "fastclip_v2": Method(
        normalizer="moving_average",
        temperature="individual",
        defaults={"temperature": {"schedule": "constant"}},
        starts=_tau(0.03),
    ),
    # FastCLIP-v3 (RGCL-g, eq. 10): the robust global contrastive loss with one learned temperature.
    #   tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ] + 2 rho tau
    # FastCLIP Table 7; its values of rho were tuned with the released code (objective.reference=released_code).
    "fastclip_v3": Method(
        normalizer="moving_average",
        temperature="robust",
        defaults={"temperature": {"schedule": "third_below_0.03"}},
        starts=_tau(0.07),
    ),
    # AmorLIP (arXiv 2505.18983, eq. 6, rescaled by tau), w_i = exp(s_ii/tau)/lambda_i: an MLP of the feature, lambda,
    # amortizes the partition functions.
    #   tau (-2 mean s_ii/tau + mean C1_i/lambda1_i + mean C2_i/lambda2_i) + rho tau
    #   C1_i = 1/(B-1) [ sum_{j != i} exp(s_ij/tau) + c exp(s_ii/tau) ],   lambda1_i = exp(MLP(e1_i)), held constant
    # The schedule of tau is that of the README's script, which also has positive_weight=1e-3 and
    # encoder_normalizer=combined; the rest is the paper's.
    "amorlip": Method(
        normalizer="amortized",
        temperature="rescaled",
        defaults={"temperature": {"schedule": "third_below_0.03"}},
        starts=_tau(0.07),
    ),
    # NeuCLIP (ICLR 2026, eq. 10-12 and Algorithm 1), w_i = exp(-alpha_i): a network predicts the normalizers.
    #   tau/n sum_i sum_{1, 2} [ exp(-alpha_i) (eps + g_i) + alpha_i - 1 ] + 2 rho tau
    #   alpha1_i = log(eps + 1/m sum_k exp((cos(e1_i, W1_k) - s_ii)/tau)),   alpha2_i likewise with e2_i and W2
    # NeuCLIP Table 3. tau's initial value and schedule are not published: 0.07, and the encoders' schedule because
    # its learning rate is an eighth of theirs on every data set.
    "neuclip": Method(normalizer="npn", temperature="rule", starts=_tau(0.07)),
    # InfoNCE over the data set, with normalizers pooled from the batch and a queue (this project; the queue is MoCo's).
    #   1/2n sum_i sum_{1, 2} alpha_i + log(n-1),   eps = 1/(n-1)
    #   alpha_i = log(eps + (g_i + kappa ghat_i)/(1 + kappa)),   ghat1_i = 1/m sum_k exp((e1_i . W_k - s_ii)/tau)
    # W holds the other side's last m features. With `temperature.rule=robust` the scale is tau, `objective.eps`
    # applies, and 2 rho tau is added.
    "neuclip_queue": Method(
        normalizer="pooled_queue",
        temperature="rule",
        defaults={"temperature": {"rule": "learned"}},
        starts=_tau(0.07),
    ),
    # TuneCLIP's loss without the hinge, its supervised case (TuneCLIP, GCL): the margin is for false negatives, of
    # which supervised captions (the paper's are Flickr30k's) have few.
    #   tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   g1_i = 1/B sum_{j != i} exp((s_ij - s_ii)/tau)
    "gcl": Method(
        normalizer="moving_average",
        temperature="constant",
        pair_loss="over_batch",
        defaults={"moving_average": _TUNECLIP_GAMMA},
    ),
    # TuneCLIP's hinged loss (eq. 8), for fine-tuning after recovery has filled u (training/recovery.py); tau stays at
    # the checkpoint's.
    #   gcl's with g1_i = 1/B sum_{j != i} exp(l(s_ij - s_ii)/tau),   l(x) = max(x + margin, 0)^2
    "tuneclip": Method(
        normalizer="moving_average",
        temperature="constant",
        pair_loss="hinge",
        defaults={"moving_average": _TUNECLIP_GAMMA},
    ),
}
SECTIONS = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.sections))
"""Every section or option below `objective.` that some methods read and others do not."""


def find_method(name: str) -> Method:
    """Return the method with this name; raise `UserError` that suggests the nearest if there is none."""
    if not isinstance(name, str) or name not in METHODS:
        name = " ".join(str(name).split())[:80]
        nearest = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "choose one."
        raise UserError(f"objective.method={name} is unknown; the methods are {', '.join(METHODS)}; {hint}")
    return METHODS[name]


def method_of(options: Options) -> Method:
    """Return the method that a tree of options below `objective.` names, or the default."""
    return find_method(options.get("method", DEFAULT))
