"""What a candidate's outputs must pass, on every device: the task's own gate, and a bound on the error next to the baseline's."""

import math
from dataclasses import dataclass

from evoteam.child import Failure

OUTPUT_NAMES = ("out", "lse")
ERROR_RATIO_MARGIN = 1.5
SPREAD_LIMIT = 0.10  # above it a row says "unstable"


@dataclass(frozen=True, slots=True)
class Standard:
    """What the baseline does on a workload: its name, outputs (for their shapes and dtypes) and error ratio."""

    name: str
    outputs: tuple
    error_ratio: float

    @property
    def limit(self) -> float:
        return max(ERROR_RATIO_MARGIN * self.error_ratio, 1e-6)

    def specs(self) -> list[dict]:
        """Names, dtypes and shapes that a candidate's outputs must have."""
        return [
            {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            for name, value in zip(OUTPUT_NAMES, self.outputs)
        ]


def row_of(workload) -> dict:
    """What identifies a workload in a verdict."""
    name = getattr(workload, "name", None) or workload.uuid
    return {"index": workload.index, "workload": name, "batch": workload.batch, "tokens": workload.tokens}


def smallest(task):
    """The awkward workload that costs least, among those in which there is anything to compute."""
    return min((workload for workload in task.awkward if workload.tokens), key=lambda workload: workload.tokens)


def standard_of(task, workload, inputs: tuple, like: Standard | None):
    """What the baseline sets on these inputs, and the baseline as a callable, None where it does not take an awkward workload.

    `like` is the standard of an earlier workload: there the outputs have its dtypes, and only the task's own gate applies.
    Raises Failure when the baseline is wrong: then nothing can be judged here.
    """
    expected = task.reference(inputs)
    try:
        title, run = task.baseline(inputs)
        outputs = tuple(run())
    except Exception:
        if like is None or workload not in task.awkward:
            raise
        outputs = tuple(value.to(known.dtype) for value, known in zip(expected, like.outputs))
        return Standard("", outputs, math.inf), None
    error = task.compare(outputs, expected)
    if not error.ok:
        raise Failure("evaluator", f"the baseline itself is wrong: {error.reason}", row_of(workload))
    return Standard(title, outputs, error.error_ratio), run


def compare(task, workload, outputs: tuple, inputs: tuple, standard: Standard, expected: tuple | None = None):
    """The errors of a candidate's outputs. Raises Failure when they do not pass."""
    error = task.compare(outputs, task.reference(inputs) if expected is None else expected)
    row = row_of(workload) | errors_of([error])
    if not error.ok:
        raise Failure("wrong-answer", error.reason, row)
    if error.error_ratio > standard.limit:
        raise Failure(
            "wrong-answer",
            f"the error ratio is {error.error_ratio:.2e}, must be at most {standard.limit:.2e}, "
            f"{ERROR_RATIO_MARGIN} times the baseline's: something is computed in too low a precision",
            row,
        )
    return error


def errors_of(errors: list) -> dict:
    """The figures of the worst of some errors, for a row."""
    worst = max(errors, key=lambda error: error.error_ratio)
    return {"error_ratio": worst.error_ratio, "max_abs": worst.max_abs, "lse_error": worst.lse_error}
