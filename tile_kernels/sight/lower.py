"""Lower a subject to the device TIR that becomes CUDA; needs neither a GPU nor nvcc."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tile_kernels.core import nvcc
from tile_kernels.core.errors import CompileError, TileKernelsError
from tile_kernels.sight.subject import Subject


@dataclass(frozen=True)
class Lowered:
    """The device functions of a subject.

    Attributes:
        source: the CUDA source.
        functions: device PrimFuncs by name; one PrimFunc of tile-level TIR may hold several.
    """

    source: str = field(repr=False)
    functions: dict[str, Any] = field(repr=False)


def lower(subject: Subject) -> Lowered:
    """Lower a subject for its GPU; a kernel that TileLang rejects is a `CompileError` of one sentence."""
    nvcc.require_tilelang()
    import tilelang
    from tilelang import tvm

    arch = subject.gpu.target
    target = tvm.target.Target({'kind': 'cuda', 'arch': arch})
    try:
        with nvcc.quiet(), target, tvm.transform.PassContext(opt_level=3, config=subject.pass_configs):
            func = nvcc._for_arch(subject.prim_func, arch)
            lowered = tilelang.lower(func, target=target, enable_device_compile=False)
    except TileKernelsError:
        raise
    except Exception as error:
        raise CompileError(f'{subject.name}: {nvcc.explain(str(error) or type(error).__name__)}') from error
    return Lowered(lowered.kernel_source, {var.name_hint: f for var, f in lowered.device_mod.functions.items()})
