"""The golden vectors through a running daemon: workers push the deltas, the served models must be the listed numbers.

Every case of the file is either run here or listed as WAITING with the feature it needs; one that is neither fails.
float32_exact cases must match bit for bit, the others to 1e-6.
"""

import json
import os

import numpy as np
import pytest

from harness import Daemon
from harness import Worker
from harness import pb
from harness import refused
from harness import run_round
from harness import types

_FILE = os.path.join("core", "filter", "testdata", "golden_vectors.json")

# What a case needs that this build does not have.
WAITING = {
    "slowmo_n4_lr_decay": "momentum in units of the inner learning rate, rescaled when that decays",
    "dn_c0_N2": "delayed Nesterov",
    "dn_c0.25_N2": "delayed Nesterov",
    "async_staleness_weights": "bounded staleness",
    "dylu": "block lengths from worker speeds",
    "streaming_a0_tau0": "streaming fragments",
    "streaming_a0.5_tau0": "streaming fragments",
    "streaming_a0_tau1": "streaming fragments",
    "streaming_a1_tau1": "streaming fragments",
    "bmuf_adam_moment_beta0.9": "BMUF-Adam",
    "decoupled_rda": "decoupled merge by norm and direction",
}
# Parts of a case that is run.
WAITING_PARTS = {
    "late_delta_policies": {
        "accept_base_anchored_w1": "bounded staleness",
        "accept_base_anchored_w_1_over_sqrt_1_plus_s": "bounded staleness",
        "WRONG_delta_recomputed_against_current_global": "never: the case's own example of a mistake",
    },
}


def load():
    with open(_FILE) as source:
        return {case["name"]: case for case in json.load(source)["cases"]}


CASES = load()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running


def rules(case):
    """The job's outer optimizer for a case's parameters."""
    params = case["params"]
    rule = params["rule"]
    common = {}
    if rule in ("fedadam", "fedyogi", "fedadagrad"):
        common["variant"] = {"fedadam": types.VARIANT_FED_ADAM, "fedyogi": types.VARIANT_FED_YOGI,
                             "fedadagrad": types.VARIANT_FED_ADAGRAD}[rule]
        common.update(block_learning_rate=params["eta"], beta1=params["b1"], beta2=params["b2"], tau=params["tau"])
        return common
    if rule == "torch_sgd_nesterov":
        return dict(variant=types.VARIANT_NESTEROV, block_learning_rate=params["lr"],
                    block_momentum=params["momentum"])
    if rule == "slowmo":
        return dict(variant=types.VARIANT_CLASSICAL, block_learning_rate=params["alpha"],
                    block_momentum=params["beta"])
    if rule == "cbm_elastic":
        policy = {"fixed_eta_div_present": types.MOMENTUM_POLICY_FROZEN,
                  "eta_follows_present": types.MOMENTUM_POLICY_FOLLOW_PRESENT,
                  "eta_follows_present_rescaled": types.MOMENTUM_POLICY_FOLLOW_PRESENT_RESCALED}[params["policy"]]
        return dict(variant=types.VARIANT_CLASSICAL, block_learning_rate=params["block_lr"], momentum_policy=policy,
                    expected_trajectories=params["registered"])
    variant = {
        "caffe2_cbm": types.VARIANT_CLASSICAL,
        "cbm_weighted": types.VARIANT_CLASSICAL,
        "cbm": types.VARIANT_CLASSICAL,
        "caffe2_nesterov": types.VARIANT_CAFFE2_NESTEROV,
        "nbm": types.VARIANT_NESTEROV,
        "fairseq_nbm": types.VARIANT_FAIRSEQ_NESTEROV,
        "cntk_nbm": types.VARIANT_CNTK_NESTEROV,
        "pika_nbm": types.VARIANT_PIKA,
    }[rule]
    if case["name"] == "model_averaging_n4":
        variant = types.VARIANT_AVERAGING
    common = dict(variant=variant, block_learning_rate=params["block_lr"])
    if variant != types.VARIANT_AVERAGING:
        common["block_momentum"] = params["block_momentum"]
    return common


def create(daemon, case, workers, **more):
    job = "golden-" + case["name"].replace("_", "-").lower()
    guard = types.NormGuard(action=types.NORM_GUARD_ACTION_OFF)
    settings = dict(min_workers=1, expected_workers=workers, lease=30.0, collect_timeout=60.0, norm_guard=guard)
    settings.update(rules(case))
    settings.update(more)
    daemon.create_job(job, **settings)
    return job


def same(case, got, wanted, what):
    got = np.asarray(got)
    wanted = np.asarray(wanted, np.float64)
    if case.get("float32_exact"):
        assert (got == wanted.astype(np.float32)).all(), "%s: %r is not %r" % (what, got, wanted)
    else:
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6, err_msg=what)


def check(case, worker, version, entry):
    """Broadcast model, and the model without look-ahead where the case lists it or where it is the same."""
    what = "%s round %d" % (case["name"], version)
    same(case, worker.values(version), entry["global"], what + " broadcast")
    model = worker.values(version, pb.MODEL_KIND_MODEL)
    if "W" in entry.get("state", {}):
        same(case, model, entry["state"]["W"], what + " model")
    elif rules(case)["variant"] in (types.VARIANT_CLASSICAL, types.VARIANT_AVERAGING):
        same(case, model, entry["global"], what + " model")


def join(daemon, job, case, count):
    return [Worker(daemon.address, job, "w%d" % i, init=case["init_global"], heartbeats=False) for i in range(count)]


def close(workers):
    for worker in workers:
        worker.close()


def run_plain(daemon, case):
    count = len(case["deltas"][0])
    weighted = "weights" in case
    more = dict(weighting=types.WEIGHTING_SAMPLES, nominal_block=1.0) if weighted else {}
    workers = join(daemon, create(daemon, case, count, **more), case, count)
    for number, entry in enumerate(case["rounds"], 1):
        digest = workers[0].started(number).base_digest
        for index, worker in enumerate(workers):
            facts = dict(samples=int(case["weights"][number - 1][index])) if weighted else {}
            worker.push(number, case["deltas"][number - 1][index], base_digest=digest, **facts)
        committed = workers[-1].committed(number)
        assert len(committed.contributors) == count
        check(case, workers[0], number, entry)
    close(workers)


def run_elastic(daemon, case):
    """The absent leave before they pushed and are back for the round after."""
    count = case["params"]["registered"]
    job = create(daemon, case, count)
    workers = join(daemon, job, case, count)
    for number, entry in enumerate(case["rounds"], 1):
        digest = workers[0].started(number).base_digest
        for index in range(count):
            if index not in entry["present"]:
                workers[index].leave()
                workers[index].close()
                workers[index] = Worker(daemon.address, job, "w%d" % index, init=case["init_global"],
                                        heartbeats=False)
        for index in entry["present"]:
            workers[index].push(number, case["deltas"][number - 1][index], base_digest=digest)
        committed = workers[0].committed(number)
        assert committed.contributors == ["w%d" % i for i in entry["present"]]
        assert committed.block_momentum == pytest.approx(entry["eta"], abs=1e-12)
        check(case, workers[0], number, entry)
    record = daemon.records(job)[1]
    assert record.trajectories == len(case["rounds"][1]["present"])
    close(workers)


def run_warmup(daemon, case):
    """The elected worker's parameters after its warm-up become version 0; the other's are never seen."""
    starts = case["worker_params_after_warmup"]
    job = create(daemon, case, len(starts), warmup_steps=5)
    workers = [Worker(daemon.address, job, "w%d" % i, init=start, heartbeats=False) for i, start in enumerate(starts)]
    assert workers[0].joined.need_initial_model and not workers[1].joined.need_initial_model
    assert workers[0].joined.config.warmup_steps == 5
    refused("STALE_ROUND", workers[1].upload_initial)
    assert case["rounds"][0]["event"] == "warmup_broadcast"
    check(case, workers[1], 0, case["rounds"][0])
    for number, entry in enumerate(case["rounds"][1:], 1):
        run_round(workers, case["deltas"][number - 1], number)
        check(case, workers[1], number, entry)
    close(workers)


def run_no_initial_broadcast(daemon, case):
    """Workers that differ at the start: here the second is given the first's model, and its delta is measured from
    there, so that the difference of the starts is part of nobody's momentum by accident. The case's numbers follow
    if both end where the case says."""
    starts, ends = case["worker_inits"], case["worker_params_after_block1"]
    job = create(daemon, case, len(starts))
    workers = [Worker(daemon.address, job, "w%d" % i, init=start, heartbeats=False) for i, start in enumerate(starts)]
    base = workers[1].values(0)
    assert list(base) == starts[0]
    run_round(workers, [np.asarray(end, "f4") - base for end in ends], 1)
    check(case, workers[1], 1, case["rounds"][0])
    close(workers)


def run_late(daemon, case):
    """Worker 1's delta for round 1 comes in round 2: it is dropped, and the round goes on without it."""
    job = create(daemon, case, 2, soft_timeout=0.2)
    workers = join(daemon, job, case, 2)
    digest = workers[0].started(1).base_digest
    workers[0].push(1, case["round1"]["global"], base_digest=digest)
    workers[0].committed(1)
    same(case, workers[0].values(1), case["round1"]["global"], "round 1")
    refused("STALE_ROUND", workers[1].push, 1, [5.0], base_digest=digest)
    expected = next(r for r in case["rounds"] if r["policy"] == "drop_late")
    # v2 = eta v1 + d2, so the case's second delta is v2 - eta v1.
    delta = expected["v"][0] - case["params"]["block_momentum"] * case["round1"]["v"][0]
    workers[0].push(2, [delta])
    workers[0].committed(2)
    same(case, workers[0].values(2), expected["global"], "round 2")
    close(workers)


def run_local_params(daemon, case):
    """The cases of Caffe2's own tests list what each worker ends with; the delta is against the served model."""
    count = len(case["rounds"][0]["local_params"])
    workers = join(daemon, create(daemon, case, count), case, count)
    for number, entry in enumerate(case["rounds"], 1):
        base = workers[0].values(number - 1)
        run_round(workers, [np.asarray(p, "f4") - base for p in entry["local_params"]], number)
        check(case, workers[0], number, entry)
    close(workers)


def runner(case):
    name = case["name"]
    if name == "caffe2_warmup_n2":
        return run_warmup
    if name == "caffe2_no_initial_broadcast_n2":
        return run_no_initial_broadcast
    if name == "late_delta_policies":
        return run_late
    if name.startswith("caffe2_test_"):
        return run_local_params
    if name.startswith("elastic_"):
        return run_elastic
    if "deltas" in case:
        return run_plain
    return None


@pytest.mark.parametrize("name", [n for n in CASES if n not in WAITING])
def test_golden_vectors(daemon, name):
    """One case: pushed by as many workers as it has, compared after every round."""
    case = CASES[name]
    run = runner(case)
    assert run is not None, "%s is neither run nor listed as waiting" % name
    run(daemon, case)


def test_every_case_is_run_or_listed(capsys):
    """No case is passed over in silence, and nothing is listed that does not exist."""
    assert set(WAITING) <= set(CASES), sorted(set(WAITING) - set(CASES))
    run = [name for name, case in CASES.items() if name not in WAITING and runner(case)]
    assert sorted(run + list(WAITING)) == sorted(CASES)
    for name, parts in WAITING_PARTS.items():
        policies = {entry["policy"] for entry in CASES[name]["rounds"]}
        assert set(parts) | {"drop_late"} == policies
    with capsys.disabled():
        print("\ngolden vectors: %d cases, %d run, %d waiting" % (len(CASES), len(run), len(WAITING)))
        for name, reason in WAITING.items():
            print("WAITING %s: %s" % (name, reason))
        for name, parts in WAITING_PARTS.items():
            for part, reason in parts.items():
                print("WAITING %s / %s: %s" % (name, part, reason))
