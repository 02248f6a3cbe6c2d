"""Lowers kernels for AMD GPUs. TileLang's HIP code generator takes less than its CUDA one; here the rest is rewritten.

Nothing here compiles or runs: there is no hipcc in the project, and `launch` knows only CUDA. The generated source
shows which kernels need NVIDIA's instructions. It assumes warps of 32 lanes, as the kernels do. Each half of an AMD
wavefront is one.
"""

from __future__ import annotations

import re
from typing import Any

from tile_kernels.core.errors import UnsupportedError

#: Calls without meaning on AMD: programmatic dependent launch (PDL) and the fence of the asynchronous proxy.
DROPPED_CALLS = ('tl.pdl_sync', 'tl.pdl_trigger', 'tl.fence_proxy_async')

#: Float32 operations that round to nearest, and the device functions of HIP with the same meaning.
ROUNDED_CALLS = {
    'tl.ieee_add': '__fadd_rn',
    'tl.ieee_sub': '__fsub_rn',
    'tl.ieee_mul': '__fmul_rn',
    'tl.ieee_fmaf': '__fmaf_rn',
    'tl.ieee_fdiv': '__fdiv_rn',
    'tl.ieee_frcp': '__frcp_rn',
    'tl.ieee_fsqrt': '__fsqrt_rn',
    'tl.ieee_frsqrt': '__frsqrt_rn',
    'tl.fast_rcp': '__builtin_amdgcn_rcpf',
    'tl.__exp': '__expf',
}

#: PTX of the kernels that has an equal in HIP.
REPLACED_ASSEMBLY = {
    'asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': 'y = __builtin_amdgcn_sqrtf(x);',
    'asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));': 'y = tanhf(x);',
    'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': 'y = __builtin_amdgcn_exp2f(x);',
}

#: Votes of a wavefront of 64 lanes, and those of the warp of 32 lanes that the kernels mean.
WAVEFRONT_VOTE, WARP_VOTE = '__ballot(', 'tk_ballot('

#: The vote of the half of the wavefront in which the calling lane is.
WARP_BALLOT = """
static __device__ __forceinline__ unsigned long long tk_ballot(int predicate) {
  return (__ballot(predicate) >> (__lane_id() & 32)) & 0xffffffffull;
}
"""

#: Messages of the HIP code generator, and the sentence for the user.
_REFUSALS = (
    (
        r'needs at least one full wavefront.*only (\d+) threads',
        r'T.gemm needs a wavefront of 64 threads, the block has \1',
    ),
    (r'name="(?:tl|tirx)\.(\w+)".*is not supported on HIP', r'the instruction \1 is only on NVIDIA GPUs'),
    (r'Unresolved call .*name="(?:tl|tirx)\.(\w+)"', r'TileLang has no HIP code for the instruction \1'),
    (r'Bad bit-width for float: (\w+)', r'TileLang has no HIP type for \1 as a single value'),
)

#: The longest vector of indices that HIP can name; longer vectors have to be contiguous and aligned.
MAX_INDEX_LANES = 4


def lower(prim_func: Any, config: dict[str, Any], arch: str) -> tuple[str, int]:
    """HIP source of a PrimFunc for an AMD architecture, and the bytes of dynamic shared memory of its launch.

    Raises `UnsupportedError` with the name of the first instruction that only NVIDIA's GPUs have.
    """
    import tilelang
    from tilelang import tvm
    from tilelang.backend.module import create_backend_context
    from tilelang.engine.lower import lower_to_host_device_ir

    target = tvm.target.Target({'kind': 'hip', 'mcpu': arch})
    with target, tvm.transform.PassContext(opt_level=3, config=config):
        context = create_backend_context(target, None, 'auto')
        try:
            device = lower_to_host_device_ir(_with_hip_calls(prim_func), context)[1]
            device = tvm.tirx.transform.Simplify()(tilelang.transform.LowerIntrin()(device))
            device = tvm.IRModule({name: _as_hip_prints(func) for name, func in device.functions.items()})
            source = context.codegen_device(device, compile_device=False).inspect_source()
        except RuntimeError as error:
            raise _refusal(error) from error
    if WAVEFRONT_VOTE in source:
        head, line, rest = source.rpartition('#include')
        include, _, code = rest.partition('\n')
        source = f'{head}{line}{include}\n{WARP_BALLOT}{code.replace(WAVEFRONT_VOTE, WARP_VOTE)}'
    for ptx, hip in REPLACED_ASSEMBLY.items():
        source = source.replace(ptx, hip)
    _refuse_assembly(source)
    return source, max(int(f.attrs.get('dyn_shared_memory_buf', 0)) for f in device.functions.values())


def _refusal(error: RuntimeError) -> Exception:
    """A known refusal of TileLang in one sentence; otherwise the error itself."""
    for pattern, sentence in _REFUSALS:
        if found := re.search(pattern, str(error)):
            return UnsupportedError(found.expand(sentence))
    return error


def _with_hip_calls(prim_func: Any) -> Any:
    """The kernel with HIP's functions in place of calls that TileLang translates for CUDA only."""
    from tilelang import tvm

    def replace(node: Any) -> Any:
        if isinstance(node, tvm.tirx.Evaluate):
            return tvm.tirx.Evaluate(tvm.tirx.const(0)) if _name(node.value) in DROPPED_CALLS else None
        name = _name(node)
        if name not in ROUNDED_CALLS:
            return None
        arguments = [a for a in node.args if not isinstance(a, tvm.tirx.StringImm)]
        modes = [a.value for a in node.args if isinstance(a, tvm.tirx.StringImm)]
        if any(mode != 'rn' for mode in modes):
            raise UnsupportedError(f'{name} with rounding mode {modes[0]} is only on NVIDIA GPUs')
        return tvm.tirx.call_pure_extern(node.dtype, ROUNDED_CALLS[name], *arguments)

    body = tvm.tirx.stmt_functor.ir_transform(prim_func.body, None, replace, ['tirx.Evaluate', 'tirx.Call'])
    return prim_func.with_body(body)


def _name(node: Any) -> str:
    return getattr(getattr(node, 'op', None), 'name', '')


def _as_hip_prints(func: Any) -> Any:
    """The function with what the code generator can print: aligned vectors, and fp8 numbers made from float32.

    CUDA's generator takes a contiguous access for aligned, as the passes before did. HIP's wants to see it in the
    index. Otherwise it takes the vector apart, and it has no name for an index of more than four lanes.
    """
    from tilelang import tvm

    def aligned(index: Any) -> Any:
        base, lanes = index.base, int(index.lanes)
        return tvm.tirx.Ramp(tvm.tirx.truncdiv(base, lanes) * lanes, index.stride, lanes)

    def replace(node: Any) -> Any:
        if isinstance(node, tvm.tirx.FloatImm):
            fp8 = str(node.dtype).startswith('float8')
            return tvm.tirx.Cast(node.dtype, tvm.tirx.FloatImm('float32', node.value)) if fp8 else None
        indices = list(node.indices)
        if not indices or not isinstance(indices[-1], tvm.tirx.Ramp) or int(indices[-1].lanes) <= MAX_INDEX_LANES:
            return None
        indices[-1] = aligned(indices[-1])
        if isinstance(node, tvm.tirx.BufferStore):
            return tvm.tirx.BufferStore(node.buffer, node.value, indices)
        return tvm.tirx.BufferLoad(node.buffer, indices)

    kinds = ['tirx.BufferLoad', 'tirx.BufferStore', 'ir.FloatImm']
    return func.with_body(tvm.tirx.stmt_functor.ir_transform(func.body, None, replace, kinds))


def _refuse_assembly(source: str) -> None:
    """Reject source with PTX, by the name of its first instruction."""
    for text in re.findall(r'\basm\b[^;]*?\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', source):
        words = re.sub(r'\\n|"|[{}]', ' ', text)
        for line in words.split(';'):
            if line.strip() and not line.strip().startswith('.reg'):
                raise UnsupportedError(f'the kernel uses the PTX instruction {line.split()[0]}')
