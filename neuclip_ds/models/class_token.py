"""Compute only the class token in the last block of vision transformers that pool at this token.

The feature of such a tower is the class token after the last block. In that block, the other tokens provide keys and
values, but their queries, attention outputs and MLP do not reach the feature. Omitting them changes nothing in exact
arithmetic, except that dropout inside the last block draws different masks. A ViT-B/16 needs 7% fewer FLOPs.

The supported models are timm's `VisionTransformer` (also inside open_clip's models) and open_clip's
`VisionTransformer`, both with their standard blocks, and transformers' CLIP and MetaCLIP 2. Models that pool all tokens
(SigLIP, average pooling) and other architectures are not supported.

Only the tower's forward method omits the other tokens. Code that calls the trunk itself, for example timm's
`forward_features`, gets all tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionModel, MetaClip2VisionModel

from neuclip_ds.errors import UserError
from neuclip_ds.models.forward import Forward, replace_forward

BlockFunction = Callable[[Any, Tensor], Tensor]
"""Function of a block and its input (b, t, width), whose first token is the class token; returns (b, 1, width)."""


def compute_class_token_only(tower: nn.Module, option: Literal["auto"] | bool) -> None:
    """Let the last block of an image tower compute only the class token, in place; parameters keep their names.

    Args:
        tower: an image tower from any library.
        option: `model.vision.class_token_only`: on CPUs (`auto`), on all devices (true), or never (false).

    Raises:
        UserError: the option is true, but the tower is not supported.
    """
    if option is False:
        return
    for module in tower.modules():
        last_block = _last_block(module)
        if last_block is not None:
            block: Any  # of any library
            block, function = last_block
            block.in_tower = False
            block.register_forward_pre_hook(_pass_in_tower, with_kwargs=True)
            replace_forward(block, partial(_only_class_token, function, only_on_cpus=option == "auto"))
            replace_forward(tower, partial(_with_block_in_tower, block))
            return
    if option is True:
        raise UserError(
            "model.vision.class_token_only=true has no effect: the image tower is not a standard vision transformer of "
            "timm, transformers or open_clip that pools at the class token. Omit this option."
        )


def _with_block_in_tower(last_block: Any, whole_tower: Forward) -> Forward:
    """Return a forward method of a tower that sets `in_tower` of the last block to true while it runs."""

    def forward(tower: Any, x: Tensor) -> Tensor:
        last_block.in_tower = True
        try:
            features: Tensor = whole_tower(tower, x)
        finally:
            last_block.in_tower = False
        return features

    return forward


def _pass_in_tower(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add `in_tower` to the arguments of a block's forward method, which may run again after the tower's method ends.

    With activation checkpointing, the backward pass calls it with the same arguments.
    """
    return args, {**kwargs, "in_tower": block.in_tower}


def _only_class_token(function: BlockFunction, whole_block: Forward, only_on_cpus: bool) -> Forward:
    """Return a forward method that calls `function` while the tower runs, and otherwise `whole_block`.

    If `only_on_cpus` is true, it calls `whole_block` on all other devices.
    """

    def forward(block: Any, tokens: Tensor, *args: Any, in_tower: bool = False, **kwargs: Any) -> Any:
        if not in_tower or (only_on_cpus and tokens.device.type != "cpu"):
            return whole_block(block, tokens, *args, **kwargs)
        return function(block, tokens)  # the other arguments are masks, which image towers do not use

    return forward


def _last_block(model: Any) -> tuple[nn.Module, BlockFunction] | None:
    """Return a model's last block and the function that computes only its class token; None if not supported."""
    if type(model) is VisionTransformer:
        last = model.blocks[-1]
        pools_class_token = model.global_pool == "token" and model.attn_pool is None
        is_plain = type(last) is Block and type(last.attn) is Attention
        if pools_class_token and is_plain and last.attn.gate is None and last.attn.fused_attn:
            return last, _timm_block
    elif isinstance(model, CLIPVisionModel | MetaClip2VisionModel):
        return model.encoder.layers[-1], _transformers_block
    elif f"{type(model).__module__}.{type(model).__name__}" == "open_clip.transformer.VisionTransformer":
        # open_clip is an optional package, so its classes are not imported
        last = model.transformer.resblocks[-1]
        pools_class_token = model.pool_type == "tok" and model.attn_pool is None and not model.output_tokens
        if pools_class_token and type(last).__name__ == "ResidualAttentionBlock":
            return last, _open_clip_block
    return None


def _timm_block(block: Block, tokens: Tensor) -> Tensor:
    attention = block.attn
    normalized = block.norm1(tokens)
    query, key_value = _query_and_key_value(attention.qkv, normalized, attention.attn_dim)
    query = _split_heads(query, attention.head_dim)
    key, value = (_split_heads(part, attention.head_dim) for part in key_value.chunk(2, dim=-1))
    dropout = attention.attn_drop.p if block.training else 0.0
    heads = functional.scaled_dot_product_attention(
        attention.q_norm(query), attention.k_norm(key), value, dropout_p=dropout
    )
    attended = attention.proj_drop(attention.proj(attention.norm(_join_heads(heads))))
    class_token = tokens[:, :1] + block.drop_path1(block.ls1(attended))
    output: Tensor = class_token + block.drop_path2(block.ls2(block.mlp(block.norm2(class_token))))
    return output


def _query_and_key_value(qkv: nn.Module, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the query of the class token, (b, 1, width), and keys and values of all tokens, (b, t, 2 width).

    Reading the weights of `qkv` outside its forward method is also correct under ZeRO 3, which gathers parameters when
    they are read during a forward pass. A layer that LoRA has replaced computes all queries.
    """
    if type(qkv) is not nn.Linear:
        projected = qkv(tokens)
        return projected[:, :1, :width], projected[..., width:]
    query_weight, other_weight = qkv.weight.tensor_split([width])
    query_bias = other_bias = None
    if qkv.bias is not None:
        query_bias, other_bias = qkv.bias.tensor_split([width])
    query = functional.linear(tokens[:, :1], query_weight, query_bias)
    return query, functional.linear(tokens, other_weight, other_bias)


def _transformers_block(layer: Any, tokens: Tensor) -> Tensor:
    attention = layer.self_attn
    normalized = layer.layer_norm1(tokens)
    query = _split_heads(attention.q_proj(normalized[:, :1]), attention.head_dim)
    key = _split_heads(attention.k_proj(normalized), attention.head_dim)
    value = _split_heads(attention.v_proj(normalized), attention.head_dim)
    dropout = attention.dropout if layer.training else 0.0
    heads = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=attention.scale)
    class_token = tokens[:, :1] + attention.out_proj(_join_heads(heads))
    output: Tensor = class_token + layer.mlp(layer.layer_norm2(class_token))
    return output


def _open_clip_block(block: Any, tokens: Tensor) -> Tensor:
    normalized = block.ln_1(tokens)
    attended = block.attention(q_x=normalized[:, :1], k_x=normalized, v_x=normalized)
    class_token = tokens[:, :1] + block.ls_1(attended)
    output: Tensor = class_token + block.ls_2(block.mlp(block.ln_2(class_token)))
    return output


def _split_heads(tokens: Tensor, head_dim: int) -> Tensor:
    """Turn (b, t, heads * head_dim) into (b, heads, t, head_dim)."""
    return tokens.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _join_heads(heads: Tensor) -> Tensor:
    """Turn (b, heads, t, head_dim) into (b, t, heads * head_dim)."""
    return heads.transpose(1, 2).flatten(2)
