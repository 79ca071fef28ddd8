"""Pages of KV: who holds them, which are free, and which still carry a prefix that another sequence can use.

Owns page numbers and their bookkeeping, and what pages held (`tiers.py`). Must not know what a page means on the device, nor why a
sequence wants one.
"""

from aengine.cache.pages import LayerGroups, OutOfPages, PageCache, PageNeeds, Prefix, WindowKind, Windows, layer_groups
from aengine.cache.prefix import DIGEST_BYTES, PageChain, PrefixIndex, page_name, published_digest
from aengine.cache.tiers import Column, PageTiers, StoredPrefix, TierCounts

__all__ = [
    "DIGEST_BYTES",
    "Column",
    "LayerGroups",
    "OutOfPages",
    "PageCache",
    "PageChain",
    "PageNeeds",
    "PageTiers",
    "Prefix",
    "PrefixIndex",
    "StoredPrefix",
    "TierCounts",
    "WindowKind",
    "Windows",
    "layer_groups",
    "page_name",
    "published_digest",
]
