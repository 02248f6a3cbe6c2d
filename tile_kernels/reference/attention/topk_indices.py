"""Twin of the selection of the k largest numbers."""

import math

import torch
from torch import Tensor


def topk_indices(
    logits: Tensor, k: int, start: Tensor | None = None, end: Tensor | None = None, return_values: bool = False
) -> tuple[Tensor, Tensor]:
    """Sort every row by value, stable, with NaN last; sort the first k columns."""
    rows, columns = logits.shape
    indices = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    values = logits.new_full((rows, k if return_values else 0), -math.inf)
    for row in range(rows):
        first = 0 if start is None else min(max(int(start[row]), 0), columns)
        last = columns if end is None else max(min(int(end[row]), columns), first)
        own = logits[row, first:last]
        number = own.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        order = torch.arange(last - first, device=logits.device)
        order = order[torch.sort(number, descending=True, stable=True).indices]
        order = torch.cat((order[~own[order].isnan()], order[own[order].isnan()]))
        best = order[:k].sort().values
        indices[row, : len(best)] = best.int()
        if return_values:
            values[row, : len(best)] = own[best]
    return indices, values
