"""Grouped-query attention: over packed rows, where an implementation is chosen, and over the sampler's cache.

Shapes: B rows, T tokens of a row, S slots (cache) or source tokens, N query heads, K key-value heads, G = N / K query
heads that share a key-value head, D features of a head, L layers.

    attention = choose_attention("auto", AttentionCall(rows, length, heads, kv_heads, head_dim, dtype))
    allowed = attention.allow(first_keys(segment_ids))              # once for all layers that read the same keys
    attended = attend_packed(queries, keys, values, allowed, scale=head_dim**-0.5)
"""

from experiments.models.attention.allowed import AllowedKeys as AllowedKeys
from experiments.models.attention.allowed import first_keys as first_keys
from experiments.models.attention.cache import KVCache as KVCache
from experiments.models.attention.cache import LayerCache as LayerCache
from experiments.models.attention.cache import RowCache as RowCache
from experiments.models.attention.cache import put_block as put_block
from experiments.models.attention.cached import attend_cached as attend_cached
from experiments.models.attention.cached import choose_cached as choose_cached
from experiments.models.attention.cached import continued as continued
from experiments.models.attention.cached import empty_cache as empty_cache
from experiments.models.attention.cached import first_readable as first_readable
from experiments.models.attention.call import AttentionCall as AttentionCall
from experiments.models.attention.choice import NAMES as NAMES
from experiments.models.attention.choice import AttentionRun as AttentionRun
from experiments.models.attention.choice import attend_packed as attend_packed
from experiments.models.attention.choice import choose_attention as choose_attention
from experiments.models.attention.einsum import attend as attend
from experiments.models.attention.einsum import mask_bias as mask_bias
from experiments.models.attention.einsum import precision_of as precision_of
from experiments.models.attention.triton_block import attend_block_triton as attend_block_triton
from experiments.models.attention.triton_cached import NormAndRotation as NormAndRotation
from experiments.models.attention.triton_cached import attend_triton as attend_triton
