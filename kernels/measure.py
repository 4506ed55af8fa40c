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
from kernels.bench import OURS, Bench, Contender, Inputs, error_ratio_limit
from kernels.reference import compare
from kernels.rows import spread, steadier, summarize, table_row
from kernels.serving import measure_call, measure_step
from kernels.timing import ATTEMPTS, MAX_SPREAD, PAIRS, WARMUP, Measurement, alternating, garbage_collection_off
from kernels.workloads import Workload, random_workloads

__all__ = ["measure_call", "measure_cupti", "measure_host", "measure_random", "measure_run", "measure_step"]


def measure_run(
    candidate: Callable,
    workloads: Sequence[Workload],
    *,
    seed: int,
    device: torch.device,
    flush: str = "dirty",
    tables=None,
    progress: Callable[[int, int, dict], object] | None = None,
    pairs: int = PAIRS,
    use_baseline: bool = True,
) -> dict:
    """`run` scope by CUDA event pairs. `flush` is dirty, clean or hot; `tables` maps a workload's index to real
    (kv_indptr, kv_indices); `progress` gets (done, total, row) after every workload."""
    return _run_scope(
        candidate, workloads, _by_events, "cuda-events", seed, device, flush, tables, progress, pairs, use_baseline
    )


def measure_cupti(
    candidate: Callable,
    workloads: Sequence[Workload],
    *,
    seed: int,
    device: torch.device,
    flush: str = "dirty",
    tables=None,
    progress: Callable[[int, int, dict], object] | None = None,
    pairs: int = PAIRS,
    use_baseline: bool = True,
) -> dict:
    """`run` scope by CUPTI activity records, first kernel's start to last kernel's end: a second opinion.

    One H200 reads 2-3 us less with it, so figures of the two timers must not be compared.
    """
    return _run_scope(
        candidate, workloads, _by_cupti, "cupti", seed, device, flush, tables, progress, pairs, use_baseline
    )


def measure_random(candidate: Callable, *, seed: int, device: torch.device, count: int = 40, progress=None) -> dict:
    """`run` scope on shapes outside the 47, so that a kernel tuned on those cannot hide it."""
    return measure_run(candidate, random_workloads(seed, count), seed=seed, device=device, progress=progress)


def measure_host(
    candidate: Callable, workloads: Sequence[Workload], *, seed: int, device: torch.device, calls: int = 200
) -> dict:
    """Host time of one eager call of ours and of FlashInfer's run(), outputs given, without waiting for the GPU."""
    bench = Bench(device, seed, "none")
    rows = []
    for workload in workloads:
        inputs = bench.inputs(workload)
        row = {"index": workload.index, "uuid": workload.uuid, "batch": workload.batch, "tokens": workload.tokens}
        for name, contender in bench.contenders(candidate, inputs).items():
            with garbage_collection_off():
                samples = [_host_us(contender, device) for _ in range(calls)]
            row[f"{name}_us"] = statistics.median(samples)
        rows.append(row)
    return bench.record("call", "wall", rows, what="host time of one eager call")


def _host_us(contender: Contender, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    contender()
    return (time.perf_counter() - start) * 1e6


def _run_scope(
    candidate, workloads, sampler, timer, seed, device, flush, tables, progress, pairs, use_baseline
) -> dict:
    bench = Bench(device, seed, flush, use_baseline=use_baseline)
    rows = []
    for workload in workloads:
        rows.append(_run_row(candidate, bench, bench.inputs(workload, tables), sampler, timer, pairs))
        if progress:
            progress(len(rows), len(workloads), rows[-1])
    return bench.record("run", timer, rows, pairs=pairs, summary=summarize(rows))


def _run_row(candidate, bench: Bench, inputs: Inputs, sampler, timer: str, pairs: int) -> dict:
    contenders = bench.contenders(candidate, inputs)
    errors = bench.check(contenders, inputs.reference())
    raced = {name: contender for name, contender in contenders.items() if errors[name].ok}
    if OURS not in raced:
        return table_row(inputs, bench, errors, {})

    best: dict[str, Measurement] = {}
    for _ in range(ATTEMPTS):
        checked = bench.choose.randrange(WARMUP, WARMUP + pairs)
        with garbage_collection_off():
            samples, answer, queued = sampler(bench, inputs, raced, pairs, checked)
        reference = inputs.reference(queries=answer.queries)
        errors[OURS] = compare(answer.outputs, reference, error_ratio_limit=error_ratio_limit(errors))
        if not errors[OURS].ok:
            return table_row(inputs, bench, errors, {})
        best = steadier(best, bench.measurements(samples, "run", timer))
        if spread(best) <= MAX_SPREAD:
            break
    return table_row(inputs, bench, errors, best) | {"queued_ahead": queued}


def _by_events(bench: Bench, inputs: Inputs, contenders: dict[str, Contender], pairs: int, checked: int):
    samples = {name: [] for name in contenders}
    answer, queued = None, True
    for i, name in alternating(contenders, WARMUP + pairs):
        contender = contenders[name]

        def keep():
            nonlocal answer
            if i == checked and name == OURS:
                answer = inputs.answer(contender.outputs)

        us, ahead = bench.stopwatch.gpu_us(contender, lambda: inputs.prepare(contender), keep)
        queued = queued and ahead
        if i >= WARMUP:
            samples[name].append(us)
    return samples, answer, queued


def _by_cupti(bench: Bench, inputs: Inputs, contenders: dict[str, Contender], pairs: int, checked: int):
    samples = {name: [] for name in contenders}
    answer, queued = None, True
    order = list(alternating(contenders, WARMUP + pairs))
    with cupti.record_kernels(bench.device) as recording:
        for i, name in order:
            contender = contenders[name]

            def before():
                inputs.prepare(contender)
                bench.stopwatch.flush()

            queued = recording.take(contender, before) and queued
            if i == checked and name == OURS:
                answer = inputs.answer(contender.outputs)
    for (i, name), us in zip(order, recording.spans_us(), strict=True):
        if i >= WARMUP:
            samples[name].append(us)
    return samples, answer, queued
