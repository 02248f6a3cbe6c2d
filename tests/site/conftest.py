"""The site is built once for all files of this folder."""

import pytest

from tile_kernels.core.knobs import knobs

#: Ops with plots in the build of the tests; `TK_FULL_TEST=1` draws all.
DRAWN = None if knobs.full_test else ['quant.per_token_cast']


@pytest.fixture(scope='session')
def built(tmp_path_factory):
    """The site; building it fails on the first warning."""
    for needed in ('sphinx', 'myst_parser', 'furo'):
        pytest.importorskip(needed, reason=f'builds with {needed}')
    from tools.docs import site

    out = tmp_path_factory.mktemp('site') / 'html'
    site.build(out, ops=DRAWN)
    return out
