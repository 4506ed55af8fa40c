"""The scopes with FlashInfer's plan() in them: one decode step of 61 layers as it is served, and plan() on every call.

A step begins with a new page table and ends when the GPU has done all layers. FlashInfer plans once and replays a CUDA
graph of 61 run() calls; ours copies the page table into the buffers that its graph reads and replays. plan() gets its
metadata where it is fastest: all in host memory, in host memory but for kv_indices, or all on the device.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels.baselines import PLAN_INPUTS, FlashInferMLA, PlanMetadata
from kernels.bench import OURS, Bench, Contender, Inputs, bind, bind_run, error_ratio_limit, judge
from kernels.foreign import describe
from kernels.reference import Errors, compare
from kernels.rows import spread, steadier, summarize, table_row
from kernels.timing import (
    ATTEMPTS,
    MAX_SPREAD,
    PAIRS,
    WARMUP,
    Measurement,
    MeasurementError,
    alternating,
    garbage_collection_off,
    geomean,
)
from kernels.workloads import Workload

LAYERS = 61  # DeepSeek-V3/R1
PLAN_SAMPLES = 10
RUNS_PER_PLAN = (1, 2, 5, 10, 20, 50, 61, 100)


def measure_step(
    candidate: Callable,
    workloads: Sequence[Workload],
    *,
    seed: int,
    device: torch.device,
    tables=None,
    progress: Callable[[int, int, dict], object] | None = None,
    pairs: int = PAIRS,
    paper: tuple[float, float] = (0.96, 1.21),
) -> dict:
    """`step` scope. Layers rotate over as many full KV caches as fit, up to 61; L2 is flushed before every step.

    Rows also hold the medians of the whole step (`step_us`), of the replay alone (`graph_us`) and of plan() alone by
    where its metadata stands (`plan_us`). `runs_per_plan` is the ratio when one plan() serves that many layers. `paper`
    is (ratio of the kernel alone, ratio with plan); `paper_runs_per_plan` says at how many runs a plan the first would
    become the second here.
    """
    bench = Bench(device, seed, "dirty", caches=LAYERS)
    rows = _rows(partial(_step_row, candidate, bench), bench, workloads, tables, progress, pairs)
    return bench.record(
        "step",
        "wall",
        rows,
        pairs=pairs,
        layers=LAYERS,
        caches=len(bench.caches),
        summary=summarize(rows),
        runs_per_plan=runs_per_plan(rows),
        paper_runs_per_plan=amortization(rows, *paper),
    )


def measure_call(
    candidate: Callable,
    workloads: Sequence[Workload],
    *,
    seed: int,
    device: torch.device,
    tables=None,
    progress: Callable[[int, int, dict], object] | None = None,
    pairs: int = PAIRS,
) -> dict:
    """`call` scope: an eager call of ours against plan() and run(), from an idle GPU to an idle GPU."""
    bench = Bench(device, seed, "dirty")
    rows = _rows(partial(_call_row, candidate, bench), bench, workloads, tables, progress, pairs)
    return bench.record("call", "wall", rows, pairs=pairs, summary=summarize(rows))


def _rows(make_row, bench: Bench, workloads, tables, progress, pairs: int) -> list[dict]:
    rows = []
    for workload in workloads:
        rows.append(make_row(bench.inputs(workload, tables), pairs))
        if progress:
            progress(len(rows), len(workloads), rows[-1])
    return rows


class _Job:
    """What one kernel does for a new page table: take it over (`refresh`), then `compute` one or all layers."""

    def __init__(self, refresh: Callable[[], object], compute: Callable[[], object], layers: list[Contender]):
        self.refresh, self.compute, self.layers = refresh, compute, layers

    def poison(self) -> None:
        for layer in self.layers:
            layer.poison()

    def __call__(self) -> None:
        self.refresh()
        self.compute()


def _step_row(candidate: Callable, bench: Bench, inputs: Inputs, pairs: int) -> dict:
    caches = [bench.caches[layer % len(bench.caches)] for layer in range(LAYERS)]
    outs, lses = inputs.outputs(LAYERS)
    layers = [bind(candidate, inputs.arguments(cache), (outs[i], lses[i])) for i, cache in enumerate(caches)]
    table = inputs.kv_indptr.clone(), inputs.kv_indices.clone()

    def take_table():
        inputs.kv_indptr.copy_(table[0])
        inputs.kv_indices.copy_(table[1])

    jobs = {OURS: _Job(take_table, _capture(bench.device, layers, "the candidate"), layers)}
    plan_us, plan_inputs = {}, {}
    for backend in bench.build_s:
        flashinfer = FlashInferMLA(backend, bench.device, graph_buffers=(inputs.workload.batch, inputs.workload.tokens))
        plan, plan_inputs[backend], plan_us[backend] = _fastest_plan(bench, flashinfer, *table)
        outs, lses = inputs.outputs(LAYERS)
        layers = [bind_run(flashinfer, inputs.arguments(cache), (outs[i], lses[i])) for i, cache in enumerate(caches)]
        jobs[backend] = _Job(plan, _capture(bench.device, layers, f"FlashInfer {backend}"), layers)

    layer = bench.choose.randrange(LAYERS)
    errors, steps = _race(bench, inputs, jobs, "step", pairs, layer, caches[layer])
    row = table_row(inputs, bench, errors, steps, calls=LAYERS) | {"plan_us": plan_us, "plan_inputs": plan_inputs}
    if not steps:
        return row
    graphs = {name: [] for name in steps}
    for i, name in alternating(steps, WARMUP + pairs):
        us = bench.stopwatch.wall_us(jobs[name].compute, before=jobs[name].compute)
        if i >= WARMUP:
            graphs[name].append(us)
    row["step_us"] = {name: measurement.median_us for name, measurement in steps.items()}
    row["graph_us"] = {name: statistics.median(samples) for name, samples in graphs.items()}
    return row


def _call_row(candidate: Callable, bench: Bench, inputs: Inputs, pairs: int) -> dict:
    ours = bind(candidate, inputs.arguments(), inputs.outputs())
    jobs = {OURS: _Job(lambda: None, ours, [ours])}
    plan_us, plan_inputs = {}, {}
    for backend in bench.build_s:
        flashinfer = FlashInferMLA(backend, bench.device)
        plan, plan_inputs[backend], plan_us[backend] = _fastest_plan(
            bench, flashinfer, inputs.kv_indptr, inputs.kv_indices
        )
        run = bind_run(flashinfer, inputs.arguments(), inputs.outputs())
        jobs[backend] = _Job(plan, run, [run])
    errors, calls = _race(bench, inputs, jobs, "call", pairs, 0, bench.caches[0])
    return table_row(inputs, bench, errors, calls) | {"plan_us": plan_us, "plan_inputs": plan_inputs}


def _fastest_plan(
    bench: Bench, flashinfer: FlashInferMLA, kv_indptr, kv_indices
) -> tuple[Callable, str, dict[str, float]]:
    """plan() with its metadata where it is fastest, where that is, and the median time for every place."""
    plans = {where: partial(flashinfer.plan, PlanMetadata.of(kv_indptr, kv_indices, where)) for where in PLAN_INPUTS}
    samples = {where: [] for where in plans}
    for i, where in alternating(plans, WARMUP + PLAN_SAMPLES):
        us = bench.stopwatch.wall_us(plans[where], before=plans[where])
        if i >= WARMUP:
            samples[where].append(us)
    medians = {where: statistics.median(values) for where, values in samples.items()}
    fastest = min(medians, key=medians.get)
    return plans[fastest], fastest, medians


def _race(
    bench: Bench, inputs: Inputs, jobs: dict[str, _Job], scope: str, pairs: int, layer: int, cache
) -> tuple[dict[str, Errors], dict[str, Measurement]]:
    """Check `layer` of every job, time the right ones by wall clock, and check a random timed sample of ours again."""
    for job in jobs.values():
        job.poison()
        job()
    torch.cuda.synchronize(bench.device)
    errors = judge({name: job.layers[layer].outputs for name, job in jobs.items()}, inputs.reference(cache))
    raced = {name: job for name, job in jobs.items() if errors[name].ok}
    if OURS not in raced:
        return errors, {}
    best: dict[str, Measurement] = {}
    for _ in range(ATTEMPTS):
        checked = bench.choose.randrange(WARMUP, WARMUP + pairs)
        samples = {name: [] for name in raced}
        with garbage_collection_off():
            for i, name in alternating(raced, WARMUP + pairs):
                job = raced[name]
                us = bench.stopwatch.wall_us(job, lambda: inputs.prepare(job))
                if i >= WARMUP:
                    samples[name].append(us)
                if i == checked and name == OURS:
                    answer = inputs.answer(job.layers[layer].outputs)
        reference = inputs.reference(cache, answer.queries)
        errors[OURS] = compare(answer.outputs, reference, error_ratio_limit=error_ratio_limit(errors))
        if not errors[OURS].ok:
            return errors, {}
        best = steadier(best, bench.measurements(samples, scope, "wall"))
        if spread(best) <= MAX_SPREAD:
            break
    return errors, best


def _capture(device: torch.device, layers: list[Contender], name: str) -> Callable[[], None]:
    """One CUDA graph of all layers; returns its replay."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            layers[0]()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for layer in layers:
                layer()
    except RuntimeError as error:
        text = f"{name} cannot be captured in a CUDA graph, which the step scope needs: {describe(error)}"
        raise MeasurementError(text) from error
    return graph.replay


def _cost(row: dict, name: str, runs: float) -> float:
    """Microseconds a layer when whatever precedes the replay is paid once in `runs` layers."""
    per_run = row["graph_us"][name] / LAYERS
    return per_run + max(row["step_us"][name] - row["graph_us"][name], 0.0) / runs


def _baseline_cost(row: dict, runs: float) -> float:
    return min(_cost(row, name, runs) for name in row["step_us"] if name != OURS)


def _with_baseline(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if row["ratio"] is not None]


def runs_per_plan(rows: Sequence[dict]) -> dict[str, float]:
    """Geometric-mean ratio by layers served per plan(), from parts of `step` rows; "never" leaves plan() out."""
    rows = _with_baseline(rows)
    if not rows:
        return {}
    points = {str(runs): runs for runs in RUNS_PER_PLAN} | {"never": float("inf")}
    return {name: geomean(_baseline_cost(r, n) / _cost(r, OURS, n) for r in rows) for name, n in points.items()}


def amortization(rows: Sequence[dict], run_ratio: float, with_plan: float) -> float | None:
    """Runs per plan() at which a kernel with `run_ratio` alone would reach `with_plan`, from FlashInfer's parts.

    None when no number of runs gives that.
    """
    rows = _with_baseline(rows)

    def ratio(runs: float) -> float:
        return run_ratio * geomean(_baseline_cost(row, runs) / _baseline_cost(row, float("inf")) for row in rows)

    low, high = 1e-3, 1e6
    if not rows or not ratio(high) <= with_plan <= ratio(low):
        return None
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if ratio(middle) > with_plan else (low, middle)
    return (low * high) ** 0.5
