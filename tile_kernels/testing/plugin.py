"""The pytest plugin under its path in the package, for `-p tile_kernels.testing.plugin`.

pytest loads the plugin as `tile_kernels_pytest`, outside the package, because the package imports torch.
"""

from tile_kernels_pytest import *  # noqa: F403
from tile_kernels_pytest import seed_test as seed_test
from tile_kernels_pytest import skip_benchmarks as skip_benchmarks
