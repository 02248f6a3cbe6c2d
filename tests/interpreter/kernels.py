"""Small kernels the unit tests of the interpreter are built from."""

import tilelang.language as T
import torch

from tile_kernels.interpreter import interpret


def dtype_name(tensor: torch.Tensor) -> str:
    """TileLang's name of a tensor's type."""
    return str(tensor.dtype).removeprefix('torch.')


def elementwise_kernel(function, in_dtypes, out_dtype, size):
    """out[i] = function(in0[i], in1[i], ...) with one thread per element."""
    first, second, third = (*in_dtypes, *('float32',) * 3)[:3]
    count = len(in_dtypes)

    @T.prim_func
    def elementwise(
        a: T.Tensor((size,), first),
        b: T.Tensor((size,), second),
        c: T.Tensor((size,), third),
        out: T.Tensor((size,), out_dtype),
    ):
        with T.Kernel(T.ceildiv(size, 64), threads=64) as pid:
            i = pid * 64 + T.get_thread_binding()
            if i < size:
                if count == 1:
                    out[i] = function(a[i])
                elif count == 2:
                    out[i] = function(a[i], b[i])
                else:
                    out[i] = function(a[i], b[i], c[i])

    return elementwise


def elementwise(function, *inputs, out=None):
    """Run an element-wise function through the interpreter; `out` is the result type (default: of the first input)."""
    size = inputs[0].numel()
    names = [dtype_name(tensor) for tensor in inputs]
    result = torch.zeros(size, dtype=out or inputs[0].dtype)
    kernel = elementwise_kernel(function, names, dtype_name(result), size)
    interpret(kernel, *inputs, *(None,) * (3 - len(inputs)), result)
    return result


def per_thread_kernel(body, threads, in_dtype, out_dtype, blocks=1):
    """out[block, thread] = body(thread, in[block, thread])."""

    @T.prim_func
    def per_thread(a: T.Tensor((blocks, threads), in_dtype), out: T.Tensor((blocks, threads), out_dtype)):
        with T.Kernel(blocks, threads=threads) as pid:
            thread = T.get_thread_binding()
            out[pid, thread] = body(thread, a[pid, thread])

    return per_thread


def per_thread(body, values, out=None):
    """Run a function of (thread number, value) in every thread of every block (row)."""
    blocks, threads = values.shape
    result = torch.zeros(blocks, threads, dtype=out or values.dtype)
    interpret(per_thread_kernel(body, threads, dtype_name(values), dtype_name(result), blocks), values, result)
    return result
