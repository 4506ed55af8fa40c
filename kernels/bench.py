"""One GPU prepared for measuring MLA paged decode: caches, inputs, the kernels bound to them, and the check of each."""

import inspect
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import baselines
from kernels import device as device_facts
from kernels.reference import ERROR_RATIO_LIMIT, ERROR_RATIO_MARGIN, Errors, compare, mla_paged_decode_reference
from kernels.timing import Measurement, MeasurementError, Stopwatch
from kernels.workloads import HEAD_DIM_CKV, HEAD_DIM_KPE, NUM_HEADS, NUM_PAGES, SM_SCALE, Workload, page_table

OURS = "ours"
CACHE_BYTES = NUM_PAGES * (HEAD_DIM_CKV + HEAD_DIM_KPE) * 2


class Contender:
    """A kernel bound to its inputs. `poison` fills its outputs with NaN, so that an old answer cannot pass for new."""

    def __init__(self, call: Callable[[], tuple], outputs: tuple = ()):
        self._call = call
        self.outputs = outputs

    def poison(self) -> None:
        for output in self.outputs if isinstance(self.outputs, tuple) else ():
            if isinstance(output, torch.Tensor):
                output.fill_(math.nan)

    def __call__(self) -> None:
        self.outputs = self._call()


class Inputs:
    """Inputs of one workload on the GPU. `draw` puts new queries into the same buffers: no answer is worth keeping."""

    def __init__(self, workload: Workload, table, cache, seed: int, device: torch.device):
        self.workload = workload
        self.cache = cache
        self.kv_indptr, self.kv_indices = (torch.from_numpy(part).to(device) for part in table)
        self._generator = torch.Generator(device).manual_seed(seed + workload.index)
        shape = workload.batch, NUM_HEADS
        self.q_nope, self.q_pe = (
            torch.empty(*shape, dim, dtype=torch.bfloat16, device=device) for dim in (HEAD_DIM_CKV, HEAD_DIM_KPE)
        )
        self.draw()

    def draw(self) -> None:
        for queries in (self.q_nope, self.q_pe):
            queries.normal_(generator=self._generator)

    def prepare(self, contender) -> None:
        """What precedes a timed call: the kernel once on other queries, then new queries and NaN in its outputs.

        The rehearsal makes a sample independent of which kernel ran before: instruction caches hold its own code.
        """
        self.draw()
        contender()
        self.draw()
        contender.poison()

    def answer(self, outputs: tuple) -> "Answer":
        return Answer((self.q_nope.clone(), self.q_pe.clone()), tuple(output.clone() for output in outputs))

    def arguments(self, cache=None) -> tuple:
        """The definition's positional arguments."""
        ckv_cache, kpe_cache = cache or self.cache
        return self.q_nope, self.q_pe, ckv_cache, kpe_cache, self.kv_indptr, self.kv_indices, SM_SCALE

    def reference(self, cache=None, queries=None) -> tuple[torch.Tensor, torch.Tensor]:
        """The right outputs for the present queries, or for others."""
        arguments = self.arguments(cache)
        return mla_paged_decode_reference(*(queries or arguments[:2]), *arguments[2:])

    def outputs(self, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*leading, *self.q_nope.shape)
        return self.q_nope.new_empty(shape), torch.empty(shape[:-1], dtype=torch.float32, device=self.q_nope.device)

    def bytes_moved(self) -> int:
        """Bytes that any kernel must move: every distinct cache row once, the queries, the outputs."""
        rows = self.kv_indices.unique().numel()
        queries = self.q_nope.numel() * 2 + self.q_pe.numel() * 2
        outputs = self.q_nope.numel() * 2 + self.workload.batch * NUM_HEADS * 4
        return rows * (HEAD_DIM_CKV + HEAD_DIM_KPE) * 2 + queries + outputs


@dataclass(frozen=True, slots=True)
class Answer:
    """What a kernel made of some queries in a timed call, kept to be checked after timing."""

    queries: tuple[torch.Tensor, torch.Tensor]
    outputs: tuple


def bind(candidate: Callable, arguments: tuple, outputs: tuple[torch.Tensor, torch.Tensor]) -> Contender:
    """Call `candidate` with the definition's positional arguments, and with out= and lse= if its signature has them."""
    try:
        parameters = inspect.signature(candidate).parameters
    except (TypeError, ValueError):
        parameters = {}
    if "out" in parameters and "lse" in parameters:
        return Contender(lambda: candidate(*arguments, out=outputs[0], lse=outputs[1]), outputs)
    return Contender(lambda: candidate(*arguments))


def bind_run(
    flashinfer: baselines.FlashInferMLA, arguments: tuple, outputs: tuple[torch.Tensor, torch.Tensor]
) -> Contender:
    """FlashInfer's run() on what a plan() elsewhere prepared."""
    return Contender(lambda: flashinfer.run(*arguments[:4], *outputs), outputs)


def error_ratio_limit(errors: dict[str, Errors]) -> float:
    """The error ratio ours may have: 1.5 times the largest of the baselines that are right."""
    ratios = [e.error_ratio for name, e in errors.items() if name != OURS and e.ok]
    return ERROR_RATIO_MARGIN * max(ratios) if ratios else ERROR_RATIO_LIMIT


def judge(outputs: dict[str, tuple], reference) -> dict[str, Errors]:
    """Errors of every kernel, ours held to the error ratio that the baselines set."""
    errors = {name: compare(found, reference) for name, found in outputs.items() if name != OURS}
    return {OURS: compare(outputs[OURS], reference, error_ratio_limit=error_ratio_limit(errors))} | errors


class Bench:
    """Caches, stopwatch and FlashInfer of one device, shared by all workloads of a scope.

    `caches` is how many full KV caches are wanted; as many are made as fit, one at least.
    """

    def __init__(self, device: torch.device, seed: int, flush: str, caches: int = 1, use_baseline: bool = True):
        if device.type != "cuda":
            raise MeasurementError(f"device is {device}, these scopes need a CUDA device")
        self.device = device
        self.seed = seed
        self.choose = random.Random(seed)
        self.started = time.perf_counter()
        self.name = torch.cuda.get_device_name(device)
        self.versions = device_facts.versions()
        self.stopwatch = Stopwatch(device, flush)
        self.baseline_error = ""
        self.build_s: dict[str, float] = {}
        if use_baseline:
            try:
                self.build_s = baselines.build(device)
            except baselines.BaselineUnavailable as error:
                self.baseline_error = str(error)
        self.copy_tb_s = device_facts.copy_tb_s(device)
        self.caches = self._make_caches(caches)
        self.clocks_before = device_facts.snapshot(device)

    def _make_caches(self, wanted: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        free, _ = torch.cuda.mem_get_info(self.device)
        reserve = 4 << 30  # workspaces, outputs of 61 layers, the reference
        fitting = min(wanted, (free - reserve) // CACHE_BYTES)
        if fitting < 1:
            raise MeasurementError(
                f"{free / 1e9:.1f} GB of GPU memory are free, "
                f"{(CACHE_BYTES + reserve) / 1e9:.1f} GB are needed for one KV cache"
            )
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def cache(dim: int) -> torch.Tensor:
            empty = torch.empty(NUM_PAGES, 1, dim, dtype=torch.bfloat16, device=self.device)
            return empty.normal_(generator=generator)

        return [(cache(HEAD_DIM_CKV), cache(HEAD_DIM_KPE)) for _ in range(fitting)]

    def inputs(self, workload: Workload, tables=None) -> Inputs:
        table = tables[workload.index] if tables else page_table(workload, self.seed)
        return Inputs(workload, table, self.caches[0], self.seed, self.device)

    def contenders(self, candidate: Callable, inputs: Inputs) -> dict[str, Contender]:
        """Our kernel and every FlashInfer backend, planned, each with outputs of its own."""
        found = {OURS: bind(candidate, inputs.arguments(), inputs.outputs())}
        for backend in self.build_s:
            flashinfer = baselines.FlashInferMLA(backend, self.device)
            flashinfer.plan(baselines.PlanMetadata.of(inputs.kv_indptr, inputs.kv_indices, "device"))
            found[backend] = bind_run(flashinfer, inputs.arguments(), inputs.outputs())
        return found

    def measurements(self, samples: dict[str, list[float]], scope: str, timer: str) -> dict[str, Measurement]:
        return {
            name: Measurement(
                name, scope, timer, "median", self.stopwatch.flush.kind, tuple(values), self.name, self.versions
            )
            for name, values in samples.items()
        }

    def check(self, contenders: dict[str, Contender], reference) -> dict[str, Errors]:
        """One untimed call of each kernel against the reference."""
        for contender in contenders.values():
            contender.poison()
            contender()
        torch.cuda.synchronize(self.device)
        return judge({name: contender.outputs for name, contender in contenders.items()}, reference)

    def record(self, scope: str, timer: str, rows: list[dict], **more) -> dict:
        """The JSON-able record of one scope: every number's conditions, then the rows."""
        return {
            "scope": scope,
            "timer": timer,
            "flush": self.stopwatch.flush.kind,
            "statistic": "median",
            "floor_us": self.stopwatch.floor_us(),
            "copy_tb_s": self.copy_tb_s,
            "device": device_facts.describe(self.device),
            "versions": self.versions,
            "seed": self.seed,
            "clocks": {"before": self.clocks_before, "after": device_facts.snapshot(self.device)},
            "baseline_build_s": self.build_s,
            "baseline_error": self.baseline_error,
            "seconds": time.perf_counter() - self.started - sum(self.build_s.values()),
            **more,
            "rows": rows,
        }
