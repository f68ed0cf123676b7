"""Attention masks for transformers' text encoders, built without waiting for the device.

transformers copies the padding mask from the device to the host to find out whether any caption is padded. This module
avoids the copy. Causal encoders ignore the padding mask: captions are padded at the end, so caption tokens never attend
to the padding. Without a mask, flash attention is possible; only layers with a sliding window shorter than the captions
still need one. Other encoders get a (b, 1, T, T) mask, which layers of the same kind share.
"""

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "neuclip_ds_sdpa"


def use_static_masks(encoder: PreTrainedModel) -> None:
    """Make an SDPA encoder build its masks without waiting for the device; captions must be padded at the end."""
    if encoder.config._attn_implementation == "sdpa":
        encoder.set_attn_implementation(_NAME)


def _static_mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """Call `sdpa_mask`, but ignore padding in causal attention (where `allow_is_causal_skip` is True)."""
    if allow_is_causal_skip:
        attention_mask = None
    skip = allow_is_bidirectional_skip and attention_mask is None
    mask: Tensor | None = sdpa_mask(
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=skip,
        **options,
    )
    return mask


AttentionInterface.register(_NAME, sdpa_attention_forward)
AttentionMaskInterface.register(_NAME, _static_mask)
