"""KDA prefill against FLA and FlashKDA on this GPU: the same inputs, in turns, as CUDA-graph replays; eager time
apart."""

import statistics
import time
from collections.abc import Callable

import torch

from kernels import device as device_facts
from kernels import kda_baselines, kda_task
from kernels.baselines import BaselineUnavailable
from kernels.foreign import describe
from kernels.timing import Measurement, Stopwatch, alternating, geomean

OURS = "ours"
FASTEST = "fastest baseline"
ROUNDS = 10
EAGER_CALLS = 5


def measure_kda(
    device: torch.device,
    workloads=kda_task.WORKLOADS,
    *,
    seed: int = 0,
    baselines=kda_baselines.NAMES,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict:
    """A JSON-able record: GPU time of one call of each contender a workload, errors, ratios, the traffic bound.

    A contender is captured in a CUDA graph; its kernels are looked at before, its outputs compared with fp64 after
    the timing. The L2 cache is flushed by writing before every sample. Contenders follow each other in alternating
    order.
    """
    started = time.perf_counter()
    stopwatch = Stopwatch(device, "dirty")
    copy = device_facts.copy_tb_s(device)
    before = device_facts.snapshot(device)
    rows = []
    for number, workload in enumerate(workloads):
        rows.append(_row(workload, device, stopwatch, seed + workload.index, baselines, copy))
        if progress:
            progress(number + 1, len(workloads), workload.name)
    versions = device_facts.versions() | kda_baselines.versions()
    return {
        "scope": "call, as a CUDA-graph replay",
        "timer": "cuda-events",
        "statistic": "median",
        "flush": "dirty",
        "device": torch.cuda.get_device_name(device),
        "versions": versions,
        "floor_us": stopwatch.floor_us(),
        "copy_tb_s": copy,
        "clocks": {"before": before, "after": device_facts.snapshot(device)},
        "rows": rows,
        "summary": summarize(rows),
        "seconds": time.perf_counter() - started,
    }


def _row(workload, device, stopwatch: Stopwatch, seed: int, baselines, copy_tb_s: float) -> dict:
    from kernels.kda_prefill import kda_prefill

    inputs = kda_task.make_inputs(workload, seed, device)
    keywords = kda_task.keywords(inputs)
    calls, missing = {OURS: lambda: kda_prefill(*inputs[:5], **keywords)}, {}
    for name in baselines:
        try:
            calls[name] = kda_baselines.prepare(name, *inputs[:5], **keywords)
        except BaselineUnavailable as error:
            missing[name] = str(error)
    graphs, outputs = {}, {}
    for name, call in list(calls.items()):
        try:
            call()
            if name != OURS:
                kda_baselines.assert_backend(name, kda_baselines.kernels_of(call))
            call()
        except RuntimeError as error:
            if name == OURS:
                raise
            del calls[name]
            missing[name] = f"{name} failed: {describe(error)}"
            continue
        torch.cuda.synchronize(device)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            outputs[name] = call()

    @torch.inference_mode()  # as FLA's outputs were made in it
    def poison(name):
        for output in outputs[name]:
            output.fill_(torch.nan)

    samples = {name: [] for name in calls}
    for number, name in alternating(calls, ROUNDS + 1):
        us, _ = stopwatch.gpu_us(graphs[name].replay, before=lambda name=name: poison(name))
        if number:  # the first round warms up
            samples[name].append(us)
    expected = kda_task.reference(inputs)
    errors = {name: [_error(a, b) for a, b in zip(found, expected, strict=True)] for name, found in outputs.items()}
    eager = {
        name: statistics.median(stopwatch.wall_us(call) for _ in range(EAGER_CALLS)) for name, call in calls.items()
    }
    versions = device_facts.versions()
    times = {
        name: Measurement(
            name, "call", "cuda-events", "median", "dirty", tuple(s), torch.cuda.get_device_name(device), versions
        )
        for name, s in samples.items()
    }
    ours = times[OURS]
    bound = workload.bytes_moved / copy_tb_s * 1e-6
    return {
        "index": workload.index,
        "workload": workload.name,
        "us": {name: m.median_us for name, m in times.items()},
        "p10_us": {name: m.p10_us for name, m in times.items()},
        "p90_us": {name: m.p90_us for name, m in times.items()},
        "eager_us": eager,
        "errors": errors,
        "bound_us": bound,
        "bound_share": bound / ours.median_us,
        "status": _status(times, errors),
        "missing": missing,
    }


def _error(value, wanted) -> float:
    from kernels.kda_regimes import error_ratio

    return error_ratio(value, wanted)


def _status(times: dict[str, Measurement], errors: dict[str, list[float]]) -> str:
    o, state = errors[OURS]
    if not (o <= kda_task.OUTPUT_LIMIT and state <= kda_task.STATE_LIMIT):
        return "wrong"
    return "ok" if all(m.stable for m in times.values()) else "unstable"


def summarize(rows: list[dict]) -> dict:
    """Baseline -> geometric mean, wins, losses and worst workload, over the rows that have its time and ours and are
    not wrong.

    "fastest baseline" is the faster of FLA with safe_gate=True and FlashKDA with an fp32 state, row by row.
    """
    ratios = {name: {} for name in (*kda_baselines.NAMES, FASTEST)}
    for row in rows:
        times = row["us"]
        if OURS not in times or row.get("status") == "wrong":
            continue
        for name in kda_baselines.NAMES:
            if name in times:
                ratios[name][row["workload"]] = times[name] / times[OURS]
        both = [times[name] for name in (kda_baselines.FLA, kda_baselines.FLASH_KDA) if name in times]
        if len(both) == 2:
            ratios[FASTEST][row["workload"]] = min(both) / times[OURS]
    return {name: _summary(values) for name, values in ratios.items() if values}


def _summary(ratios: dict[str, float]) -> dict:
    worst = min(ratios, key=ratios.get)
    return {
        "geomean": geomean(ratios.values()),
        "n": len(ratios),
        "wins": sum(ratio > 1 for ratio in ratios.values()),
        "losses": [workload for workload, ratio in ratios.items() if ratio < 1],
        "worst": {"workload": worst, "ratio": ratios[worst]},
    }
