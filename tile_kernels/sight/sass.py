"""The machine instructions of a kernel by class and width, inside of loops and outside; needs nvcc and nvdisasm."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tile_kernels.core import nvcc
from tile_kernels.core.errors import CompileError, UnsupportedError
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import resolve

#: Classes of instructions, and the opcodes that begin so; the first class that matches counts.
CLASSES = {
    'products': 'HGMMA QGMMA IGMMA BGMMA DGMMA HMMA QMMA IMMA OMMA BMMA DMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA',
    'TMA': 'UTMA UBLKCP UBLKPF UBLKRED',
    'global': 'LDG STG LDGSTS',
    'shared': 'LDS STS LDSM STSM LDTM STTM',
    'spilled': 'LDL STL',
    'atomic': 'ATOM RED',
    'SFU': 'MUFU',
    'convert': 'F2F F2I I2F I2I FRND',
    'shuffle': 'SHFL VOTE MATCH REDUX',
    'barrier': 'BAR SYNCS DEPBAR LDGDEPBAR WARPSYNC MEMBAR FENCE UCGABAR WARPGROUP ERRBAR CCTL ARRIVES',
    'float': 'FADD FMUL FFMA FMNMX FSEL FSET FCHK FSWZADD DADD DMUL DFMA DSETP HADD HMUL HFMA HMNMX HSET VHMNMX',
    'branch': 'BRA BRX EXIT CALL RET BSSY BSYNC BREAK YIELD NANOSLEEP JMP WARPSYNC BMOV KILL',
    'integer': 'IADD IMAD IMNMX IABS ISETP ISCADD ICMP LEA LOP PLOP SHF SHL SHR SEL PRMT POPC FLO BREV SGXT VIADD '
    'VIMNMX VABSDIFF IDP UIADD UIMAD USHF ULEA ULOP UPLOP USEL UISETP UPRMT USGXT UFLO UPOPC UBREV UIMNMX',
    'move': 'MOV UMOV LDC ULDC S2R S2UR CS2R P2R R2P P2UR ELECT UP2UR R2UR USETMAXREG NOP',
}
#: The opcodes whose width in bits tells how well memory is used.
WIDE = re.compile(r'(LDG|STG|LDGSTS|LDS|STS|LDL|STL|LD|ST)\b')
#: Bytes of an instruction since Volta.
STEP = 16


@dataclass(frozen=True)
class Instructions:
    """Instructions of one kind in the code: the class, the opcode with its width, and how many lie in loops."""

    group: str
    opcode: str
    count: int
    in_loops: int


@dataclass(frozen=True)
class Mix:
    """The instructions of one device function, the classes in a fixed order and the most frequent first."""

    kernel: str
    instructions: list[Instructions] = field(repr=False)

    def of(self, group: str) -> int:
        """How many instructions a class has."""
        return sum(item.count for item in self.instructions if item.group == group)

    def __str__(self) -> str:
        total, loops = (sum(getattr(i, name) for i in self.instructions) for name in ('count', 'in_loops'))
        lines = [f'{self.kernel}: {total} instructions, {loops} of them in loops']
        lines += [f'{"class":<10}{"opcode":<22}{"count":>7}{"in loops":>10}']
        return '\n'.join(
            [*lines, *(f'{i.group:<10}{i.opcode:<22}{i.count:>7}{i.in_loops:>10}' for i in self.instructions)]
        )


class Mixes(list[Mix]):
    """The device functions of a kernel; prints as text."""

    def __str__(self) -> str:
        return '\n\n'.join(map(str, self))


def mix(kernel: Any, *args: Any, device: str = 'h200', **named: Any) -> Mixes:
    """The machine instructions of a kernel by class and width; needs nvcc and nvdisasm, but no GPU.

    Args:
        kernel: a kernel, a builder or an op, as `tile_kernels.sight.subject.resolve` takes it.
        args: arguments of the kernel or the builder.
        device: the GPU to compile for.
        named: dynamic extents, arguments of the builder or entries of the case.
    """
    tool = nvdisasm()
    found = Mixes()
    for subject in resolve(kernel, *args, device=device, **named):
        cubin = nvcc.cubin(lower(subject).source, subject.gpu.target)[0]
        found += [_mix_of(function) for function in _disassembled(tool, cubin)]
    return found


def nvdisasm() -> Path:
    """Path of nvdisasm: from its Python package, beside nvcc, or on the PATH."""
    try:
        files = importlib.metadata.files('nvidia-cuda-nvdisasm') or []
        found = [Path(str(file.locate())) for file in files if file.name == 'nvdisasm']
    except importlib.metadata.PackageNotFoundError:
        found = []
    beside = nvcc.nvcc().resolve().parent / 'nvdisasm'
    on_path = shutil.which('nvdisasm')
    for tool in (*found, beside, *([Path(on_path)] if on_path else [])):
        if tool.exists():
            return tool
    raise UnsupportedError(
        'mix: nvdisasm is not installed, which reads machine code; run: pip install "open-tile-kernels[sass]"'
    )


def _disassembled(tool: Path, cubin: bytes) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), '-json', file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or 'no message').splitlines()[0]
        raise CompileError(f'mix: nvdisasm cannot read the machine code: {reason}')
    return json.loads(done.stdout)[1]


def _mix_of(function: dict[str, Any]) -> Mix:
    code = function['sass-instructions']
    looped = in_loops([(item['opcode'], item.get('operands', ''), 'predicate' in item) for item in code])
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for item, loop in zip(code, looped, strict=True):
        kind = counts[_class_of(item['opcode']), _with_width(item['opcode'])]
        kind[0] += 1
        kind[1] += loop
    order = [*CLASSES, 'other']
    ranked = sorted(counts.items(), key=lambda entry: (order.index(entry[0][0]), -entry[1][0], entry[0][1]))
    return Mix(function['function-name'], [Instructions(*kind, *numbers) for kind, numbers in ranked])


def _class_of(opcode: str) -> str:
    base = opcode.partition('.')[0]
    return next((name for name, words in CLASSES.items() if base.startswith(tuple(words.split()))), 'other')


def _with_width(opcode: str) -> str:
    """`LDG.E.128.CONSTANT` -> `LDG.128`; opcodes without a width keep only their name."""
    base, *rest = opcode.split('.')
    if not WIDE.match(base):
        return base
    widths = [int(word.lstrip('US')) for word in rest if re.fullmatch(r'[US]?(8|16|32|64|128|256)', word)]
    return f'{base}.{widths[0] if widths else 32}'


def in_loops(code: list[tuple[str, str, bool]]) -> list[bool]:
    """Whether each instruction can be reached from itself; instructions are opcode, operands and if predicated."""
    targets = [_target(opcode, operands) for opcode, operands, _ in code]
    targets = [None if target == place else target for place, target in enumerate(targets)]  # the end of the code
    starts = sorted(
        {0, *(t for t in targets if t is not None), *(i + 1 for i, t in enumerate(targets) if t is not None)}
    )
    starts = [start for start in starts if start < len(code)]
    block = {start: number for number, start in enumerate(starts)}
    ends = [*starts[1:], len(code)]
    reach = []
    for end in ends:
        (opcode, operands, predicated), target = code[end - 1], targets[end - 1]
        leaves = opcode.startswith(('BRA', 'EXIT', 'RET', 'BRX')) and not predicated and 'P' not in operands
        reach.append(
            (1 << block[target] if target in block else 0) | (0 if leaves or end == len(code) else 1 << block[end])
        )
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(reach))):
            more, rest = reach[number], reach[number]
            while rest:
                next_block = rest.bit_length() - 1
                more, rest = more | reach[next_block], rest ^ (1 << next_block)
            changed, reach[number] = changed or more != reach[number], more
    return [
        bool(reach[n] >> n & 1)
        for n, (start, end) in enumerate(zip(starts, ends, strict=True))
        for _ in range(start, end)
    ]


def _target(opcode: str, operands: str) -> int | None:
    """The instruction that a branch goes to."""
    found = re.search(r'0x([0-9a-f]+)$', operands.replace(' ', ''))
    return int(found[1], 16) // STEP if opcode.startswith('BRA') and found else None
