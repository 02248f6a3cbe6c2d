"""Everything about distributed programs that one GPU can show: results, memcheck, and the probe of one-launch layers.

python tools/scale_check.py [--json FILE]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Run all steps, also after a failure; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--json', default=str(ROOT / 'benchmarks' / 'results' / 'scale_probe.jsonl'))
    arguments = parser.parse_args()
    pytest = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
    sanitizer = shutil.which('compute-sanitizer') or 'compute-sanitizer'
    tests = str(ROOT / 'tests' / 'gpu' / 'test_scale.py')
    steps = {
        'simulator': [*pytest, str(ROOT / 'tests' / 'scale')],
        'results': [*pytest, tests],
        'memcheck': [sanitizer, '--tool', 'memcheck', '--error-exitcode', '9', *pytest, tests, '-k', 'test_on_one_gpu'],
        'probe': [sys.executable, '-m', 'tools.scale_probe', '--json', arguments.json],
    }
    failed = []
    for name, command in steps.items():
        print(f'\n=== {name}: {" ".join(command)}', flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f'\nfailed: {", ".join(failed)}' if failed else '\nall steps passed')
    return int(bool(failed))


if __name__ == '__main__':
    sys.exit(main())
