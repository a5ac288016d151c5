"""The numbers through the API: what is poisonous is kept out, and what is let in is added up exactly."""

import itertools

import numpy as np
import pytest

import harness
from harness import Daemon
from harness import Worker
from harness import pb
from harness import refused
from harness import run_round
from harness import tensor
from harness import types


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running


def _fp32(value):
    return types.CODEC_FP32, np.asarray([1, value, 1, 1], "<f4").tobytes()


def _poison():
    half_nan = np.asarray([1, np.nan, 1, 1], "<f2").tobytes()
    bf16_nan = np.asarray([0x3F80, 0x7FC1, 0x3F80, 0x3F80], "<u2").tobytes()
    bf16_inf = np.asarray([0x3F80, 0xFF80, 0x3F80, 0x3F80], "<u2").tobytes()
    scale_nan = np.asarray([np.nan], "<f4").tobytes() + bytes([1, 2, 3, 4])
    return {
        "nan": _fp32(np.nan),
        "inf": _fp32(np.inf),
        "minus-inf": _fp32(-np.inf),
        "fp16-nan": (types.CODEC_FP16, half_nan),
        "fp16-inf": (types.CODEC_FP16, np.asarray([1, np.inf, 1, 1], "<f2").tobytes()),
        "bf16-nan": (types.CODEC_BF16, bf16_nan),
        "bf16-inf": (types.CODEC_BF16, bf16_inf),
        "int8-scale-nan": (types.CODEC_INT8, scale_nan),
    }


@pytest.mark.parametrize("kind", sorted(_poison()))
def test_case_55_one_bad_number_is_kept_out(daemon, kind):
    """One worker's delta holds one NaN or infinity. It is refused by name, nothing of it reaches model or momentum,
    the round goes on with the others, and the worker may send a sound delta afterwards."""
    job = "case-55-" + kind
    daemon.create_job(job, min_workers=2, expected_workers=3, lease=20.0, variant=types.VARIANT_CLASSICAL,
                      block_momentum=0.5)
    names = ("bad", "good1", "good2")
    bad, good1, good2 = [Worker(daemon.address, job, name, init=[1, 2, 3, 4]) for name in names]
    codec, payload = _poison()[kind]
    digest = bad.started(1).base_digest
    before = daemon.status(job).model_digest
    # A scale that is no number makes the blocks malformed, before there are elements to look at.
    malformed = codec == types.CODEC_INT8
    refusal = refused("BAD_CODEC" if malformed else "NON_FINITE_DELTA", bad.push, 1, payload, base_digest=digest,
                      codec=codec)
    if not malformed:
        assert refusal.metadata["tensor"] == "w" and refusal.metadata["index"] == "1"
    status = daemon.status(job)
    assert status.model_digest == before and status.round.have == 0
    assert {w.worker: w.rejected for w in status.workers} == {"bad": 1, "good1": 0, "good2": 0}
    good1.push(1, [1, 1, 1, 1], base_digest=digest)
    good2.push(1, [3, 3, 3, 3], base_digest=digest)
    bad.leave()
    assert good1.committed(1).contributors == ["good1", "good2"]
    assert list(good1.values(1)) == [3, 4, 5, 6]
    # Momentum is finite too: the next round adds half of the last step.
    run_round([good1, good2], [[0] * 4, [0] * 4], 2)
    assert list(good1.values(2)) == [4, 5, 6, 7]
    for worker in (bad, good1, good2):
        worker.close()


def test_case_55_a_sound_delta_after_a_bad_one_counts(daemon):
    """The refusal is of the bytes, not of the worker."""
    daemon.create_job("case-55-again", min_workers=1, expected_workers=1, lease=20.0, variant=types.VARIANT_AVERAGING)
    with Worker(daemon.address, "case-55-again", "w", dim=2) as worker:
        refused("NON_FINITE_DELTA", worker.push, 1, [np.nan, 1])
        worker.push(1, [1, 1])
        assert worker.committed(1).contributors == ["w"]


def _by_hand(variant, eta, zeta, deltas):
    """The rules of types.proto in their own words, for one worker and a scalar."""
    broadcast = model = velocity = 0.0
    for delta in deltas:
        before = velocity
        if variant == types.VARIANT_AVERAGING:
            model = broadcast = broadcast + delta
            continue
        gain = zeta
        if variant in (types.VARIANT_CNTK_CLASSICAL, types.VARIANT_CNTK_NESTEROV, types.VARIANT_PIKA):
            gain = (1 - eta) * zeta
        velocity = eta * velocity + gain * delta
        if variant == types.VARIANT_NESTEROV:
            model += velocity
            broadcast = model + eta * velocity
            continue
        broadcast += {
            types.VARIANT_CLASSICAL: velocity,
            types.VARIANT_CNTK_CLASSICAL: velocity,
            types.VARIANT_CAFFE2_NESTEROV: velocity - eta * (velocity - before),
            types.VARIANT_FAIRSEQ_NESTEROV: (1 + eta) * velocity,
            types.VARIANT_CNTK_NESTEROV: (1 + eta) * velocity,
            types.VARIANT_PIKA: (1 + eta) * velocity,
        }[variant]
    return broadcast


@pytest.mark.parametrize("variant", range(types.VARIANT_CLASSICAL, types.VARIANT_PIKA + 1))
def test_case_57_five_blocks_of_every_variant(daemon, variant):
    """Five blocks, one worker, exact numbers: each named rule gives its own result. The golden vectors are in
    golden_test."""
    deltas = [1.0, -0.5, 2.0, 0.25, -1.0]
    job = "case-57-%d" % variant
    daemon.create_job(job, min_workers=1, lease=20.0, variant=variant, block_momentum=0.5, block_learning_rate=0.75)
    with Worker(daemon.address, job, "w", dim=1) as worker:
        for number, delta in enumerate(deltas, 1):
            run_round([worker], [[delta]], number)
        expected = np.float32(_by_hand(variant, 0.5, 1.0 if variant == types.VARIANT_AVERAGING else 0.75, deltas))
        assert worker.values(5)[0] == expected


def test_case_57_the_default_is_nesterov_with_automatic_momentum(daemon):
    """Nothing set: Nesterov, block learning rate 1, block momentum 1 - 1/N for the N that opened round 1."""
    daemon.create_job("case-57-default", min_workers=4, lease=20.0)
    workers = [Worker(daemon.address, "case-57-default", "w%d" % i, dim=1) for i in range(4)]
    committed = run_round(workers, [[4], [0], [0], [0]], 1)
    assert (committed.block_learning_rate, committed.block_momentum) == (1.0, 0.75)
    assert committed.reset_inner_state
    assert list(workers[0].values(1)) == [1.75]
    assert list(workers[0].values(1, pb.MODEL_KIND_MODEL)) == [1.0]
    for worker in workers:
        worker.close()


def test_case_60_a_delta_is_something_that_is_added(daemon):
    """Sign convention: workers that moved up push positive numbers, and the model moves up."""
    for variant in (types.VARIANT_AVERAGING, types.VARIANT_CLASSICAL, types.VARIANT_NESTEROV, types.VARIANT_FED_ADAM):
        job = "case-60-%d" % variant
        daemon.create_job(job, min_workers=1, lease=20.0, variant=variant, block_momentum=0.5)
        with Worker(daemon.address, job, "w", init=[10, 10]) as worker:
            run_round([worker], [[1, -1]], 1)
            up, down = worker.values(1)
            assert up > 10 > down
            if variant == types.VARIANT_AVERAGING:
                # local - base pushed, local is what comes out.
                assert (up, down) == (11, 9)


def test_case_61_the_order_of_arrival_changes_nothing(tmp_path):
    """The same four deltas in all 24 orders: 24 times the same bits."""
    rng = np.random.default_rng(61)
    # Magnitudes from 1e-6 to 1e3: a plain float sum depends on its order.
    deltas = [(rng.standard_normal(997) * 10.0 ** rng.integers(-6, 4, 997)).astype("<f4") for _ in range(4)]
    init = rng.standard_normal(997).astype("<f4")
    samples = [3, 1, 7, 2]
    digests, models = set(), set()
    orders_of_plain_sums = set()
    with Daemon(tmp_path) as daemon:
        for number, order in enumerate(itertools.permutations(range(4))):
            job = "case-61-%02d" % number
            daemon.create_job(job, min_workers=4, lease=30.0, block_momentum=0.875, block_learning_rate=0.7,
                              weighting=types.WEIGHTING_SAMPLES, nominal_block=3.0)
            workers = [Worker(daemon.address, job, "w%d" % i, init=init, heartbeats=False) for i in range(4)]
            digest = workers[0].started(1).base_digest
            for index in order:
                workers[index].push(1, deltas[index], base_digest=digest, samples=samples[index])
            committed = workers[0].committed(1)
            digests.add(committed.model_digest)
            models.add(workers[0].pull(1)[1])
            plain = np.zeros(997, "<f4")
            for index in order:
                plain = plain + deltas[index] * np.float32(samples[index])
            orders_of_plain_sums.add(plain.tobytes())
            for worker in workers:
                worker.leave()
                worker.close()
    assert len(orders_of_plain_sums) > 1, "these numbers could not tell"
    assert len(digests) == 1 and len(models) == 1


def _bf16_round(values):
    return harness.bf16_values(harness.bf16_bytes(values)).astype(np.float64)


def test_case_62_bf16_in_fp32_kept_bf16_out(daemon):
    """Deltas come in bf16, the coordinator keeps FP32, the broadcast goes out in bf16. The broadcast is the bf16
    rounding of the kept model, everyone holds the same bits, and small steps add up although bf16 could not hold
    them."""
    rng = np.random.default_rng(62)
    init = rng.uniform(0.5, 2.0, 300).astype("<f4")
    daemon.create_job("case-62", min_workers=1, lease=20.0, variant=types.VARIANT_CLASSICAL, block_momentum=0.5,
                      pull_codec=types.CODEC_BF16)
    with Worker(daemon.address, "case-62", "w", init=init) as worker:
        deltas = [rng.standard_normal(300) * 1e-3 for _ in range(20)]
        model, velocity = init.astype(np.float64), np.zeros(300)
        for number, delta in enumerate(deltas, 1):
            worker.push(number, delta, codec=types.CODEC_BF16)
            worker.committed(number)
            velocity = 0.5 * velocity + _bf16_round(delta)
            model = model + velocity
            header, wire = worker.pull(number, codec=types.CODEC_BF16)
            assert header.codec == types.CODEC_BF16 and len(wire) == 600
            broadcast = harness.bf16_values(wire)
            # What the coordinator goes on from is what it sent.
            assert broadcast.tobytes() == worker.pull(number, codec=types.CODEC_FP32)[1]
            kept = worker.values(number, pb.MODEL_KIND_MODEL)
            assert kept.dtype == np.float32
            np.testing.assert_allclose(broadcast, kept, rtol=2.0**-8, atol=0)
        # 20 steps of 1e-3 on numbers near 1, where bf16 steps by 4e-3 to 8e-3.
        np.testing.assert_allclose(worker.values(20, pb.MODEL_KIND_MODEL), model, rtol=3e-6, atol=1e-6)


def test_case_62_a_bf16_tensor_travels_as_f32_numbers(daemon):
    """A manifest may say bf16; the master copy and the FP32 codec are 4 bytes an element all the same."""
    manifest = types.Manifest(tensors=[tensor("w", [5], types.DTYPE_BF16)])
    daemon.create_job("case-62-dtype", min_workers=1, lease=20.0, variant=types.VARIANT_AVERAGING)
    with Worker(daemon.address, "case-62-dtype", "w", manifest=manifest) as worker:
        run_round([worker], [[1, 2, 3, 4, 1 + 2.0**-12]], 1)
        assert list(worker.values(1)) == [1, 2, 3, 4, 1 + 2.0**-12]


def test_case_63_int8_deltas_with_error_feedback_lose_nothing(daemon):
    """Fifty rounds of int8 deltas. With the rounding error carried over to the next block the model follows the exact
    sum within one step of the grid; without, the error only stays within fifty steps."""
    rounds, size = 50, 700
    rng = np.random.default_rng(63)
    step = (rng.standard_normal(size) * 0.01).astype(np.float32)
    step[::256] = 1.0  # One large element a block makes the grid coarse for the others.
    exact = step.astype(np.float64) * rounds
    grid = 1.0 / 127
    errors = {}
    for feedback in (False, True):
        job = "case-63-%d" % feedback
        daemon.create_job(job, min_workers=1, lease=20.0, variant=types.VARIANT_AVERAGING)
        with Worker(daemon.address, job, "w", dim=size) as worker:
            digest = worker.started(1).base_digest
            residual = np.zeros(size, np.float32)
            reference = np.zeros(size)
            for number in range(1, rounds + 1):
                wanted = step + residual if feedback else step
                payload = harness.int8_encode(wanted)
                decoded = harness.int8_decode(payload, size)
                if feedback:
                    residual = wanted - decoded
                reference += decoded
                worker.push(number, payload, base_digest=digest, codec=types.CODEC_INT8)
                digest = worker.committed(number).model_digest
            model = worker.values(rounds)
            np.testing.assert_allclose(model, reference, rtol=1e-5, atol=1e-5)
            errors[feedback] = np.max(np.abs(model - exact))
    assert errors[False] <= rounds * grid / 2 + 1e-4
    assert errors[True] <= grid + 1e-4
    assert errors[True] < errors[False] / 5


def test_roles_beside_the_parameters(daemon):
    """mean, max, first and local tensors follow their own rules: no momentum, no float arithmetic on counters."""
    manifest = types.Manifest(tensors=[
        tensor("w", [2]),
        tensor("count", [], types.DTYPE_I64, types.TENSOR_ROLE_MAX),
        tensor("mean", [2], types.DTYPE_F32, types.TENSOR_ROLE_MEAN),
        tensor("scratch", [7], types.DTYPE_F32, types.TENSOR_ROLE_LOCAL),
        tensor("who", [1], types.DTYPE_I32, types.TENSOR_ROLE_FIRST),
    ])

    def payload(w, count, mean, who):
        return (np.asarray(w, "<f4").tobytes() + np.asarray(count, "<i8").tobytes() +
                np.asarray(mean, "<f4").tobytes() + np.asarray([who], "<i4").tobytes())

    daemon.create_job("roles", min_workers=2, lease=20.0, variant=types.VARIANT_CLASSICAL, block_momentum=0.5,
                      weighting=types.WEIGHTING_SAMPLES, nominal_block=1.0)
    a = Worker(daemon.address, "roles", "a", manifest=manifest, upload=False)
    a.upload_initial(payload([1, 1], 5, [0, 0], 7))
    b = Worker(daemon.address, "roles", "b", manifest=manifest)
    big = 2**53 + 1  # Not a float64.
    for number in (1, 2):
        digest = b.started(number).base_digest
        b.push(number, payload([4, 0], big, [8, 8], 20), base_digest=digest, samples=1)
        a.push(number, payload([0, 4], 6, [0, 4], 10), base_digest=digest, samples=3)
        a.committed(number)
    _, data = a.pull(2)
    # dbar = [1, 3] twice, v = [1.5, 4.5]: 1 + 1 + 1.5 and 1 + 3 + 4.5.
    assert data == payload([3.5, 8.5], big, [2, 5], 10)
    a.close()
    b.close()


def test_memory_does_not_grow_with_the_number_of_workers(tmp_path):
    """The accumulator is one buffer: the third to the twelfth delta of a round add no memory."""
    elements, workers = 4 << 20, 12
    model_kib = elements * 4 // 1024
    with Daemon(tmp_path) as daemon:
        daemon.create_job("memory", min_workers=workers, lease=60.0, max_inflight_pushes=1)
        members = [Worker(daemon.address, "memory", "w%02d" % i, dim=elements) for i in range(workers)]
        payload = bytes(elements * 4)
        digest = members[0].started(1).base_digest
        sizes_kib = []
        for member in members[:-1]:
            member.send(member.header(1, len(payload), digest), payload)
            sizes_kib.append(daemon.rss_kib())
        assert max(sizes_kib[2:]) - max(sizes_kib[:2]) < model_kib / 2, sizes_kib
        members[-1].send(members[-1].header(1, len(payload), digest), payload)
        members[0].committed(1, 60)
        for member in members:
            member.close()
