"""Linear attention: recurrences of a state per head, in chunks for training and one token at a time for decoding.

Nothing of this family has run on a GPU yet: kernels are checked in the interpreter, lowered and compiled.
"""

__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
