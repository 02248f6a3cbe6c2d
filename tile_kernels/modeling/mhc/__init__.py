"""Hyper-connections around the layers of a model."""

from tile_kernels.modeling.mhc.functional import expand_from_embedding, mhc_head, mhc_post_pre, mhc_pre
from tile_kernels.modeling.mhc.pipeline import MHCPipeline

__all__ = ['MHCPipeline', 'expand_from_embedding', 'mhc_head', 'mhc_post_pre', 'mhc_pre']
