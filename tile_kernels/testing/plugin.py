"""The pytest plugin by its path in the package, for `-p tile_kernels.testing.plugin`.

pytest finds the plugin as `tile_kernels_pytest`, outside of the package: importing the package imports torch.
"""

from tile_kernels_pytest import *  # noqa: F403
from tile_kernels_pytest import seed_test as seed_test
from tile_kernels_pytest import skip_benchmarks as skip_benchmarks
