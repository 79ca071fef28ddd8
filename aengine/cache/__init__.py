"""Pages of KV: who holds them, which are free, and which still carry a prefix that another sequence can use.

Owns page numbers and their bookkeeping. Must not know what a page contains on the device, nor why a sequence wants one.
"""

from aengine.cache.pages import LayerGroups, OutOfPages, PageCache, PageNeeds, Prefix, WindowKind, Windows, layer_groups
from aengine.cache.prefix import PageChain, PrefixIndex, page_name, published_digest

__all__ = [
    "LayerGroups",
    "OutOfPages",
    "PageCache",
    "PageChain",
    "PageNeeds",
    "Prefix",
    "PrefixIndex",
    "WindowKind",
    "Windows",
    "layer_groups",
    "page_name",
    "published_digest",
]
