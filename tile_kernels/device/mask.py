"""The band mask of attention: which keys a query sees.

The position of a query among the keys is its own number plus keys minus queries of the sequence. So the last query
stands at the last key. A query sees the keys from `left` before to `right` behind its position.
"""

from typing import Any

from tile_kernels.core.lang import T


def in_band(position: Any, key: Any, left: Any, right: Any) -> Any:
    """Whether the query at a position sees a key."""
    return T.And(key >= position - left, key <= position + right)


def first_key(position: Any, left: Any) -> Any:
    """The first key that the query at a position sees."""
    return T.max(position - left, 0)


def last_key(position: Any, right: Any, num_keys: Any) -> Any:
    """The end of the keys that the query at a position sees."""
    return T.max(T.min(position + right + 1, num_keys), 0)


def crosses_band(first: Any, last: Any, key: Any, num_keys: int, left: Any, right: Any) -> Any:
    """Whether a query from position `first` to `last` does not see all of `num_keys` keys from `key` on."""
    return T.Or(last - left > key, first + right < key + num_keys - 1)
