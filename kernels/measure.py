"""The measurements behind every number: our kernel and FlashInfer side by side, one JSON-able record a scope.

    run    the kernel alone, FlashInfer's plan() done before; GPU time, cold L2
    step   one decode step of 61 layers as a CUDA-graph replay, FlashInfer's plan() once before it; wall clock
    call   plan() and run() on every call; wall clock

A candidate is a callable with the definition's positional arguments (q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr,
kv_indices, sm_scale); it gets out= and lse= when its signature has both.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from kernels import cupti
from kernels.baselines import FlashInferMLA, PlanMetadata
from kernels.bench import OURS, Bench, Contender, Inputs, bind
from kernels.device import versions
from kernels.reference import Errors, compare
from kernels.timing import MAX_SPREAD, Measurement, alternating, geomean
from kernels.workloads import Workload, random_workloads

PAIRS = 30
WARMUP = 3
ATTEMPTS = 3  # how often a workload is timed before its row says `unstable`


def measure_run(
    candidate: Callable, workloads: Sequence[Workload], *, seed: int, device: torch.device, flush: str = "dirty",
    tables=None, progress: Callable[[int, int, dict], object] | None = None, pairs: int = PAIRS, use_baseline: bool = True,
) -> dict:  # fmt: skip
    """`run` scope by CUDA event pairs. `flush` is dirty, clean or hot; `tables` maps a workload's index to real
    (kv_indptr, kv_indices); `progress` gets (done, total, row) after every workload."""
    return _run_scope(candidate, workloads, _by_events, "cuda-events", seed, device, flush, tables, progress, pairs, use_baseline)


def measure_cupti(
    candidate: Callable, workloads: Sequence[Workload], *, seed: int, device: torch.device, flush: str = "dirty",
    tables=None, progress: Callable[[int, int, dict], object] | None = None, pairs: int = PAIRS, use_baseline: bool = True,
) -> dict:  # fmt: skip
    """`run` scope by CUPTI activity records: first kernel's start to last kernel's end. A second opinion on `measure_run`;
    it reads 1.5-2.5 us less, so the two must never be compared across kernels."""
    return _run_scope(candidate, workloads, _by_cupti, "cupti", seed, device, flush, tables, progress, pairs, use_baseline)


def measure_random(candidate: Callable, *, seed: int, device: torch.device, count: int = 40, progress=None) -> dict:
    """`run` scope on shapes outside the 47, so that a kernel tuned on those cannot hide it."""
    return measure_run(candidate, random_workloads(seed, count), seed=seed, device=device, progress=progress)


def measure_host(candidate: Callable, workloads: Sequence[Workload], *, seed: int, device: torch.device, calls: int = 200) -> dict:
    """Time the host spends in one eager call of ours and of FlashInfer's run(), outputs given, without waiting for the GPU."""
    bench = Bench(device, seed, "none")
    rows = []
    for workload in workloads:
        inputs = bench.inputs(workload)
        row = {"index": workload.index, "uuid": workload.uuid, "batch": workload.batch, "tokens": workload.tokens}
        for name, contender in _contenders(candidate, bench, inputs).items():
            samples = [_host_us(contender, device) for _ in range(calls)]
            measurement = Measurement(name, "call", "wall", "median", "none", tuple(samples), str(device), versions())
            row[f"{name}_us"] = measurement.median_us
        rows.append(row)
    return bench.record("call", "wall", rows, what="host time of one eager call")


def _host_us(contender: Contender, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    contender()
    return (time.perf_counter() - start) * 1e6


def _run_scope(candidate, workloads, sampler, timer, seed, device, flush, tables, progress, pairs, use_baseline) -> dict:
    bench = Bench(device, seed, flush, use_baseline=use_baseline)
    rows = []
    for workload in workloads:
        rows.append(_run_row(candidate, bench, bench.inputs(workload, tables), sampler, timer, pairs))
        if progress:
            progress(len(rows), len(workloads), rows[-1])
    return bench.record("run", timer, rows, pairs=pairs, summary=summarize(rows))


def _contenders(candidate: Callable, bench: Bench, inputs: Inputs) -> dict[str, Contender]:
    """Our kernel and every FlashInfer backend, planned, each with outputs of its own."""
    contenders = {OURS: bind(candidate, inputs.arguments(), inputs.outputs())}
    for backend in bench.build_s:
        flashinfer = FlashInferMLA(backend, bench.device)
        flashinfer.plan(PlanMetadata.of(inputs.kv_indptr, inputs.kv_indices, "device"))
        contenders[backend] = _bind_flashinfer(flashinfer, inputs)
    return contenders


def _bind_flashinfer(flashinfer: FlashInferMLA, inputs: Inputs) -> Contender:
    arguments, outputs = inputs.arguments()[:4], inputs.outputs()
    return Contender(lambda: flashinfer.run(*arguments, *outputs), outputs)


def _run_row(candidate, bench: Bench, inputs: Inputs, sampler, timer: str, pairs: int) -> dict:
    checked = bench.choose.randrange(WARMUP, WARMUP + pairs)
    inputs.use(checked)
    reference = bench.reference(inputs)
    contenders = _contenders(candidate, bench, inputs)
    errors = bench.check(contenders, reference)
    raced = {name: c for name, c in contenders.items() if errors[name].ok}
    if OURS not in raced:
        return _row(inputs, bench, errors, {}, "wrong")

    best: dict[str, Measurement] = {}
    for _ in range(ATTEMPTS):
        samples, kept, queued = sampler(bench, inputs, raced, pairs, checked)
        limit = bench.error_ratio_limit(errors)
        errors[OURS] = compare(kept[OURS], reference, error_ratio_limit=limit)
        if not errors[OURS].ok:
            return _row(inputs, bench, errors, {}, "wrong")
        found = {
            name: Measurement(name, "run", timer, "median", bench.stopwatch.flush.kind, tuple(values), str(bench.device), versions())
            for name, values in samples.items()
        }
        if not best or _spread(found) < _spread(best):
            best = found
        if _spread(best) <= MAX_SPREAD:
            break
    row = _row(inputs, bench, errors, best, "ok" if _spread(best) <= MAX_SPREAD else "unstable")
    return row | {"queued_ahead": queued}


def _by_events(bench: Bench, inputs: Inputs, contenders: dict[str, Contender], pairs: int, checked: int):
    samples = {name: [] for name in contenders}
    kept, queued = {}, True
    for i, name in alternating(contenders, WARMUP + pairs):
        contender = contenders[name]

        def before():
            inputs.use(i)
            contender.poison()

        def after():
            if i == checked:
                kept[name] = tuple(output.clone() for output in contender.outputs)

        us, ahead = bench.stopwatch.gpu_us(contender, before, after)
        queued = queued and ahead
        if i >= WARMUP:
            samples[name].append(us)
    return samples, kept, queued


def _by_cupti(bench: Bench, inputs: Inputs, contenders: dict[str, Contender], pairs: int, checked: int):
    samples = {name: [] for name in contenders}
    kept, order = {}, []
    with cupti.record_kernels(bench.device) as recording:
        for i, name in alternating(contenders, WARMUP + pairs):
            contender = contenders[name]
            inputs.use(i)
            contender.poison()
            bench.stopwatch.flush()
            with recording.marked():
                contender()
            if i == checked:
                kept[name] = tuple(output.clone() for output in contender.outputs)
            order.append((i, name))
    for (i, name), us in zip(order, recording.spans_us(), strict=True):
        if i >= WARMUP:
            samples[name].append(us)
    return samples, kept, True


def _faster_baseline(measurements: dict[str, Measurement]) -> str:
    """Name of the fastest measured baseline, empty when there is none."""
    return min((n for n in measurements if n != OURS), key=lambda n: measurements[n].median_us, default="")


def _spread(measurements: dict[str, Measurement]) -> float:
    """The wider spread of ours and of the baseline it is judged by."""
    names = {OURS, _faster_baseline(measurements) or OURS}
    return max(measurements[name].spread for name in names)


def _row(inputs: Inputs, bench: Bench, errors: dict[str, Errors], measurements: dict[str, Measurement], status: str) -> dict:
    workload = inputs.workload
    baseline = _faster_baseline(measurements)
    ours, theirs = measurements.get(OURS), measurements.get(baseline)
    ratios = [e.error_ratio for name, e in errors.items() if name != OURS]
    return {
        "index": workload.index,
        "uuid": workload.uuid,
        "family": workload.family,
        "batch": workload.batch,
        "tokens": workload.tokens,
        "ours_us": ours and ours.median_us,
        "ours_p10": ours and ours.p10_us,
        "ours_p90": ours and ours.p90_us,
        "baseline_us": theirs and theirs.median_us,
        "baseline": baseline,
        "ratio": theirs.median_us / ours.median_us if ours and theirs else None,
        "bandwidth_share": inputs.bytes_moved / (ours.median_us * bench.copy_tb_s * 1e6) if ours else None,
        "error_ratio": errors[OURS].error_ratio,
        "max_abs": errors[OURS].max_abs,
        "lse_error": errors[OURS].lse_error,
        "baseline_error_ratio": max(ratios, default=None),
        "spread": _spread(measurements) if measurements else None,
        "status": status,
        "reason": errors[OURS].reason,
        "samples": {name: [round(s, 3) for s in m.samples_us] for name, m in measurements.items()},
    }


def summarize(rows: Sequence[dict]) -> dict:
    """Means of the rows' ratios (baseline time / our time). One wrong row leaves no mean: a mean would hide it."""
    wrong = [row["index"] for row in rows if row["status"] == "wrong"]
    judged = [row for row in rows if row["ratio"] is not None]
    summary = {
        "n": len(rows),
        "wrong": wrong,
        "unstable": [row["index"] for row in rows if row["status"] == "unstable"],
        "geomean": None,
        "arithmetic_mean": None,
        "wins": sum(row["ratio"] > 1 for row in judged),
        "losses": sum(row["ratio"] < 1 for row in judged),
        "worst": None,
        "geomean_by_batch": {},
    }
    if wrong or not judged:
        return summary
    worst = min(judged, key=lambda row: row["ratio"])
    batches = sorted({row["batch"] for row in judged})
    return summary | {
        "geomean": geomean(row["ratio"] for row in judged),
        "arithmetic_mean": statistics.fmean(row["ratio"] for row in judged),
        "worst": {"index": worst["index"], "ratio": worst["ratio"]},
        "geomean_by_batch": {str(b): geomean(r["ratio"] for r in judged if r["batch"] == b) for b in batches},
    }
