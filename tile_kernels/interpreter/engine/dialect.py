"""Find the constructs of a kernel that the interpreter does not support, by scanning its TIR."""

from __future__ import annotations

from typing import Any

from tile_kernels.interpreter.engine import program  # noqa: F401  (registers the meaning of every construct)
from tile_kernels.interpreter.engine.translate import (
    ATTRIBUTE_HINTS,
    BLOCK_HINTS,
    BLOCK_MEANINGS,
    EXPRESSIONS,
    OPS,
    SCOPES,
    STATEMENTS,
)
from tile_kernels.interpreter.memory.dtypes import dtype_of

# Nodes that appear only as operands; their parent nodes read them.
_OPERANDS = {'BufferRegion', 'IterVar', 'Range', 'PrimFunc'}
_OPERAND_OPS = {
    'tl.region',
    'tl.access_ptr',
    'tirx.address_of',
    'tirx.tvm_access_ptr',
    'tirx.type_annotation',
    'tirx.tvm_tuple',
}


def unknown_constructs(prim_func: Any) -> list[str]:
    """One line per unsupported construct."""
    from tvm.tirx.stmt_functor import post_order_visit

    found: set[str] = set()

    def visit(node: Any) -> None:
        kind = type(node).__name__
        if kind == 'Call':
            name = str(node.op.name)
            if name not in OPS and name not in _OPERAND_OPS:
                found.add(f'operator {name}')
        elif kind not in EXPRESSIONS and kind not in STATEMENTS and kind not in _OPERANDS:
            found.add(f'node {kind}')
        if kind == 'SBlock':
            _scan_block(node, found)
        if kind == 'AttrStmt' and str(node.attr_key) not in ATTRIBUTE_HINTS:
            found.add(f'attribute {node.attr_key}')
        if kind in EXPRESSIONS and kind not in ('StringImm', 'Call'):
            _scan_dtype(node, found)

    post_order_visit(prim_func.body, visit)
    return sorted(found)


def _scan_block(block: Any, found: set[str]) -> None:
    for key in block.annotations:
        if str(key) not in BLOCK_HINTS and str(key) not in BLOCK_MEANINGS:
            found.add(f'block annotation {key}')
    for buffer in block.alloc_buffers:
        if str(buffer.scope()) not in SCOPES:
            found.add(f'memory scope {buffer.scope()}')


def _scan_dtype(node: Any, found: set[str]) -> None:
    try:
        dtype_of(str(node.dtype))
    except KeyError:
        found.add(f'data type {node.dtype}')
