import inspect
import json
import re

import pytest
import torch

from tile_kernels import FAMILIES, quant
from tile_kernels.cli.bench import GPU_TIMER
from tile_kernels.core.cases import case_id
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.explain import explain_case
from tile_kernels.core.knobs import KNOBS
from tile_kernels.core.registry import load_ops
from tools.docs import api as docs_api
from tools.docs import pages as docs

RECORD = {
    'op': 'tests.double',
    'case': 'num_tokens=64-hidden=128-bfloat16',
    'device': 'NVIDIA H200',
    'us': 2.5,
    'graph_us': 1.5,
    'gbps': 300.0,
    'pct_of_copy': 95.0,
    'host_us': 8.0,
    'timer': GPU_TIMER,
    'commit': 'abc1234',
    'date': '2026-01-02T03:04:05Z',
}


@pytest.fixture
def root(toy, tmp_path, monkeypatch):
    """A project with a README and results."""
    for module in (docs, docs_api):
        monkeypatch.setattr(module, 'LAYERS', ())
        monkeypatch.setattr(module, 'TOOLS', ())
    (tmp_path / 'README.md').write_text(f'before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n')
    results = tmp_path / 'benchmarks' / 'results'
    results.mkdir(parents=True)
    newer = RECORD | {'us': 2.0, 'pct_of_copy': 97.6, 'date': '2026-02-02T00:00:00Z', 'commit': 'def5678'}
    lines = [
        newer,
        RECORD,
        RECORD | {'timer': 'wall clock', 'pct_of_copy': 500},
        RECORD | {'sweep': 'k', 'date': '2027'},
    ]
    (results / 'h200.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    return tmp_path


def test_written_pages_are_up_to_date(root):
    assert len(docs.stale(root)) == 2
    docs.write(root)
    assert docs.stale(root) == []


def test_a_changed_page_is_stale_and_pages_of_the_site_are_not_written(root):
    docs.write(root)
    settings = root / 'docs' / 'settings.md'
    settings.write_text('edited')
    assert docs.stale(root) == [settings]
    docs.write(root)
    assert docs.stale(root) == [] and not (root / 'docs' / 'ops').exists()


def test_readme_states_what_was_measured_and_keeps_the_rest(root):
    docs.write(root)
    text = (root / 'README.md').read_text()
    assert text.startswith('before\n') and text.endswith('after\n') and 'old' not in text
    assert re.search(r'\| `tests` \| .* \| 1 \|  \|', text)
    index = docs.pages(root)[root / 'docs' / 'ops' / 'README.md']
    assert '| [tests.double](tests.double.md) | Twice the input. | internal |  |  | 1.5 |' in index
    assert '2026-02-02, commit def5678' in index


def test_small_problems_have_no_share_of_a_copy(root):
    op = docs.load_ops()['tests.double']
    record = {'op': op.name, 'device': 'NVIDIA H200', 'pct_of_copy': 98.4, 'us': 20.0, 'gbps': 4000.0, 'graph_us': 18.0}
    assert docs.shares([op], [record, record | {'pct_of_copy': 90.0}]) == ('90–98', '18.0')
    assert docs.shares([op], [record | {'us': 2.0}]) == ('', '18.0')


def test_shares_state_worst_and_best_and_leave_out_what_no_memory_can_move():
    op = docs.load_ops()['gemm.gemm']
    record = {'op': op.name, 'device': 'NVIDIA H200', 'us': 20.0, 'gbps': 4000.0, 'graph_us': 18.0}
    slow, fast = record | {'pct_of_copy': 7.0, 'tflops': 790.0}, record | {'pct_of_copy': 97.0, 'tflops': 15.0}
    assert docs.shares([op], [slow, fast]) == ('7–97 (15–790 TFLOP/s)', '18.0')
    assert docs.shares([op], [slow, fast | {'gbps': 5000.0}]) == ('7 (790 TFLOP/s)', '18.0')


def test_the_page_of_runs_counts_every_op_with_gradients_apart(root, toy, monkeypatch):
    records = [RECORD | {'pct_of_copy': share, 'us': 20.0, 'gbps': 4000.0} for share in (81.0, 60.0)]
    monkeypatch.setattr(toy, 'name', 'tests.double_bwd')
    records = [record | {'op': toy.name} for record in records]
    assert re.search(r'\| `tests` \| .* \| 1 \| 60–81 \|', docs.readme(root / 'README.md', [toy], records))
    page = root / 'docs' / 'status.md'
    page.parent.mkdir()
    page.write_text(f'{docs.BEGIN}{docs.END}')
    assert '| `tests` |  | 60–81 | 1.5 |' in docs.status(page, [toy], records)
    docs.write(root)
    assert page.read_text() != f'{docs.BEGIN}{docs.END}'


@pytest.fixture(scope='module')
def pages():
    """Every generated page, by its path in the checkout."""
    return {path.relative_to(docs.ROOT).as_posix(): text for path, text in docs.pages().items()}


def test_the_index_lists_every_op(pages):
    index = pages['docs/ops/README.md']
    assert not [name for name in docs.load_ops() if f'[{name}]({name}.md)' not in index]


def test_records_of_cases_that_are_gone_are_not_shown(toy):
    gone = RECORD | {'case': 'num_tokens=3-hidden=128-bfloat16'}
    assert docs.current([RECORD, gone], [toy]) == [RECORD]


def test_readme_needs_its_marks(root):
    (root / 'README.md').write_text('nothing')
    with pytest.raises(ArgumentError, match='must hold one'):
        docs.write(root)


def test_the_page_of_an_op_says_all_there_is(root):
    text = docs.pages(root)[root / 'docs' / 'ops' / 'tests.double.md']
    for part in (
        'double(x: Tensor) -> Tensor',
        '- `x`: (num_tokens, hidden) float32 or bfloat16, contiguous.',
        'torch.ops.tile_kernels.tests_double(Tensor x) -> Tensor',
        '| smoke | 2 | num_tokens: 0, 5; hidden: 64; dtype: float32 |',
        '| num_tokens=4096-hidden=128-bfloat16 | double_kernel block_m=4 num_threads=64 | 2.1 MB | 0.4 | 0.5 |',
        '| NVIDIA H200 | num_tokens=64-hidden=128-bfloat16 | 2.00 | 1.50 | 300 | 97.6 | 8.00 | 2026-02-02 | def5678 |',
    ):
        assert part in text


def test_a_long_signature_takes_a_line_per_parameter():
    def gate(
        x: torch.Tensor,
        top_k: int = 8,
        *,
        scoring: str = 'softmax',
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
    ):
        pass

    assert docs.signature(gate).splitlines()[:5] == [
        'gate(',
        '    x: Tensor,',
        '    top_k: int = 8,',
        '    *,',
        "    scoring: str = 'softmax',",
    ]


def test_long_lists_of_values_are_cut_with_their_count():
    assert docs.axes([{'n': n} for n in range(3)]) == 'n: 0, 1, 2'
    assert docs.axes([{'n': n} for n in range(50)]).endswith(', 10, 11, … (50 in all)')


def test_every_setting_is_on_the_settings_page():
    page = docs.settings_page()
    assert all(f'`{knob.env}`' in page and knob.doc in page for knob in KNOBS.values())


def test_the_page_of_the_layer_shows_the_last_records():
    page = (docs.ROOT / 'docs' / 'moe-layer.md').read_text()
    lines = (docs.ROOT / 'benchmarks' / 'results' / 'layer' / 'h200.jsonl').read_text().splitlines()
    last = {(r['num_tokens'], r['layer']): r for r in map(json.loads, lines)}
    for num_tokens in (4096, 64):
        table = page.partition(f'| {num_tokens} tokens |')[2].partition('\n\n')[0].splitlines()[2:]
        shown = [[cell.strip() for cell in row.strip('|').split('|')][1:] for row in table]
        expected = [
            [
                f'{r["us"]:.0f}',
                '' if r['graph_us'] is None else f'{r["graph_us"]:.0f}',
                f'{r["host_us"]:.0f}',
                f'{r["launches"]}',
                f'{r["error"]:.1%}'.replace('%', ' %'),
            ]
            for (tokens, _), r in last.items()
            if tokens == num_tokens
        ]
        assert sorted(shown) == sorted(expected)
    (commit,) = {r['commit'] for r in last.values()}
    assert f'commit {commit}' in page


def test_the_page_of_formats_says_which_functions_take_a_name():
    page = (docs.ROOT / 'docs' / 'formats.md').read_text()
    section = page.partition('## Functions that take a name')[2].partition('## Scale blocks')[0]
    taking, others = section.split('The other casts')
    functions = {name: inspect.signature(getattr(quant, name)) for name in quant.__all__ if name[0].islower()}
    formats = {name: str(found.parameters['fmt']) for name, found in functions.items() if 'fmt' in found.parameters}
    for name, annotation in formats.items():
        assert f'`{name}`' in (taking if 'QuantFormat' in annotation else others), name


def test_pages_of_products_say_what_their_floor_counts(pages):
    said = [path for path, text in pages.items() if '989 TFLOP/s (fp8: 1979)' in text]
    found = {path.removeprefix('docs/ops/').removesuffix('.md') for path in said}
    assert found == {
        'moe.gate_logits',
        'moe.gate_logits_bwd',
        *(name for name in load_ops() if name.startswith('gemm.')),
    }


def test_no_recorded_product_is_faster_than_its_floor():
    recorded = {(r['op'], r['case']): r['us'] for r in docs.measured(docs.ROOT / 'benchmarks' / 'results')}
    products = [op for op in load_ops().values() if op.family == 'gemm']
    found = [(op, case) for op in products for case in op.case_set.bench if (op.name, case_id(case)) in recorded]
    assert found
    for op, case in found:
        assert explain_case(op, case).floor_us < recorded[op.name, case_id(case)]


def test_readme_names_the_torch_that_was_tested_and_the_one_that_was_measured():
    text = (docs.ROOT / 'README.md').read_text()
    (pinned,) = re.findall('^torch==(.*)$', (docs.ROOT / 'constraints.txt').read_text(), re.MULTILINE)
    lines = (docs.ROOT / 'benchmarks' / 'results' / 'h200.jsonl').read_text().splitlines()
    for version in {pinned, *(json.loads(line)['torch'] for line in lines)}:
        assert version in text


#: Public names that are plain PyTorch, compute nothing, or reach their ops through an object they are given.
WITHOUT_OPS = {
    'attention.MLASchedule',
    'attention.get_mla_metadata',
    'distributed.PendingTokens',
    'distributed.RoutedTokens',
    'engram.EngramGatingFunction',
    'engram.engram_gate_backward',
    'engram.engram_gate_forward',
    'engram.engram_weight_grad',
    'gemm.PackedWeight',
    'gemm.Sparse24',
    'gemm.compress24',
    'gemm.from_awq',
    'gemm.from_compressed_tensors',
    'gemm.from_gptq',
    'gemm.pack_weight',
    'gemm.quantize_weight',
    'modeling.EngramGateLayer',
    'modeling.MixSplit',
    'modeling.quantize_model',
    'moe.RoutingMap',
    'moe.ScoringFunc',
    'quant.QuantFormat',
    'quant.QuantTensor',
    'rand.set_seed',
}


def test_every_public_name_is_on_a_page_with_its_own_signature(pages):
    for part in (*FAMILIES, *docs.LAYERS, *docs.TOOLS):
        page = pages[f'docs/api/{part}.md']
        names = [name.partition('.')[2] for name in docs_api.documented() if name.startswith(f'{part}.')]
        assert re.findall('^## (.*)$', page, re.MULTILINE) == names
    page = pages['docs/api/quant.md']
    cast = page.partition('\n## per_token_cast\n')[2].partition('\n## ')[0]
    assert 'stochastic_cast: bool = False' in cast and '(../ops/quant.per_token_recast.md)' in cast


def test_every_public_name_is_traced_to_its_ops():
    assert {name for name, value in docs_api.public_names().items() if not docs_api.called(value)} == WITHOUT_OPS
    assert docs_api.callers(docs.load_ops()['quant.dequantize'])[:2] == ['quant.cast_back', 'quant.per_token_cast_back']
    assert docs_api.callers(docs.load_ops()['gemm.gemm']) == ['gemm.gemm']


def test_every_op_says_how_it_is_called():
    ops = docs.load_ops()
    gradients = {op.backward for op in ops.values()}
    left = [op for op in ops.values() if not docs_api.callers(op) and op not in gradients]
    assert [op.name for op in left if not docs_api.layers_with(op)] == []
    assert 'Call [`quant.cast_back`](../api/quant.md#cast_back)' in docs.calling(ops['quant.dequantize'])
    assert docs.calling(ops['gemm.gemm']) == 'Called as [`gemm.gemm`](../api/gemm.md#gemm).'
    assert 'Autograd calls it for [mhc.pre](mhc.pre.md)' in docs.calling(ops['mhc.pre_bwd'])
    assert 'used in [`modeling.MHCPipeline`]' in docs.calling(ops['mhc.norm_fn_bwd_'])


def test_gradients_that_pass_straight_through_are_said():
    assert '**Backward** the gradient passes straight through' in docs.relations(docs.load_ops()['quant.fake_quantize'])


def test_links_between_pages_lead_somewhere(pages):
    written = [docs.ROOT / 'README.md', *(docs.ROOT / 'docs').rglob('*.md')]
    texts = {page: page.read_text() for page in written} | {docs.ROOT / path: text for path, text in pages.items()}
    extra = {
        docs.ROOT / 'docs' / f'{name}.md'
        for name in ('benchmarks', 'benchmarks-small', 'benchmarks-peers', 'examples', 'model')
    }
    slugs = {page: re.findall('^## (.*)$', text, re.MULTILINE) for page, text in texts.items()}
    headings = {page: {h.lower().replace(' ', '-') for h in found} for page, found in slugs.items()}
    for page, text in texts.items():
        for target, anchor in re.findall(r'\]\((?!http)([^)#]+)(?:#([^)]+))?\)', text):
            found = (page.parent / target).resolve()
            assert found.exists() or found in texts or found in extra, f'{page}: {target}'
            assert not anchor or anchor in headings[found], f'{page}: {target}#{anchor}'


def test_readme_links_only_to_what_the_repository_has():
    text = (docs.ROOT / 'README.md').read_text()
    targets = re.findall(r'\]\((?!http)([^)#]+)', text)
    assert targets and not [target for target in targets if not (docs.ROOT / target).exists()]
