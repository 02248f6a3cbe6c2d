"""The exceptions that users can get. Each message is one sentence: source, rule, actual value, remedy."""


class TileKernelsError(Exception):
    """Base of every exception this library raises on purpose."""


class ArgumentError(TileKernelsError, ValueError):
    """An argument breaks a rule: `<op>: <argument> must <rule>, got <fact>`."""


class UnsupportedError(TileKernelsError, RuntimeError):
    """The device, architecture or toolkit cannot run this kernel; the message says what can."""


class CompileError(TileKernelsError, RuntimeError):
    """TileLang or nvcc rejected a kernel; the message starts with the kernel, its static arguments and its config."""


class LaunchError(TileKernelsError, RuntimeError):
    """A compiled kernel rejected its arguments or could not be launched."""


class KernelError(TileKernelsError, RuntimeError):
    """TileLang, nvcc or CUDA failed inside `explaining()`; it says cause and action, `__cause__` the original."""
