"""Checks and times a candidate for a CPU task: its process and the baseline's in turns, on this process's clock.

What makes a made-up time impossible or useless:
- Clock, inputs and reference are here. A call ends when its outputs have been copied away: work that is put off is
  either in the time or not in the result.
- Between calls the candidate's process is stopped, with all its threads, and may have no other process; CPU time that it
  used meanwhile is a cheat: nothing of it runs before its inputs are there, or while the baseline does.
- A call costs the larger of its wall and CPU time, CPU time of all threads until the stop: threads gain nothing. Of the
  wall time, what the call spent waiting for a CPU that others had is taken off. If any process or thread was begun on
  this machine meanwhile, nothing is taken off and the candidate is charged with every CPU: the newcomer could be its own.
- The same buffers hold other contents in every call. In a counted call all of them are new; unannounced between those
  stand traps, calls in which only values changed, or a single row whose effect can be seen.
- Outputs are poisoned before every call. The traps, the fastest calls and others chosen at random are compared with the
  reference afterwards. Inputs must come back untouched after every call, and no process may be left.

Other work on the machine only ever makes a call slower, so a workload's time is the fastest of its counted calls, taken
once several others came close to it.
"""

import os
import random
import socket
import statistics
import time
from dataclasses import dataclass

import torch

from evoteam.judging import harness, processes
from evoteam.judging.arena import Arena
from evoteam.judging.child import Child, Failure, Peer
from evoteam.judging.gate import (
    OUTPUT_NAMES,
    SPREAD_LIMIT,
    Standard,
    compare,
    errors_of,
    row_of,
    smallest,
    standard_of,
)

CPU = torch.device("cpu")
WARMUPS = 1
MIN_COUNTED, MAX_COUNTED = 9, 60
CLOSE = 1.03  # a call this near to the fastest confirms it
REVALUED = (
    2  # traps of a workload with other values on the same page table; beside them one for each input, a row changed
)
NUDGE_TRIES = 12
COMPARED_FASTEST, COMPARED_AT_RANDOM = 3, 3


class Baseline(harness.Runner):
    """The task's baseline behind the same harness as a candidate."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def bind(self, request: dict, fds: list[int]) -> None:
        super().bind(request, fds)
        _, run = self.task.baseline(tuple(self.inputs))
        self.function = lambda *_: run()


def fork_baseline(task) -> Peer:
    """A process that runs the baseline: forked, so that it needs no start-up. Ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            harness.serve(theirs, Baseline(task))
        finally:
            os._exit(1)
    theirs.close()
    return Peer(ours, pid)


@dataclass(frozen=True, slots=True)
class Pair:
    """A call of the candidate and one of the baseline on the same inputs, in microseconds."""

    candidate: float
    baseline: float
    inputs: tuple
    outputs: tuple


class WallBench:
    """One candidate against the baseline of a CPU task."""

    def __init__(self, task, child: Child, baseline: Peer):
        self.task, self.child = task, child
        self.peers = {"candidate": child, "baseline": baseline}
        self.arenas = {name: Arena() for name in self.peers}
        self.random = random.SystemRandom()
        self.on_exception = "crash"
        self.standard: Standard | None = None
        self.cpus = os.cpu_count() or 1

    def close(self) -> None:
        self.peers["baseline"].kill()
        for arena in self.arenas.values():
            arena.close()

    def first_call(self) -> None:
        """The smallest awkward workload once: what the candidate compiles, it compiles now."""
        for peer in self.peers.values():
            peer.hold()
            peer.cpu_since_mark()
        self.on_exception = "compile"
        self._check(smallest(self.task), calls=1)
        self.on_exception = "crash"

    def check(self, workload) -> None:
        """Two calls on the same buffers, all contents changed in between."""
        self._check(workload, calls=2)

    def _check(self, workload, calls: int) -> None:
        inputs = self._fresh(workload)
        self._bind(workload, inputs, ("candidate",))
        for number in range(calls):
            if number:
                inputs = self._fresh(workload)
                self.standard, _ = standard_of(self.task, workload, inputs, self.standard)
                self.arenas["candidate"].write(inputs)
            _, outputs = self._call("candidate", workload, inputs)
            compare(self.task, workload, outputs, self.standard)

    def time(self, workload) -> dict:
        """The row of one workload: fastest calls in microseconds, ratio, spread, errors of the compared calls."""
        inputs = self._fresh(workload)
        standard = self._bind(workload, inputs, tuple(self.peers))
        places = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.is_floating_point()]
        early = self.random.sample(range(1, MIN_COUNTED), min(REVALUED + len(places), MIN_COUNTED - 1))
        revalued, nudged = early[:REVALUED], dict(zip(early[REVALUED:], places))
        pairs, traps, end = [], [], time.monotonic() + self.child.limits.workload_s
        for number in range(-WARMUPS, MAX_COUNTED):
            if number in revalued or number in nudged:
                change = _revalued(inputs) if number in revalued else self._nudged(workload, pairs[-1], nudged[number])
                traps.append(self._pair(workload, change, number))
            inputs = self._fresh(workload)
            pair = self._pair(workload, inputs, number)
            if number >= 0:
                pairs.append(pair)
            if len(pairs) >= MIN_COUNTED and (time.monotonic() > end or max(map(_confirmation, _sides(pairs))) < CLOSE):
                break
        compared = traps + sorted(pairs, key=lambda pair: pair.candidate)[:COMPARED_FASTEST]
        compared += self.random.sample(pairs, COMPARED_AT_RANDOM)
        held_to = ((pair.outputs, standard.on(self.task.reference(pair.inputs))) for pair in compared)
        errors = errors_of([compare(self.task, workload, outputs, held) for outputs, held in held_to])
        return (
            row_of(workload)
            | _figures(pairs)
            | errors
            | {
                "baseline": standard.name,
                "baseline_error_ratio": standard.error_ratio,
                "compared": len(compared),
            }
        )

    def _pair(self, workload, inputs: tuple, number: int) -> "Pair":
        """One call of each side on these inputs, the side that goes first alternating."""
        taken = {}
        for name in ("candidate", "baseline")[:: 1 if number % 2 else -1]:
            self.arenas[name].write(inputs)
            taken[name] = self._call(name, workload, inputs)
        candidate, outputs = taken["candidate"]
        return Pair(candidate, taken["baseline"][0], inputs, outputs)

    def _fresh(self, workload) -> tuple:
        return self.task.make_inputs(workload, self.random.getrandbits(31), CPU)

    def _nudged(self, workload, last: Pair, place: int) -> tuple:
        """The last call's inputs with one row of one of them negated, such that its outputs would no longer pass."""
        rows = last.inputs[place].reshape(len(last.inputs[place]), -1).isfinite().all(1).nonzero().flatten().tolist()
        for row in self.random.sample(rows, min(NUDGE_TRIES, len(rows))):
            tensor = last.inputs[place].clone()
            tensor[row].neg_()
            changed = (*last.inputs[:place], tensor, *last.inputs[place + 1 :])
            if not self.task.compare(last.outputs, self.task.reference(changed)).ok:
                return changed
        return self._fresh(workload)

    def _bind(self, workload, inputs: tuple, names: tuple[str, ...]) -> Standard:
        self.standard, _ = standard_of(self.task, workload, inputs, self.standard)
        for name in names:
            self._refuse_work_while_held(name, workload)
            self.peers[name].release()
            reply = self.arenas[name].bind(self.peers[name], inputs, self.standard.outputs, OUTPUT_NAMES)
            self.peers[name].hold()
            self.peers[name].cpu_since_mark()
            if "error" in reply:
                raise Failure("evaluator", f"the {name}'s process could not map its inputs: {reply['message']}")
        self._refuse_processes(workload, "was running before the call")
        return self.standard

    def _call(self, name: str, workload, inputs: tuple) -> tuple[float, tuple]:
        """Microseconds of one call, and its outputs."""
        peer, arena = self.peers[name], self.arenas[name]
        arena.poison()
        self._refuse_work_while_held(name, workload)
        begun, waited = processes.begun(), self._waited(peer)
        start = time.perf_counter_ns()
        peer.release()
        reply = peer.request("call")
        outputs = arena.take()
        wall, waited = time.perf_counter_ns() - start, self._waited(peer) - waited
        peer.hold()
        if processes.begun() == begun:
            us = max(wall - waited, peer.cpu_since_mark()) / 1e3
        else:  # one that came and went within the call leaves no trace of its time: it may have had every CPU
            us = max(wall * (self.cpus if name == "candidate" else 1), peer.cpu_since_mark()) / 1e3
        row = row_of(workload)
        if name == "baseline":
            if "error" in reply:
                raise Failure("evaluator", f"the baseline failed: {reply['message']}", row)
            return us, outputs
        if reply.get("error") == "output":
            raise Failure("wrong-answer", reply["message"], row)
        if "error" in reply:
            raise Failure(self.on_exception, reply["message"], row)
        edited = arena.edited(inputs)
        if edited:
            raise Failure("cheat", f"it wrote to its inputs (argument {edited[0]}, counted from 0)", row)
        self._refuse_processes(workload, "was left running after the call returned")
        return us, outputs

    def _refuse_work_while_held(self, name: str, workload) -> None:
        """A timer of its own can wake a stopped process."""
        if name == "candidate" and not self.child.stood_still():
            raise Failure("cheat", "its process ran while it was stopped between two calls", row_of(workload))

    def _refuse_processes(self, workload, what: str) -> None:
        """The candidate's own process is stopped now: what is not there cannot come before the next call."""
        if self.child.strays():
            raise Failure("cheat", f"a process of its own {what}", row_of(workload))

    def _waited(self, peer: Peer) -> int:
        return processes.waited_ns(peer.pid) + processes.waited_ns(os.getpid())


def _revalued(inputs: tuple) -> tuple:
    """The columns of floating-point inputs times random signs: the same structure, NaN where it was, other values."""
    changed = []
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1:
            signs = torch.randint(0, 2, value.shape[-1:], dtype=torch.int8).to(value.dtype).mul_(2).sub_(1)
            value = value * signs
        changed.append(value)
    return tuple(changed)


def _sides(pairs: list[Pair]) -> tuple[list[float], list[float]]:
    return [pair.candidate for pair in pairs], [pair.baseline for pair in pairs]


def _confirmation(us: list[float]) -> float:
    """The slowest of the fastest eighth of the calls (the third-fastest at least), as a multiple of the fastest."""
    ordered = sorted(us)
    return ordered[max(2, len(ordered) // 8)] / ordered[0]


def _figures(pairs: list[Pair]) -> dict:
    ours, baseline = _sides(pairs)
    spread = max(_confirmation(ours), _confirmation(baseline)) - 1
    return {
        "ours_us": round(min(ours), 1),
        "baseline_us": round(min(baseline), 1),
        "ratio": min(baseline) / min(ours),
        "ours_median_us": round(statistics.median(ours), 1),
        "baseline_median_us": round(statistics.median(baseline), 1),
        "statistic": "min",
        "spread": round(spread, 4),
        "calls": len(pairs),
        "status": "ok" if spread <= SPREAD_LIMIT else "unstable",
    }
