"""`python -m tile_kernels` is `tile-kernels`."""

import sys

from tile_kernels.cli.main import main

sys.exit(main())
