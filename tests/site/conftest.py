"""The site is built once for all files of this folder."""

import pytest

from tile_kernels.core.knobs import knobs

#: Ops with plots in this build; `TK_FULL_TEST=1` draws all.
DRAWN = None if knobs.full_test else ['quant.per_token_cast']


@pytest.fixture(scope='session')
def built(tmp_path_factory):
    """The site; building it fails on the first warning."""
    from tools.docs import site

    out = tmp_path_factory.mktemp('site') / 'html'
    site.build(out, ops=DRAWN)
    return out
