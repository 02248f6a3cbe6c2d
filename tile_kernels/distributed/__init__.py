"""Layers over several processes, on `torch.distributed`: NCCL on GPUs, gloo on CPUs."""

from tile_kernels.distributed.moe import MoEDistributed, PendingTokens, RoutedTokens

__all__ = ['MoEDistributed', 'PendingTokens', 'RoutedTokens']


def __dir__() -> list[str]:
    return __all__
