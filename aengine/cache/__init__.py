"""Pages of KV: who holds them, which are free, and which still carry a prefix that another sequence can use.

Owns page numbers and their bookkeeping. Must not know what a page contains on the device, nor why a sequence wants one.
"""

from aengine.cache.pages import LayerGroups, OutOfPages, PageCache, PageNeeds, WindowKind, Windows, layer_groups
from aengine.cache.prefix import PageChain, PrefixIndex, published_digest

__all__ = [
    "LayerGroups",
    "OutOfPages",
    "PageCache",
    "PageChain",
    "PageNeeds",
    "PrefixIndex",
    "WindowKind",
    "Windows",
    "layer_groups",
    "published_digest",
]
