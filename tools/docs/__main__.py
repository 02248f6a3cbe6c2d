"""`python -m tools.docs [--check]`, from the root of the checkout."""

import sys

from tools.docs.pages import main

sys.exit(main())
