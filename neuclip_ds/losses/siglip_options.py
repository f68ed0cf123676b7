"""Options and published settings of SigLIP's loss; the equation is in siglip.py."""

from __future__ import annotations

from neuclip_ds.losses.method import Method
from neuclip_ds.section import Section


class SiglipConfig(Section):
    bias: float | None = None
    """Learned bias of the logits at step 0. By default, the bias of `model.pretrained` or, without it, -10. Required if
    the pretrained checkpoint has no bias."""


METHODS = {
    "siglip": Method(
        builder="siglip.siglip",
        sections=("siglip",),
        defaults={"temperature": {"initial": 0.1}, "siglip": {"bias": -10.0}},
        estimates_normalizers=False,
        refuses_reference=True,
    ),
}
