"""The table of messages of TileLang, nvcc and CUDA: each known text has a cause and an action, in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One known message; `{name}` in cause and action stands for the named group of the pattern.

    Attributes:
        pattern: a regular expression that occurs in the message.
        cause: what is wrong.
        action: what to do.
        topic: what a known kernel can add: `'shared'`, `'registers'` or `'alignment'`.
    """

    pattern: str
    cause: str | Callable[[re.Match[str]], str]
    action: str | Callable[[re.Match[str]], str]
    topic: str = ''


def _nearest(match: re.Match[str], axis: str | None = None) -> str:
    """The multiples on both sides of an illegal extent."""
    step, got = int(match['step']), int(match['got'])
    below = got // step * step
    legal = f'{below} or {below + step}' if below else str(step)
    return f'choose {axis or match["axis"]} = {legal} for the tile'


def _partitions(m: int, n: int, warps: int, rows: int) -> bool:
    """Whether warps divide a tile: each owns a multiple of 16 rows and 8 columns, and `rows` warps share columns."""
    return any(
        warps % w == 0 and w % rows == 0 and m % (16 * w) == 0 and n % (8 * warps // w) == 0
        for w in range(1, warps + 1)
    )


def _legal_tiles(match: re.Match[str]) -> str:
    """The tiles, and the powers of two of warps, nearest to those that were refused."""
    m, n, warps = (int(match[name]) for name in ('m', 'n', 'warps'))
    rows, step = (4, 16) if 'Group' in match[0] else (1, 8)  # wgmma miscomputes tiles of N = 8 modulo 16
    sizes = [(i, j) for i in range(16, 2 * m + 512, 16) for j in range(step, 2 * n + 512, step)]
    tiles = [size for size in sizes if _partitions(*size, warps, rows)]
    tiles.sort(key=lambda tile: abs(tile[0] - m) / m + abs(tile[1] - n) / n)
    counts = [c for c in (1, 2, 4, 8, 16, 32) if _partitions(m, n, c, rows)]
    counts.sort(key=lambda c: abs(c - warps))
    threads = f', or {" or ".join(str(32 * c) for c in counts[:2])} threads' if counts else ''
    return f'choose a tile of {" or ".join(f"{i} x {j}" for i, j in tiles[:2])}{threads}'


def _shared_memory(match: re.Match[str]) -> str:
    gives = 'the GPU gives a block 227 KB (163 on sm_80, 99 on sm_86, sm_89 and sm_120)'
    return f'the kernel asks for {int(match["bytes"]) / 1024:.0f} KB of shared memory, and {gives}'


#: The first row whose pattern occurs in a text explains it.
ROWS = (
    Row(
        r'Unsupported gpu architecture|unknown target|not defined for option .gpu-arch',
        'this nvcc does not know the GPU architecture',
        'install CUDA 12.8 or newer',
    ),
    Row(
        r'__nv_fp8|fp8_e[45]m[23].*(undefined|not.*declared)',
        'this CUDA toolkit does not know the FP8 types',
        'install CUDA 12.8 or newer',
    ),
    Row(
        r'dynamic shared memory size to (?P<bytes>\d+)',
        _shared_memory,
        'choose a smaller tile or fewer stages',
        'shared',
    ),
    Row(
        r'dynamic shared memory size|uses too much shared data',
        'the kernel needs more shared memory than the GPU has',
        'choose a smaller tile or fewer stages',
        'shared',
    ),
    Row(
        r'too many resources requested',
        'the threads of a block need more than the 65536 registers of an SM',
        'choose fewer threads, a smaller accumulator, or T.annotate_min_blocks_per_sm',
        'registers',
    ),
    Row(
        r'grid=\(\d+,(\d+,)?(?P<blocks>6553[6-9]|655[4-9]\d|65[6-9]\d{2}|6[6-9]\d{3}|[7-9]\d{4}|\d{6,})\b',
        'the launch has {blocks} blocks in its second or third dimension, CUDA takes 65535',
        'split the call, or put this extent into the first dimension of T.Kernel',
    ),
    Row(
        r'nvcc: (command )?not found|No such file.*nvcc|Could not find CUDA',
        'no CUDA toolkit found (nvcc)',
        'install CUDA 12.8 or newer, or set CUDA_HOME',
    ),
    Row(
        r'fatal error: (?P<header>tl_templates\S+): No such file',
        'nvcc does not find {header}, which is part of TileLang',
        'install TileLang again, or add its src folder to the include path',
    ),
    Row(
        r'no available layout found|Inconsistent layouts|does not form a bijective transform',
        'TileLang found no layout for a tile of this width',
        'pad the tile or change the thread count',
    ),
    Row(
        r'Layout infer conflict between (?P<a>\w+) and (?P<b>\w+) in',
        'the fragments {a} and {b} of one loop have different layouts',
        'give both products one policy, e.g. T.GemmWarpPolicy.FullRow, or pass one tile through shared memory',
    ),
    Row(
        r'XOR-butterfly .* power of two, got (?P<width>\d+)',
        'a reduction runs over {width} threads, which is no power of two',
        'pad the row, or launch 64, 128 or 256 threads',
    ),
    Row(
        r'Mixed-dtype GEMM only supports .* got A=(?P<a>\w+), B=(?P<b>\w+)',
        'the operands of T.gemm have two dtypes, {a} and {b}',
        'cast one operand before T.gemm',
    ),
    Row(
        r'No valid warp partition for T\.gemm.*: M=(?P<m>\d+), N=(?P<n>\d+) .* by (?P<warps>\d+) warps',
        'a tile of {m} x {n} does not divide among {warps} warps',
        _legal_tiles,
    ),
    Row(
        r'(?P<axis>[MN]) must be divisible by (?P<step>\d+), but got (?P<got>\d+)',
        'the {axis} extent {got} of T.gemm is no multiple of {step}',
        _nearest,
    ),
    Row(
        r'\(stride == 4 \|\| stride % (?P<step>8) == 0\) is false: stride=(?P<got>\d+)',
        'a shared tile of T.gemm has rows of {got} elements, which no layout for matrix loads allows',
        lambda match: _nearest(match, 'K'),
    ),
    Row(
        r'Unsupported k_dim (?P<k>\d+)',
        'T.gemm has no instruction for a K extent of {k}',
        'choose a multiple of 16 (32 for 8-bit types) as the K extent of the tile',
    ),
    Row(
        r'block_K \((?P<got>\d+)\) must be a multiple of micro_size_k \((?P<step>\d+)\)',
        'the K extent {got} of T.gemm is no multiple of {step}, the depth of its instruction',
        lambda match: _nearest(match, 'K'),
    ),
    Row(
        r'WGMMA operand layout contiguity|Not a canonical GMMA',
        'wgmma cannot read an operand of T.gemm, because its rows are too short',
        'choose N as a multiple of 64, or store B as (N, K) with transpose_B=True',
    ),
    Row(
        r'T\.gemm (?P<axis>[MNK]) shape check failed: \w+ = (?P<a>\d+), \w+ = (?P<b>\d+)',
        'the tiles of T.gemm disagree about {axis}: {a} and {b}',
        'give both tiles the same {axis} extent, or set transpose_A or transpose_B',
    ),
    Row(
        r'Unsupported gemm combination, A: (?P<a>\S+), B: (?P<b>\S+)',
        'T.gemm got operands in {a} and {b} memory',
        'copy the tiles to shared memory first (A may be a fragment)',
    ),
    Row(
        r'Downcast from tirx\.\w+ to ir\.IntImm failed',
        'a loop needs a constant extent; T.Pipelined with a dynamic one is the usual reason',
        'make the extent of T.Pipelined a constant, or pass the buffers by barriers',
    ),
    Row(
        r'Unsupported retrieve_shape argument',
        'a tile operation takes whole buffers or slices, and got one element',
        'write into a fragment from T.alloc_fragment, and store its elements in a T.Parallel loop',
    ),
    Row(
        r'StructuralEqual.*is false: (?P<buffer>\w+): (?P<a>\(.*?\)) and (?P<b>\(.*?\))',
        'one T.Parallel loop indexes the fragment {buffer} in two ways, {a} and {b}',
        'copy the values to T.alloc_local first, or use two fragments',
    ),
    Row(
        r'vars\.size\(\) == InputDim\(\)',
        'a layout got another number of axes; a reduction whose output keeps an axis of 1 is the usual reason',
        'give the output of the reduction one axis less',
    ),
    Row(
        r'Immutable variable `(?P<name>\w+)` is used outside',
        'the variable {name} gets its value inside an if or a loop and is used after it',
        "declare it before with T.alloc_var('float32')",
    ),
    Row(
        r'Cannot use and / or / not operator to Expr',
        'Python decides on a value that only the GPU knows: max, min, and, or, not, or a chained comparison',
        'write T.max, T.min, T.And, T.Or, T.Not or T.if_then_else',
    ),
    Row(
        r'Cannot invoke __ldg function with pdl_sync',
        'T.__ldg reads through a cache that does not see what the kernel before wrote',
        'load without T.__ldg in a kernel that calls T.pdl_sync',
    ),
    Row(
        r'sblock_attr must be called at the top',
        'an annotation stands outside the kernel',
        'move it to the first lines inside `with T.Kernel(...)`',
    ),
    Row(
        r'Constexpr variable `(?P<name>\w+)` is not used',
        'no shape or stride is {name} itself, so its value cannot be read from a tensor',
        'use {name} alone as an extent of one tensor',
    ),
    Row(
        r'could not get source code',
        'TileLang reads the source of a kernel, and this one has no file',
        'write the kernel in a module or a script, not in python -c or exec',
    ),
    Row(
        r'T\.tma_copy\(\) cannot fall back .*src=(?P<src>\w+), dst=(?P<dst>\w+)',
        'the copy from {src} to {dst} cannot use TMA, because no descriptor represents its shared layout',
        'annotate another layout, or set the pass config TL_DISABLE_TMA_LOWER',
    ),
    Row(
        r'Memory verification failed|not contained in a thread environment',
        'a loop accesses global memory outside a kernel',
        'put the loop inside `with T.Kernel(...)`',
    ),
    Row(
        r"Unexpected type: <class 'str'>\. Supported types are tirx\.Buffer",
        'T.print got text, and Python formats an f-string before the kernel exists',
        "write T.print(C[0, 0], msg='C[0, 0]')",
    ),
    Row(
        r'No builder in current scope',
        'a TileLang statement runs outside a kernel',
        'call it inside a function with @T.prim_func or @tilelang.jit',
    ),
    Row(
        r'src_ranges\[\d+\]: min=.*extent=(?P<src>\d+)',
        'the source and destination of T.copy have different extents; the source has {src}',
        'slice both to the same shape',
    ),
    Row(
        r'Need to load/store by multiple of bytes',
        'a tensor has a dtype whose width is no multiple of 8 bits',
        'correct the name of the dtype, or store such values packed in uint8',
    ),
    Row(
        r"cannot import name '(?P<name>\w+)' from '(?P<module>tilelang[\w.]*)'",
        '{module} of the installed TileLang has no name {name}',
        'run: pip install "tilelang>=0.1.15,<0.2", or call tile_kernels functions for tools that TileLang lacks',
    ),
    Row(
        r"module '(?P<module>tilelang[\w.]*)' has no attribute '(?P<name>\w+)'",
        '{module} of the installed TileLang has no name {name}',
        'correct the name, or run: pip install "tilelang>=0.1.15,<0.2"',
    ),
    Row(
        r'misaligned address',
        'an access of 16 bytes starts at an address that is no multiple of 16',
        'check strides and offsets, and promise them by T.assume; the size of shared memory is not the cause',
        'alignment',
    ),
    Row(
        r'illegal memory access|ILLEGAL_ADDRESS',
        'a kernel accessed memory outside its tensors',
        'run it on CPU tensors with tile_kernels.interpreter.interpret, which names the line and the buffer',
    ),
    Row(
        r'no kernel image is available',
        'the kernel was compiled for another GPU architecture',
        'compile it for this GPU, and check that torch supports the GPU: tile-kernels doctor',
    ),
    Row(  # TileLang exchanges the two values: it prints what the tensor has as expected
        r'input (?P<name>\w+) (?P<field>\S+) violates packed ABI.*; expected: (?P<has>\S+), got: (?P<wants>\S+)',
        'the argument {name} has {field} {has}, and the kernel declares {wants}',
        'pass a tensor of the declared shape and strides, or call .contiguous()',
    ),
    Row(
        r'input (?P<name>\w+) (?P<field>device_type|dtype|ndim) mismatch, expected (?P<wants>\w+)',
        'the argument {name} has another {field} than the kernel declares, which is {wants}',
        'pass a tensor of this kind',
    ),
    Row(
        r'num_args should be (?P<wants>\d+); expected: (?P<has>\d+)',
        'the kernel takes {wants} arguments, got {has}',
        'pass every tensor and scalar in the order of the parameters',
    ),
    Row(
        r'(?P<name>\w+) is expected to have non-NULL pointer',
        'the argument {name} is None, and the kernel accesses it',
        'pass a tensor',
    ),
    Row(
        r'packed ABI constraint',
        'an argument has another dtype, shape or stride than the kernel declares',
        'compare the arguments with the parameters of the kernel',
    ),
    Row(
        r'grid dimension must be positive|invalid configuration argument',
        'a launch has an empty or too large grid or block',
        'return early for empty tensors, and launch at most 1024 threads',
    ),
    Row(
        r'device-side assert triggered',
        'an assertion failed inside a kernel',
        'run the call on CPU tensors, where the failing line is named',
    ),
    Row(
        r'CUDA out of memory|out of memory',
        'the GPU has too little free memory',
        'free tensors, or choose a smaller batch',
    ),
)


def find(text: str) -> tuple[Row, re.Match[str]] | None:
    """The row that explains a text, with the match of its pattern; None for an unknown text."""
    for row in ROWS:
        match = re.search(row.pattern, text)
        if match:
            return row, match
    return None


def words(row: Row, match: re.Match[str]) -> tuple[str, str]:
    """Cause and action of a match."""
    cause, action = (
        part.format(**match.groupdict()) if isinstance(part, str) else part(match) for part in (row.cause, row.action)
    )
    return cause, action
