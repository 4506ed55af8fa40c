"""The task @NAME@: say in one sentence what is computed. Here: RMS normalization of rows, times a weight.

Replace the parts from top to bottom; the tests in tests/kernels/test_@MODULE@.py say what must hold between them.
"""

import math
from dataclasses import dataclass

EPSILON = 1e-6
TOLERANCE = 1e-2  # absolute or relative, of every element

DEFINITION = """\
Write a Python module that defines

    rms_norm(x, weight) -> out

| argument | shape | dtype |
|---|---|---|
| x | [rows, width] | bfloat16 |
| weight | [width] | bfloat16 |

`out` [rows, width] bfloat16 is `x / sqrt(mean(x^2) + 1e-6) * weight`, computed in float32. Inputs must be left alone.

Every element must be within 1e-2 absolute or relative of an fp64 reference, and the error norm may be at most 1.5 times
the baseline's. Timed is one call in wall time on one CPU core. Contents change between calls while the buffers stay the
same. If the function takes `out` as a keyword argument, it is given a buffer to write to. The score is the geometric
mean over the workloads of baseline time / your time; the baseline is plain PyTorch in float32.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """One workload. `index` and `name` identify it; `batch` and `tokens` are shown in verdicts."""

    index: int
    name: str
    rows: int
    width: int

    @property
    def batch(self) -> int:
        return self.rows

    @property
    def tokens(self) -> int:
        return self.rows * self.width


WORKLOADS = (
    Shape(0, "wide", 64, 8192),
    Shape(1, "square", 1024, 1024),
    Shape(2, "narrow", 8192, 64),
    Shape(3, "one-row", 1, 65536),
)
FEEDBACK = (0, 1, 2)  # what authors see; the rest is kept for a new best
AWKWARD = (Shape(100, "one-element", 1, 1), Shape(101, "odd", 3, 17), Shape(102, "no-rows", 0, 5))


def make_inputs(workload: Shape, seed: int, device) -> tuple:
    """The definition's positional arguments; everything follows the seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(workload.rows, workload.width, generator=generator).to(torch.bfloat16)
    weight = torch.randn(workload.width, generator=generator).to(torch.bfloat16)
    return x.to(device), weight.to(device)


def rms_norm(x, weight, dtype):
    x = x.to(dtype)
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.to(dtype)


def reference(inputs: tuple) -> tuple:
    """The outputs in fp64: what a right answer is."""
    import torch

    return (rms_norm(*inputs, torch.float64),)


def baseline(inputs: tuple):
    """The baseline's name, and a callable for the outputs in their final dtypes. Prepare ahead what may be."""
    import torch

    return "plain PyTorch, fp32", lambda: (rms_norm(*inputs, torch.float32).to(torch.bfloat16),)


def compare(outputs: tuple, expected: tuple):
    """Judge the outputs against the reference's. NaN must fail, on either side."""
    import torch

    from kernels.reference import Errors

    (out,), (wanted,) = outputs, expected
    if out.dtype != torch.bfloat16 or out.shape != wanted.shape:
        reason = f"out is {out.dtype} {list(out.shape)}, must be torch.bfloat16 {list(wanted.shape)}"
        return Errors(False, reason, math.inf, math.inf, math.inf)
    if not wanted.numel():
        return Errors(True, "", 0.0, 0.0, 0.0)
    difference = (out.double() - wanted).abs()
    wrong = ~(difference <= torch.clamp(TOLERANCE * wanted.abs(), min=TOLERANCE))
    ratio = float(difference.norm() / wanted.norm())
    reason = f"{int(wrong.sum())} of {wrong.numel()} elements of out are wrong" if wrong.any() else ""
    return Errors(not reason, reason, float(difference.max()), 0.0, ratio)


def task():
    from kernels.tasks import Task

    return Task(
        name="@NAME@",
        title="RMS normalization on one CPU core against plain PyTorch",
        device="cpu",
        entry_point="rms_norm",
        definition=DEFINITION,
        workloads=WORKLOADS,
        feedback=FEEDBACK,
        awkward=AWKWARD,
        make_inputs=make_inputs,
        reference=reference,
        baseline=baseline,
        compare=compare,
        techniques={
            "fused": r"rms_norm\(|torch\.compile",
            "native-code": r"ctypes|cpp_extension",
            "in-place": r"\bout=|mul_\(",
        },
    )
