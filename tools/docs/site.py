"""The site: every page with its plots, built by Sphinx into a folder that opens from disk.

    python -m tools.docs.site [--out site]

Pages come from `docs`, from the declarations of ops, and from `benchmarks/results`. They are put together in a
temporary folder that has the layout of the checkout, so their links stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tile_kernels import FAMILIES, plots
from tile_kernels.cli.bench import GPU_TIMER, read_records
from tile_kernels.cli.report import STYLE
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.op import Op
from tile_kernels.core.registry import load_ops
from tile_kernels.plots import Plot
from tile_kernels.sight import validate
from tile_kernels.sight.model import TERMS, time_us
from tile_kernels.testing.records import Record
from tools.docs import notebooks
from tools.docs.api import GENERATED, markdown
from tools.docs.pages import README_DEVICE, ROOT, current, layer_records, measured, pages, readme

#: Folders that pages link to. Sphinx copies the files that are named.
LINKED = ('tile_kernels', 'examples', 'benchmarks', 'tests', 'tools', 'LICENSE')

#: The groups of the navigation and their pages below `docs`; pages that do not exist are left out.
NAVIGATION = {
    'Begin': ('start', 'choosing', 'known-calls', 'migration', 'troubleshooting'),
    'Families': tuple(f'notebooks/{family}' for family in FAMILIES),
    'Guides': ('moe-layer', 'real-models', 'formats', 'deployment', 'settings', 'scale'),
    'Without a GPU': ('interpreter', 'debugging', 'writing-an-op', 'learn'),
    'Toolbox': ('sight', 'layouts-and-lint', 'tuning-and-profiling'),
    'Reference': ('api/README', 'ops/README', 'examples', 'glossary'),
    'Numbers': ('benchmarks', 'benchmarks-small', 'benchmarks-peers', 'status', 'support', 'model'),
    'Project': ('decisions', 'notes/README', 'not-here', '../CHANGELOG', '../CONTRIBUTING'),
}


#: What the terms of the model are called on its page.
TERM_WORDS = {
    'without counted': 'declared instead of counted bytes',
    'without fill': 'without the term for few blocks',
    'without next': 'without a cost for each further launch',
    'without alu': 'without other arithmetic',
}


def build(out: Path, root: Path = ROOT, ops: Sequence[str] | None = None) -> None:
    """Build the site into a folder; `ops` limits the ops whose pages have plots."""
    try:
        from sphinx.cmd.build import main as sphinx
    except ImportError:
        raise ArgumentError('site: Sphinx is missing; install it with: pip install "open-tile-kernels[docs]"') from None
    with tempfile.TemporaryDirectory(prefix='tile_kernels-site-') as folder:
        stage(Path(folder), root, ops)
        words = ['-W', '--keep-going', '-q', '-b', 'html', '-j', 'auto', '-c', f'{folder}/docs', folder, str(out)]
        if sphinx(words) != 0:
            raise ArgumentError('site: Sphinx found faults in the pages; its messages are above')
    shutil.rmtree(out / '.doctrees', ignore_errors=True)


def stage(folder: Path, root: Path = ROOT, ops: Sequence[str] | None = None) -> None:
    """Put all pages of the site into a folder with the layout of the checkout."""
    shutil.copytree(root / 'docs', folder / 'docs', dirs_exist_ok=True)
    for name in ('CHANGELOG.md', 'CONTRIBUTING.md'):
        shutil.copy(root / name, folder / name)
    for name in LINKED:
        os.symlink(root / name, folder / name)
    results = root / 'benchmarks' / 'results'
    known = sorted(load_ops().values(), key=lambda op: op.name)
    records = current(measured(results), known)
    every = [r for r in read_records(results / 'h200.jsonl') if r.get('timer') == GPU_TIMER and 'sweep' not in r]
    made = pages(root) | {
        root / 'docs' / f'{name}.md': text for name, text in extra_pages(records, every, root).items()
    }
    for path, text in made.items():
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for page in [folder / path.relative_to(root) for path in (root / 'docs').rglob('*.md')]:
        page.write_text(f'{page.read_text()}\n\n{{download}}`Source of this page <{page.name}>`\n')
    drawn = [op.name for op in known if ops is None or op.name in ops]
    parts = [[[r for r in group if r['op'] == name] for name in drawn] for group in (records, every)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context('fork')) as pool:
        for name, section in zip(drawn, pool.map(op_plots, drawn, *parts), strict=True):
            page = folder / 'docs' / 'ops' / f'{name}.md'
            page.write_text(page.read_text() + section)
    for path in notebooks.write(folder / 'docs' / 'notebooks'):
        links = (path.name, 'This page as a notebook'), (f'../api/{path.stem}.md', 'All functions')
        page = path.with_suffix('.md')
        page.write_text('\n\n'.join([page.read_text(), *(f'[{words}]({target})' for target, words in links)]))
    for part in ('ops', 'api', 'notes'):
        index = folder / 'docs' / part / 'README.md'
        index.write_text(f'{index.read_text()}\n\n{toctree("", ["*"], glob=True)}')
    (folder / 'index.md').write_text(home(folder, root, known, records))
    (folder / 'README.md').unlink()
    static = folder / 'docs' / 'static'
    static.mkdir(exist_ok=True)
    (static / 'plots.css').write_text(STYLE)


# Pages --------------------------------------------------------------------------------------


def home(folder: Path, root: Path, ops: Sequence[Op], records: Sequence[Record]) -> str:
    """README with links to the reference and one plot in place of its picture, and the navigation."""
    text = readme(root / 'README.md', ops, records, links=True)
    text = re.sub(r'!\[[^]]*\]\(docs/images/speed\.svg\)', lambda _: raw(plots.families(records)), text)
    text = text.replace('](examples)', '](docs/examples.md)')
    listed = {name for names in NAVIGATION.values() for name in names}
    others = sorted(path.stem for path in (folder / 'docs').glob('*.md') if path.stem not in listed)
    groups = {**NAVIGATION, 'More': tuple(others)}
    trees = [
        toctree(caption, [os.path.normpath(f'docs/{name}') for name in names if (folder / f'docs/{name}.md').exists()])
        for caption, names in groups.items()
    ]
    return '\n\n'.join([text, *(tree for tree in trees if tree)])


def toctree(caption: str, names: Sequence[str], *, glob: bool = False) -> str:
    """A group of the navigation; empty without pages."""
    if not names:
        return ''
    options = [':hidden:', *([':glob:'] if glob else []), *([f':caption: {caption}'] if caption else [])]
    return '\n'.join(['```{toctree}', *options, '', *names, '```', ''])


def extra_pages(records: Sequence[Record], every: Sequence[Record], root: Path) -> dict[str, str]:
    """Pages that only the site has: benchmarks, examples and the model of times."""
    return {
        'benchmarks': benchmarks_page(records, every, root),
        'benchmarks-small': small_page(records),
        **peers_pages(every, root),
        'examples': examples_page(root),
        'model': model_page(records),
    }


def benchmarks_page(records: Sequence[Record], every: Sequence[Record], root: Path) -> str:
    """All plots over all ops, how the numbers were taken, and how to repeat them."""
    results = root / 'benchmarks' / 'results'
    others, layers = (read_records(results / part / 'h200.jsonl') for part in ('peers', 'layer'))
    sections = {
        'Time relative to a copy': (plots.shares(records, False, 'forward'), plots.shares(records, True, 'gradients')),
        'Matrix products': (plots.roofline(records, others),),
        'A whole layer': (plots.layers(layers), plots.decoder_layers(layer_records(root))),
    }
    known = [f'## {title}\n\n' + '\n'.join(map(raw, found)) for title, found in sections.items()]
    method = (
        'All plots are drawn from the records in `benchmarks/results`. A case is timed only if the op agrees with '
        'plain PyTorch in the same run. Times are medians of CUDA events with a cold L2 cache. `% of copy` is the time '
        'of a device-to-device copy of the same bytes, divided by the time of the op.\n\n'
        '`tile-kernels bench OP` repeats the numbers of an op on your GPU. `python tools/gpu_check.py` repeats all of '
        'them, and `tile-kernels report` draws them for your own records.\n\n'
        'Not measured: any GPU but one H200, and links between GPUs. [Status](status.md) says what was run where. '
        '[Small calls](benchmarks-small.md), [other libraries](benchmarks-peers.md) and [predictions](model.md) have '
        'pages of their own.'
    )
    return '\n\n'.join([GENERATED, '# Benchmarks', method, *known]) + '\n'


def small_page(records: Sequence[Record]) -> str:
    """Plots of the smallest cases and of host times."""
    about = 'Small calls are bound by latency. [Benchmarks](benchmarks.md) says how the numbers were taken.'
    drawn = (raw(plots.latency(records)), raw(plots.host(records)))
    return '\n\n'.join([GENERATED, '# Small calls and host time', about, *drawn]) + '\n'


def peers_pages(every: Sequence[Record], root: Path) -> dict[str, str]:
    """Other libraries beside this one: how the round was taken, and a page with plots for each family."""
    about = (
        'Each mark is one library at one case. Both ran in the same process, took turns, got the same inputs, and '
        'agreed with plain PyTorch in float32. A library that refuses a case has a hatched bar there. A library that '
        'was absent, failed or computed something else has a record in the file, and no mark.\n\n'
        '`python tools/peers.py --seconds 600 --json benchmarks/results/peers/h200.jsonl` repeats the round; '
        '`python tools/peers.py norm` repeats a family. The script measures every library that Python can import, and '
        'needs none. It first compiles in as many processes as there are cores, then measures alone. Triton kernels '
        'that choose a config by measuring choose it while other processes compile.\n\n'
        'Layouts are converted before the clock starts. A name says where a library works in place, in another dtype, '
        'or on a simpler layout. Gradients of attention and linear attention go through autograd.'
    )
    pairs = plots.beside(every, read_records(root / 'benchmarks' / 'results' / 'peers' / 'h200.jsonl'))
    families = sorted({plots.family(ours) for ours, _ in pairs})
    links = '\n'.join(f'- [{family}](peers/{family}.md)' for family in families)
    index = [GENERATED, '# Beside other libraries', about, links, toctree('', [f'peers/{name}' for name in families])]
    pages = {'benchmarks-peers': '\n\n'.join(index) + '\n'}
    for family in families:
        own = [pair for pair in pairs if plots.family(pair[0]) == family]
        columns = {'us': '', 'graph_us': '-graph', 'host_us': '-host'}
        drawn = [plots.peers(own, f'peers-{family}{word}', column) for column, word in columns.items()]
        text = '[How the numbers were taken](../benchmarks-peers.md).'
        pages[f'peers/{family}'] = '\n\n'.join([GENERATED, f'# {family}: others', text, *map(raw, drawn)]) + '\n'
    return pages


def model_page(records: Sequence[Record]) -> str:
    """Predicted beside measured times, and the errors of the model with each of its terms switched off."""
    gpu = GPUS[README_DEVICE.lower()]
    own = {(r['op'], r['case']): r for r in records if gpu.name in r['device']}
    found = validate.with_works(own.values())
    plain = validate.baseline(gpu)
    pairs = [(own[t.op, t.case], time_us(t.works, gpu), time_us(t.works, plain, TERMS)) for t in found]
    rows = [
        (TERM_WORDS.get(name, name), *(cell for e in both for cell in (f'{e.median:.1%}', f'{e.p90:.1%}', e.far)))
        for name, *both in (validate.error_rows(found, gpu) if found else ())
    ]
    held = sum(t.held_out for t in found)
    kinds = (f'all {len(found)}', f'{held} held out')
    heading = (
        '',
        *(f'{kind}: {what}' for kind in kinds for what in ('median error', '90th percentile', 'beyond 25 %')),
    )
    about = (
        '`tile_kernels.sight` predicts the time of a kernel from bytes and products that it counts in lowered code. '
        '[Predict a kernel](sight.md) has the terms of the model. This page compares it with times of an H200.\n\n'
        'Held-out shapes had no part in the fit of the constants. '
        'The baseline is a roofline with two constants on the bytes that an op declares.\n\n'
        '`python tools/sight_records.py works` counts cases that are missing here. It needs no GPU.'
    )
    commits = ', '.join(sorted({r['commit'][:7] for r in read_records(validate.WORKS)})) if found else ''
    missing = (
        f'{len(own) - len(found)} measured cases are not counted yet; those shown are a random sample. '
        f'Kernels were counted at commit {commits}.'
    )
    plot = raw(plots.model(pairs, missing))
    return '\n\n'.join([GENERATED, '# Predicted and measured times', about, markdown(heading, rows), plot]) + '\n'


def examples_page(root: Path) -> str:
    """The programs of `examples`, each with the first line of its docstring."""
    rows = []
    for path in sorted((root / 'examples').rglob('*.py')):
        if not path.name.startswith('_'):
            about = (ast.get_docstring(ast.parse(path.read_text())) or '').partition('\n')[0]
            name = path.relative_to(root / 'examples').as_posix()
            rows.append((f'[{name}](../examples/{name})', about))
    about = 'Every program runs on a CPU: `python examples/NAME.py`. The tests run all of them.'
    return f'{GENERATED}\n\n# Examples\n\n{about}\n\n{markdown(("program", "what it shows"), rows)}\n'


def op_plots(name: str, own: Sequence[Record], rounds: Sequence[Record]) -> str:
    """The plots of one op as a section of its page; empty if it was not measured."""
    found = [plots.sizes(own, f'sizes-{name}'), plots.history(rounds, f'history-{name}')]
    drawn = [raw(plot) for plot in found if plot is not None]
    repeat = f'Repeat these numbers: `tile-kernels bench {name}`.'
    return '\n\n'.join(['', '## Plots', repeat, *drawn]) if drawn else ''


def raw(plot: Plot | None) -> str:
    """A plot as a block of HTML in Markdown."""
    return '' if plot is None else f'```{{raw}} html\n{plot.html()}```\n'


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site."""
    parser = argparse.ArgumentParser('python -m tools.docs.site', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--out', type=Path, default=ROOT / 'site', help='folder for the site (default: site)')
    parser.add_argument('--plots', nargs='*', metavar='OP', help='draw plots of these ops only')
    args = parser.parse_args(argv)
    try:
        build(args.out, ops=args.plots)
    except ArgumentError as error:
        sys.stderr.write(f'{error}\n')
        return 1
    sys.stdout.write(f'{args.out / "index.html"}\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
