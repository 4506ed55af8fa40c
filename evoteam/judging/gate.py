"""What outputs must pass, on every device: the task's own gate, and a bound on the error next to the baseline's."""

import math
from dataclasses import dataclass, replace

from evoteam.judging.child import Failure

OUTPUT_NAMES = ("out", "lse")
ERROR_RATIO_MARGIN = 1.5
MEANINGFUL_ELEMENTS = 1024
SPREAD_LIMIT = 0.10  # above it a row says "unstable"


@dataclass(frozen=True, slots=True)
class Standard:
    """What outputs on some inputs are held to: the reference's outputs, and the baseline with its error."""

    name: str
    outputs: tuple
    expected: tuple
    error_ratio: float

    @property
    def limit(self) -> float:
        """The largest error ratio that passes; of a few elements it says nothing, there the task's own gate must do."""
        few = self.outputs[0].numel() < MEANINGFUL_ELEMENTS
        return math.inf if few else max(ERROR_RATIO_MARGIN * self.error_ratio, 1e-6)

    def on(self, expected: tuple) -> "Standard":
        """For other values of the same workload, where the baseline's error ratio is about the same."""
        return replace(self, expected=expected)

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
    """The standard that the baseline sets on these inputs, and the baseline as a callable.

    Where it does not take an awkward workload, the callable is None, the outputs have the dtypes of `like`, an earlier
    workload's standard, and only the task's own gate applies. Raises Failure when the baseline is wrong.
    """
    try:
        title, run = task.baseline(inputs)
        outputs = tuple(run())
    except Exception:
        if like is None or workload not in task.awkward:
            raise
        expected = task.reference(inputs)
        outputs = tuple(value.to(known.dtype) for value, known in zip(expected, like.outputs))
        return Standard("", outputs, expected, math.inf), None
    expected = task.reference(inputs)
    error = task.compare(outputs, expected)
    if not error.ok:
        raise Failure("evaluator", f"the baseline itself is wrong: {error.reason}", row_of(workload))
    return Standard(title, outputs, expected, error.error_ratio), run


def compare(task, workload, outputs: tuple, standard: Standard):
    """The errors of a candidate's outputs. Raises Failure when they do not pass."""
    error = task.compare(outputs, standard.expected)
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
