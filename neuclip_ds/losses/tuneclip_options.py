"""Options and published settings of TuneCLIP's losses; the equations are in tuneclip.py."""

from __future__ import annotations

from pydantic import Field

from neuclip_ds.losses.fastclip_options import SECTIONS
from neuclip_ds.losses.method import Method
from neuclip_ds.section import Section


class HingeConfig(Section):
    margin: float = Field(0.1, ge=0)
    """Margin m of TuneCLIP's pair loss max(s_ij - s_ii + m, 0)^2."""


# TuneCLIP Table 7: we read "decay every 4 epochs" as the length of gamma's cosine. Tau keeps the checkpoint's value.
_DEFAULTS = {"moving_average": {"gamma_min": 0.9, "gamma_epochs": 4}}

METHODS = {
    "gcl": Method(builder="tuneclip.gcl", sections=SECTIONS, defaults=_DEFAULTS),
    "tuneclip": Method(
        builder="tuneclip.tuneclip", sections=(*SECTIONS, "hinge"), defaults=_DEFAULTS, refuses_reference=True
    ),
}
