"""Counted bytes and products sit on the source lines that the comments of the kernels name."""

import re
from pathlib import Path

import pytest
import torch

from tests.sight import marked_kernels as kernels
from tile_kernels.sight import annotate
from tile_kernels.sight.count import Access, count
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import resolve

MARKED = Path(kernels.__file__)
PACKAGE = Path(__file__).parents[2] / 'tile_kernels'
NO_ROLES = {'tl.disable_warp_specialized': True}
INTRINSICS = {'tl.enable_lower_ldgstg': True}

CASES = {
    'gemm by TMA and wgmma': ((kernels.pipelined_gemm,), {}),
    'gemm by cp.async and wgmma': ((kernels.pipelined_gemm,), {'pass_configs': NO_ROLES}),
    'gemm by cp.async and mma': ((kernels.pipelined_gemm,), {'device': 'a100'}),
    'gemm by roles': ((kernels.roles,), {}),
    'attention': ((kernels.attention,), {}),
    'attention without roles': ((kernels.attention,), {'device': 'a100'}),
    'two products': ((kernels.sum_of_products,), {}),
    'softmax': ((kernels.softmax,), {'rows': 64}),
    'transpose': ((kernels.transpose,), {}),
    'histogram': ((kernels.histogram,), {}),
    'intrinsics': ((kernels.by_intrinsics,), {'pass_configs': INTRINSICS}),
    'eager': ((kernels.eager, torch.empty(8, 1024), torch.empty(8, 1024)), {}),
}

#: Ops of the library: the file and the text of the lines that access a buffer.
OPS = {
    'norm.norm_forward': {'x': 'vectors.py: x_local[i', 'weight': 'vectors.py: x_local[i', 'y': 'vectors.py: y[row'},
    'quant.per_token_cast': {'x': 'vectors.py: x_local[i', 'y': 'vectors.py: y[row', 'y_sf': 'scales.py: y_sf[row'},
    'transpose.batched_transpose': {'x': 'batched_transpose.py: = x_bits[', 'y': 'batched_transpose.py: y_bits[pid_b'},
}


def marks(path: Path) -> dict[tuple[str, int], set[str]]:
    """What the comment of each line says."""
    found = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if '#: ' in text:
            found[str(path), number] = set(text.split('#: ')[1].split(', '))
    return found


def says(access: Access) -> str:
    writes = access.writes or (access.how == 'cp.async' and access.space == 'shared')
    return f'{"writes" if writes else "reads"} {access.buffer}'


@pytest.mark.parametrize('case', CASES)
def test_bytes_and_products_sit_on_the_marked_lines(case):
    args, named = CASES[case]
    (subject,) = resolve(*args, **named)
    (counts,) = count(subject, lower(subject))
    expected = marks(MARKED)
    right = sum(a.bytes for a in counts.accesses if says(a) in expected.get((a.file, a.line), ()))
    wrong = [(says(a), a.line) for a in counts.accesses if says(a) not in expected.get((a.file, a.line), ())]
    assert right >= 0.9 * sum(a.bytes for a in counts.accesses) > 0, wrong
    assert not wrong
    assert all('product' in expected.get(place, ()) for place in counts.flops_at)
    assert sum(counts.flops_at.values()) == sum(counts.flops.values())
    if args[0] is kernels.pipelined_gemm:
        assert counts.requested('A') == 4 * 256 * 256 * 2  # once for each of 4 columns of tiles
    touched = {f'{a.file}:{a.line}' for a in counts.accesses} | {f'{file}:{line}' for file, line in counts.flops_at}
    names = {buffer.name for buffer in subject.prim_func.buffer_map.values()}
    for (file, line), words in expected.items():  # no line of this kernel stays without its bytes
        if {word.split()[-1] for word in words} & names and _in(subject, line):
            assert f'{file}:{line}' in touched, line


def _in(subject, line: int) -> bool:
    """Whether a line belongs to the function that built the kernel."""
    from tile_kernels.sight.lines import written

    return line in {item.place[1] for item in written(subject.prim_func)}


@pytest.mark.parametrize('op', OPS)
def test_bytes_of_ops_sit_on_the_lines_of_their_statements(op):
    for subject in resolve(op):
        for counts in count(subject, lower(subject)):
            for access in [a for a in counts.accesses if a.space == 'global' and a.buffer in OPS[op]]:
                file, _, text = OPS[op][access.buffer].partition(': ')
                assert Path(access.file).name == file and Path(access.file).is_relative_to(PACKAGE)
                assert text in Path(access.file).read_text().splitlines()[access.line - 1]


def test_annotated_cuda_is_the_generated_one_beside_the_lines():
    (subject,) = resolve(kernels.pipelined_gemm)
    (found,) = annotate(kernels.pipelined_gemm)
    assert [text for _, text in found.cuda] == lower(subject).source.splitlines()
    product = next(line for line in found.lines if line.flops)
    assert product.flops == 2 * 256**3 and 'T.gemm(' in product.source
    loads = {Path(place[0]).name: text for place, text in found.cuda if place and 'tma_load(A_desc' in text}
    assert loads and all(
        'T.copy(A[' in MARKED.read_text().splitlines()[place[1] - 1]
        for place, text in found.cuda
        if place and 'tma_load(A_desc' in text
    )
    shown = str(annotate(kernels.pipelined_gemm))
    assert re.search(r'524k +16\.4k +- +- +-  T\.copy\(A\[by', shown)
    assert re.search(r'// marked_kernels\.py:\d+  T\.gemm\(A_shared.*\n.*initialize_wgmma_descriptor', shown)


def test_annotated_conflicts_are_those_of_the_line():
    from tests.sight.lint_kernels import turned_tile

    (found,) = annotate(turned_tile(0))
    (line,) = [line for line in found.lines if line.wavefronts > line.least_wavefronts]
    assert line.wavefronts == 32 * line.least_wavefronts and '32x' in str(line) and 'tile[lane, i]' in line.source
