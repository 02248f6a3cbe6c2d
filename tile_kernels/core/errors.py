"""The exceptions a user can meet. Each is a single sentence: who, which rule, what was found, what to do."""


class TileKernelsError(Exception):
    """Base of every exception this library raises on purpose."""


class ArgumentError(TileKernelsError, ValueError):
    """An argument breaks a rule: `<op>: <argument> must <rule>, got <fact>`."""


class UnsupportedError(TileKernelsError, RuntimeError):
    """The device, architecture or toolkit cannot run this kernel; the sentence says what can."""


class CompileError(TileKernelsError, RuntimeError):
    """TileLang or nvcc refused a kernel; the sentence starts with the kernel, its static arguments and its config."""


class LaunchError(TileKernelsError, RuntimeError):
    """A compiled kernel refused its arguments or could not be launched."""
