"""Checks and times a candidate for a GPU task: CUDA events in its process, audited by this process's clock.

What makes a made-up time impossible or useless:
- Inputs and reference are here: this process has a copy of the candidate's inputs, made from the same seeds.
- The baseline runs in this process, call by call in turns with the candidate, where the candidate cannot slow it down.
- Values change before every timed call, outputs are poisoned, the L2 cache is flushed, persisting lines are released.
  Outputs are taken on the call's own stream right behind it: work on other streams, in threads or put off is not there.
- The candidate's process may lie about its times. So the evaluator also times, on its own clock, a request to do 32
  calls on 32 inputs that are made up in that request, less the same request without calls. A reported time must not be
  far below that.
"""

import math
import random
import statistics
import time

from evoteam.judging.arena import Region
from evoteam.judging.child import Child, Failure
from evoteam.judging.gate import SPREAD_LIMIT, Standard, compare, errors_of, row_of, smallest, standard_of
from evoteam.judging.gpu_side import AUDIT_CALLS, GpuSide

WARMUPS, PAIRS = 3, 30
COMPARED = 3
AUDITS, AUDIT_TRIES = 9, 3
MAX_FLIPS = 10  # tries of one sample, each on new values
AUDIT_SHARE = 0.6  # a reported time below this share of the audited one is refused: cold caches make honest ones larger


class GpuBench:
    """One candidate against the baseline of a GPU task."""

    def __init__(self, task, child: Child, side: GpuSide, memory: Region):
        self.task, self.child, self.side, self.memory = task, child, side, memory
        self.random = random.SystemRandom()
        self.numbers = {workload.index: number for number, workload in enumerate((*task.workloads, *task.awkward))}
        self.on_exception = "crash"
        self.standard: Standard | None = None

    def close(self) -> None:
        self.side.inputs, self.side.stacks = (), {}
        self.memory.close()

    def first_call(self) -> None:
        """The smallest awkward workload once: what the candidate compiles, it compiles now."""
        self.on_exception = "compile"
        self._check(smallest(self.task), rotations=(0,))
        self.on_exception = "crash"

    def check(self, workload) -> None:
        """Calls on the same buffers with all contents, lengths included, changed in between."""
        self._check(workload, rotations=(0, 1) if workload in self.task.workloads else (0,))

    def _check(self, workload, rotations: tuple[int, ...]) -> None:
        for rotate in rotations:
            self._prepare(workload, rotate)
            self._ask("call", workload)
            compare(self.task, workload, self._fetch(workload), self.standard)

    def time(self, workload) -> dict:
        """The row of one workload: medians in microseconds, ratio, spread, errors of the calls that were compared."""
        standard = self._prepare(workload)
        compared = set(self.random.sample(range(PAIRS), COMPARED))
        ours, baseline, errors, queued = [], [], [], True
        for number in range(-WARMUPS, PAIRS):
            seed = self.random.getrandbits(31)
            sample = self._ask("sample", workload, seed=seed)
            if not _plausible(sample):
                raise Failure("cheat", f"its process reports {sample} for a call", row_of(workload))
            for flip in range(sample["flips"]):
                self.side.flip(seed + flip)
            if number in compared:
                errors.append(self._compare(workload, self._fetch(workload), self.side.inputs))
            reading = self.side.sample(None)
            if number >= 0:
                ours.append(sample["us"])
                baseline.append(reading["us"])
                queued = queued and sample["queued"]
        ours_us, baseline_us = statistics.median(ours), statistics.median(baseline)
        for _ in range(AUDIT_TRIES):
            audited_us, captured = self._audit(workload)
            if not captured or ours_us >= AUDIT_SHARE * audited_us:
                break
        else:
            raise Failure(
                "cheat",
                f"its process reports {ours_us:.1f} us a call, "
                f"by the evaluator's clock a call takes {audited_us:.1f} us",
                row_of(workload),
            )
        if not captured:
            ours_us = max(ours_us, audited_us)
        spread = max(_spread(ours), _spread(baseline))
        return (
            row_of(workload)
            | errors_of(errors)
            | {
                "ours_us": round(ours_us, 2),
                "baseline_us": round(baseline_us, 2),
                "ratio": baseline_us / ours_us,
                "audited_us": round(audited_us, 2),
                "audit": "graph" if captured else "eager",
                "scope": "run",
                "timer": "cuda-events",
                "flush": "dirty",
                "statistic": "median",
                "spread": round(spread, 4),
                "status": "ok" if spread <= SPREAD_LIMIT else "unstable",
                "calls": len(ours),
                "baseline": standard.name,
                "baseline_error_ratio": standard.error_ratio,
                "queued_ahead": queued,
                "compared": len(errors),
            }
        )

    def _audit(self, workload) -> tuple[float, bool]:
        """Microseconds that a call costs by this process's clock, and whether the calls ran as one CUDA graph.

        The fastest requests count: other work on the host only slows them. Outside a graph the host's time counts as
        well; a candidate that cannot be captured is held to it.
        """
        captured = self._ask("audit_setup", workload).get("graph") is True
        self.side.audit_setup()
        spent = {True: [], False: []}
        for number in range(2 * AUDITS):
            seed, calls = self.random.getrandbits(31), bool(number % 2)
            start = time.perf_counter()
            self._ask("audit", workload, seed=seed, calls=calls)
            spent[calls].append(time.perf_counter() - start)
            self.side.audit(seed, calls=False)
        call = self.random.randrange(AUDIT_CALLS)
        self._compare(workload, self._fetch(workload, call), self.side.audit_inputs(call))
        return (min(spent[True]) - min(spent[False])) / AUDIT_CALLS * 1e6, captured

    def _compare(self, workload, outputs: tuple, inputs: tuple):
        return compare(self.task, workload, outputs, self.standard.on(self.task.reference(inputs)))

    def _prepare(self, workload, rotate: int = 0) -> Standard:
        number, seed = self.numbers[workload.index], self.random.getrandbits(31)
        self.side.prepare(number, seed, rotate)
        self.standard, run = standard_of(self.task, workload, self.side.inputs, self.standard)
        self.side.function = lambda *_: run()
        self._ask("prepare", workload, number=number, seed=seed, rotate=rotate, outputs=self.standard.specs())
        return self.standard

    def _ask(self, op: str, workload, **fields) -> dict:
        reply, row = self.child.request(op, **fields), row_of(workload)
        kind = reply.get("error")
        if kind == "output":
            raise Failure("wrong-answer", reply["message"], row)
        if kind == "cheat":
            raise Failure("cheat", reply["message"], row)
        if kind:
            raise Failure(self.on_exception, reply["message"], row)
        return reply

    def _fetch(self, workload, number: int | None = None) -> tuple:
        """Outputs of the candidate, on the GPU."""
        outputs = []
        described = self._ask("fetch", workload, number=number).get("outputs")
        try:
            for spec in described:
                outputs.append(self.memory.read(spec).to(self.side.device))
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise Failure(
                "cheat", f"its process says its outputs are {described}: {error}", row_of(workload)
            ) from error
        return tuple(outputs)


def _plausible(sample: dict) -> bool:
    """Whether a reported sample can be one at all; whether it is true, the audit says."""
    us, flips = sample.get("us"), sample.get("flips")
    return isinstance(us, float) and 0 < us < math.inf and isinstance(flips, int) and 0 < flips <= MAX_FLIPS


def _spread(samples: list[float]) -> float:
    """Width of the middle 80% as a share of the median."""
    low, *_, high = statistics.quantiles(samples, n=10)
    return (high - low) / statistics.median(samples)
