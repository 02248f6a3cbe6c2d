"""What a compiled kernel sees of an argument: a tensor, or the address of a `DLTensor`."""

import ctypes

import torch

_DL_TENSOR_BYTES = 48
_alive = []
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def as_tensor(value):
    """The tensor a pointer describes; anything else as it is."""
    if not isinstance(value, ctypes.c_void_p):
        return value
    managed = (ctypes.c_uint64 * (_DL_TENSOR_BYTES // 8 + 2))()  # a DLManagedTensor without owner and deleter
    ctypes.memmove(managed, value, _DL_TENSOR_BYTES)
    _alive.append(managed)  # a tensor looks at it once more when it dies
    return torch.from_dlpack(_new_capsule(ctypes.addressof(managed), b'dltensor', None))
