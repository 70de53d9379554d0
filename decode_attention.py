"""Attention for decoding: one new token per row over a cache of many rows.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION)

transformers' own function copies the keys and values of grouped heads for every query head, at every step, once a mask
is given. Here two batched products read the cache in place. Passes over more than one token a row, and those without an
additive mask, go to transformers' function.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "sdpa_batched_decode"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' interface: `query` (rows, heads, queries, width), `key` and `value` (rows, key heads,
    columns, width); returns (rows, queries, heads, width) and None.

    A floating-point `attention_mask` (rows, 1, 1, columns) is added to the scores.
    """
    if query.shape[2] != 1 or attention_mask is None or not attention_mask.is_floating_point():
        options.update(dropout=dropout, scaling=scaling)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, _, width = query.shape
    key_heads, columns = key.shape[1], key.shape[2]
    scale = width**-0.5 if scaling is None else scaling
    # The query heads that share a key head stand next to each other.
    grouped = query.reshape(rows * key_heads, heads // key_heads, width)
    mask = attention_mask.expand(rows, key_heads, 1, columns).reshape(rows * key_heads, 1, columns)
    scores = torch.baddbmm(mask, grouped, key.flatten(0, 1).transpose(1, 2), alpha=scale)
    output = torch.bmm(scores.softmax(-1), value.flatten(0, 1))
    return output.view(rows, 1, heads, width), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
