"""The task @NAME@: its parts agree with each other, a right candidate passes and a wrong one does not."""

import math

import pytest
import torch

from evoteam.judging.child import Limits
from evoteam.judging.evaluator import Evaluator
from kernels.tasks import load_task

TASK = load_task("@NAME@")
CPU = torch.device("cpu")

RIGHT = """
import torch

def rms_norm(x, weight):
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), 1e-6).to(x.dtype)
"""
WRONG = RIGHT.replace("1e-6", "0.5")


@pytest.mark.parametrize("workload", (*TASK.workloads, *TASK.awkward), ids=lambda workload: workload.name)
def test_baseline_passes_the_gate(workload):
    inputs = TASK.make_inputs(workload, 1, CPU)
    _, run = TASK.baseline(inputs)
    error = TASK.compare(run(), TASK.reference(inputs))
    assert error.ok, error.reason


def test_seed_decides_everything():
    one, again, other = (TASK.make_inputs(TASK.workloads[0], seed, CPU) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, again))
    assert not any(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize(
    "spoil", [torch.zeros_like, lambda out: torch.full_like(out, math.nan), lambda out: out.float()]
)
def test_gate_refuses(spoil):
    inputs = TASK.make_inputs(TASK.workloads[1], 1, CPU)
    (out,) = TASK.baseline(inputs)[1]()
    assert not TASK.compare((spoil(out),), TASK.reference(inputs)).ok


def test_candidates_are_judged(tmp_path):
    with Evaluator("@NAME@", limits=Limits(workload_s=0.2)) as evaluator:
        verdicts = []
        for name, source in (("right", RIGHT), ("wrong", WRONG)):
            (tmp_path / f"{name}.py").write_text(source)
            verdicts.append(evaluator.evaluate(tmp_path / f"{name}.py", tmp_path / name, full=True))
    right, wrong = verdicts
    assert right.failure == "" and right.score > 0 and len(right.rows) == len(TASK.workloads), right.message
    assert (wrong.failure, wrong.phase, wrong.score) == ("wrong-answer", "compile", 0)
