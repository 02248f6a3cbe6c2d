"""Predictions: exact counts under them, their errors on recorded times, devices, occupancy, comparison, roofline."""

import json
from dataclasses import replace

import pytest
import tilelang.language as T

from tile_kernels import ArgumentError, UnsupportedError, knobs, sight
from tile_kernels.core.gpus import DEVICES, GPUS, SPEEDS
from tile_kernels.sight import exact, validate
from tile_kernels.sight.count import Counts
from tile_kernels.sight.limits import occupancy, reason_against
from tile_kernels.sight.model import TERMS, Work, demands, floor_us, time_us

from .matmul import matmul

H200 = GPUS['h200']


@pytest.mark.parametrize('case', exact.cases(), ids=lambda case: case.name)
def test_counts_equal_formulas(case):
    assert case.measured() == case.expected


def test_the_formulas_cover_enough_kernels():
    names = [case.name for case in exact.cases()]
    assert len(names) >= 20 and len(set(names)) == len(names)


@pytest.fixture(scope='module')
def product():
    return sight.predict(matmul, 4096, 4096, 4096, compile=False)


def test_prediction_of_a_product(product):
    assert product.flops == {'float16': 2 * 4096**3} and product.traffic['hbm'] == 3 * 2 * 4096**2
    assert product.traffic['buffers']['A']['times_read'] == 4096 / 64
    assert product.bound == 'tensor' and product.fits is True and product.intensity == 4096 / 3
    assert product.floor_us < product.us and product.graph_us < product.us
    assert product.occupancy.limit == 'shared memory' and product.provenance['us'] == 'calibrated'
    assert 0.5 < product.utilization['tensor'] < 1
    assert json.loads(json.dumps(product.to_dict(), default=float))['bound'] == 'tensor'


def test_predictions_print_in_a_few_lines_of_80_columns(product):
    lines = str(product).splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) <= 100 and lines[0].startswith('relu on H200: ')


def test_a_gpu_that_was_not_measured_has_a_floor_and_no_time():
    found = sight.predict(matmul, 512, 512, 512, compile=False, device='a100')
    assert found.us is None and found.graph_us is None and found.floor_us > 0 and found.utilization == {}
    assert 'no predicted time' in str(found)
    with pytest.raises(ArgumentError, match='device must be one of'):
        sight.predict(matmul, device='h20')


def test_an_op_has_its_launches_and_an_empty_one_none():
    found = sight.predict('mhc.split_mixes_bwd', compile=False)
    assert len(found.launches) == 2 and found.us > max(part.us for part in found.launches)
    assert found.floor_us == sum(part.floor_us for part in found.launches)
    empty = sight.predict('quant.per_token_cast', compile=False, num_tokens=0)
    assert empty.bound == 'nothing launches' and empty.us == 0


def test_compare_names_the_reason(product):
    smaller = sight.predict(matmul, 4096, 4096, 1024, compile=False)
    text = str(sight.compare(product, smaller))
    assert 'the first takes' in text and 'products' in text.splitlines()[-1]
    assert 'equal within 2 %' in str(sight.compare(product, product))
    assert 'cannot be launched' in sight.compare(product, replace(smaller, fits='too large')).reason


WORK = Work(4e9, {}, 0.0, 10**6, 3e9)


@pytest.mark.parametrize(
    ('work', 'name'),
    [(WORK, 'hbm'), (replace(WORK, flops={'bfloat16': 1e13}), 'tensor'), (replace(WORK, alu=1e12), 'alu')],
)
def test_the_longest_resource_decides(work, name):
    found = demands(work, H200)
    assert max(found, key=found.get) == name
    assert time_us([work], H200) == pytest.approx(found[name] + H200.speeds['event_us'])


def test_terms_can_be_switched_off():
    few = replace(WORK, blocks=33)
    assert demands(few, H200)['hbm'] == pytest.approx(2 * demands(few, H200, ('fill',))['hbm'])
    assert demands(WORK, H200, ('counted',))['hbm'] == pytest.approx(0.75 * demands(WORK, H200)['hbm'])
    assert demands(WORK, H200).keys() - demands(WORK, H200, ('alu',)).keys() == {'alu'}
    both = [time_us([WORK, WORK], H200, off) for off in ((), ('next',))]
    assert both[0] - both[1] == pytest.approx(H200.speeds['next_us'])
    assert floor_us(replace(WORK, flops={'int8': 1.979e15}), H200) == pytest.approx(1e6)


@pytest.mark.parametrize(
    ('threads', 'shared', 'registers', 'blocks', 'limit'),
    [
        (128, 0, 32, 16, 'threads'),
        (128, 0, 168, 3, 'registers'),
        (128, 100 << 10, None, 2, 'shared memory'),
        (32, 0, 32, 32, 'blocks'),
        (1024, 0, 65, 0, 'registers'),
    ],
)
def test_occupancy(threads, shared, registers, blocks, limit):
    found = occupancy(Counts('k', (1, 1, 1), threads, shared), H200, registers)
    assert (found.blocks, found.limit) == (blocks, limit)


FINE = Counts('k', (64, 1, 1), 128, 32 << 10)


@pytest.mark.parametrize(
    ('changes', 'registers', 'device', 'words'),
    [
        (dict(threads=1056), None, 'h200', '1024 threads, got 1056'),
        (dict(shared=228 << 10), None, 'h200', '227 KB of shared memory, got 228 KB'),
        (dict(shared=164 << 10), None, 'a100', '163 KB of shared memory'),
        (dict(shared=100 << 10), None, 'rtx4090', '99 KB of shared memory'),
        (dict(cluster=32), None, 'h200', 'at most 16 blocks, got 32'),
        (dict(cluster=2), None, 'a100', 'at most 1 blocks, got 2'),
        (dict(grid=(64, 65536, 1)), None, 'h200', 'blocks in y, got 65536'),
        (dict(grid=(64, 1, 65536)), None, 'h200', 'blocks in z, got 65536'),
        (dict(grid=(1 << 31, 1, 1)), None, 'h200', 'blocks in x'),
        (dict(grid=(0, 1, 1)), None, 'h200', 'got 0'),
        (dict(threads=512), 168, 'h200', '512 threads of 168 registers'),
    ],
)
def test_a_launch_beyond_a_limit_is_refused_with_the_reason(changes, registers, device, words):
    assert reason_against(FINE, GPUS[device], 64) is None
    assert words in reason_against(replace(FINE, **changes), GPUS[device], registers)


def test_every_number_of_a_device_has_a_source():
    for path in DEVICES.glob('*.json'):
        about = json.loads(path.read_text())
        assert path.stem in GPUS and {source for _, source in about['numbers'].values()} == about['sources'].keys()
        assert all(len(text) > 20 for text in about['sources'].values())
    assert H200.speeds.keys() == set(SPEEDS) and not GPUS['b200'].speeds


def test_a_calibrated_file_replaces_the_speeds(tmp_path):
    with knobs(cache_dir=tmp_path):
        before = time_us([WORK], sight.subject.gpu_for('h200'))
        path = sight.subject.calibrated(H200)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({'numbers': {name: [2 * value, 'm'] for name, value in H200.speeds.items()}}))
        assert time_us([WORK], sight.subject.gpu_for('h200')) < before
        path.write_text('{"numbers": {')
        assert sight.subject.gpu_for('h200') == H200


def router(S, E, H):
    @T.prim_func
    def scores(x: T.Tensor((S, H), 'bfloat16'), w: T.Tensor((E, H), 'bfloat16'), y: T.Tensor((S, E), 'bfloat16')):
        with T.Kernel(E // 128, S // 128, threads=128) as (bx, by):
            a, b = T.alloc_shared((128, 64), 'bfloat16'), T.alloc_shared((128, 64), 'bfloat16')
            total = T.alloc_fragment((128, 128), 'float32')
            T.clear(total)
            for k in T.Pipelined(H // 64, num_stages=2):
                T.copy(x[by * 128, k * 64], a)
                T.copy(w[bx * 128, k * 64], b)
                T.gemm(a, b, total, transpose_B=True)
            T.copy(total, y[by * 128, bx * 128])

    return scores


def test_the_router_lies_at_the_ridge():
    S, E, H = 1024, 256, 7168
    found = sight.predict(router, S, E, H, compile=False)
    read = sum(found.traffic['buffers'][name]['distinct'] for name in ('x', 'w'))
    assert round(sum(found.flops.values()) / read, 1) == round(S * E / (S + E), 1) == 204.8
    line = sight.roofline(found)
    assert round(line.ridge) == 206 and f'{line.points[0].intensity:.0f}' in line.table()
    assert line.points[0].achieved < line.points[0].attainable


def test_roofline_of_records(tmp_path):
    record = {'op': 'gemm.gemm', 'case': 'x', 'gbps': 1000.0, 'tflops': 400.0}
    line = sight.roofline([record, 'quant.per_token_cast'])
    assert line.points[0].intensity == 400 and line.points[0].achieved == 4e14 and line.points[0].measured
    assert max(map(len, line.table().splitlines())) <= 80
    with pytest.raises(ArgumentError, match='must have gbps'):
        sight.roofline({'op': 'x'})
    with pytest.raises(ArgumentError, match=r'end in .svg or .png'):
        line.plot(tmp_path / 'a.pdf')


def test_rank_correlation():
    assert validate.spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert validate.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert validate.spearman([1, 2, 3], [5, 5, 5]) == 0
    assert validate.spearman([1, 2, 2, 4], [1, 2, 2, 4]) == pytest.approx(1)


def test_sweeps_are_judged(tmp_path):
    path = tmp_path / 'sweeps.jsonl'
    rows = [{'op': 'k', 'case': 'a', 'us': us, 'predicted_us': p} for us, p in ((10, 2.0), (20, 1.0), (11, 3.0))]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (found,) = validate.sweeps(path)
    assert found['configs'] == 3 and found['first'] == pytest.approx(1.0) and found['five'] == 0


def test_recorded_sweeps_are_ranked_well():
    rows = validate.sweeps()
    assert len(rows) >= 24 and all(row['configs'] >= 14 for row in rows)  # half of those of attention do not fit
    assert sorted(row['rank'] for row in rows)[len(rows) // 2] >= 0.8
    assert sorted(row['first'] for row in rows)[len(rows) // 2] <= 0.1


def test_counters_are_judged(tmp_path):
    path = tmp_path / 'ncu.jsonl'
    counted = {'registers': 10, 'l2_sectors': 2e6, 'shared_wavefronts': 0, 'dram_bytes': 1e8, 'warps': 8}
    measured = {'registers': 16, 'l2_sectors': 1e6, 'shared_wavefronts': 9.0, 'dram_bytes': 1e8, 'warps': 10}
    path.write_text(json.dumps({'kernel': 'k', 'counted': counted, 'measured': measured}))
    assert validate.counters(path) == {'k': {'registers': 1, 'l2_sectors': 2, 'dram_bytes': 1, 'warps': 0.8}}


def test_work_on_file_holds_while_the_code_does():
    """The first known case is not counted again; with another digest it is."""
    known = validate.known_works()
    record = next(r for r in validate.latest() if (r['op'], r['case']) in known and r['op'] == 'quant.per_token_cast')
    line = known[record['op'], record['case']]
    fake = {'works': [{**line['works'][0], 'bytes': 1.0}]}
    key = record['op'], record['case']
    assert validate.timed(record, H200, {key: line | fake}).works[0].bytes == 1
    assert (
        validate.timed(record, H200, {key: line | fake | {'code': 'other'}}).works[0].bytes == line['works'][0]['bytes']
    )


def timed(number: int) -> list[validate.Timed]:
    chosen = validate.sample(validate.latest(), number) if number else validate.latest()
    return [validate.timed(record, H200) for record in chosen]


@pytest.mark.skipif(not validate.latest(), reason='there are no records')
def test_predictions_of_recorded_cases():
    """A small sample; all records with `TK_FULL_TEST=1`, where the model must also beat the roofline."""
    full = knobs.full_test
    found = timed(0 if full else 6)
    assert sum(bool(t.works) for t in found) >= 0.9 * len(found)
    model = validate.errors(found, H200)
    assert model.median < (0.07 if full else 0.25)
    if full:
        roofline = validate.errors(found, replace(H200, speeds={**H200.speeds, **validate.BASELINE}), TERMS)
        assert model.p90 < 0.25 < roofline.p90 and model.far < roofline.far
        assert len(validate.floors_above(found, H200)) <= 3


def test_micro_kernels_of_calibrate_run_and_give_every_speed():
    import torch

    from tile_kernels.interpreter.jit_hook import InterpretedKernel
    from tile_kernels.sight import calibrate

    calls = []

    def clock(call):
        call()
        calls.append(call)
        return 10.0 + len(calls)

    timer = calibrate.Timer(clock, clock, lambda func: InterpretedKernel(func, None, {}, 'memory'), 'cpu')
    found = calibrate.measure(replace(H200, sms=1), timer, largest=1 << 13, turns=2, side=128)
    assert found.keys() >= set(SPEEDS) | {'l2_bandwidth', 'shared_8_way', 'shuffle_rate', 'atomic_rate', 'float8_rate'}
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match='no GPU to measure'):
            calibrate.calibrate(timer)


@pytest.mark.parametrize('ways', [1, 2, 4, 8])
def test_the_micro_kernels_meet_in_banks_as_they_say(ways):
    from tile_kernels.sight import calibrate

    (access,) = [a for a in sight.predict(calibrate.banked, 8, ways, compile=False).accesses if a.how == 'load']
    assert access.wavefronts == ways * access.least_wavefronts


SASS = [
    ('LDG.E.128.CONSTANT', 'R4, [R2]', False),
    ('FFMA', 'R1, R2, R3, R4', False),
    ('SYNCS.PHASECHK', '', False),
    ('BRA', '0x80', True),  # waits beside the loop
    ('STS.64', '[R1], R2', False),
    ('BRA', '0x10', True),
    ('STG.E.U16', '[R1], R2', False),
    ('EXIT', '', False),
    ('SYNCS.PHASECHK', '', False),
    ('BRA', '0x80', True),
    ('BRA', '0x40', False),
    ('BRA', '0xb0', False),
]


def test_instructions_in_loops():
    from tile_kernels.sight import sass

    assert [place for place, looped in enumerate(sass.in_loops(SASS)) if looped] == [1, 2, 3, 4, 5, 8, 9, 10]
    plain = [('LDG.E', '', False), ('EXIT', '', False), ('BRA', '0x20', False)]
    assert not any(sass.in_loops(plain))


def test_instructions_by_class_and_width():
    from tile_kernels.sight import sass

    code = [{'opcode': o, 'operands': a} | ({'predicate': '@P0'} if p else {}) for o, a, p in SASS]
    found = sass._mix_of({'function-name': 'f', 'sass-instructions': code})
    assert found.of('global') == 2 and found.of('float') == 1 and found.of('barrier') == 2
    opcodes = {i.opcode: (i.count, i.in_loops) for i in found.instructions}
    assert opcodes['LDG.128'] == (1, 0) and opcodes['STG.16'] == (1, 0) and opcodes['STS.64'] == (1, 1)
    assert str(found).startswith('f: 12 instructions, 8 of them in loops')


def test_without_nvdisasm_one_sentence_says_how_to_get_it(monkeypatch):
    from tile_kernels.sight import sass

    monkeypatch.setattr(sass.importlib.metadata, 'files', lambda name: None)
    monkeypatch.setattr(sass.nvcc, 'nvcc', lambda: sass.Path('/nowhere/nvcc'))
    monkeypatch.setenv('PATH', '')
    with pytest.raises(UnsupportedError, match=r'open-tile-kernels\[sass\]'):
        sight.mix(matmul)
