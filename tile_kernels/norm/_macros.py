"""How the rows of RMS norm are divided among warps.

A team of warps keeps a row in registers. Vector j * 32 + lane of a row belongs to that lane of warp j % warps, as its
vector j // warps. `over_team` sums a row in an order that depends on hidden alone. The bits of a result depend neither
on the number of warps per row nor on the number of rows.
"""

from tile_kernels.core.lang import WARP
from tile_kernels.device.vectors import LANE


def row_warps(hidden: int) -> int:
    """Vectors of a row that a whole warp takes at a time, rounded up."""
    return -(-hidden // (LANE * WARP))


def team_warps(hidden: int, vectors: int, most: int = 16) -> int:
    """Warps that share a row so that a lane has about `vectors` of its vectors: a power of two."""
    wanted = -(-row_warps(hidden) // vectors)
    return min(most, 1 << (wanted - 1).bit_length())
