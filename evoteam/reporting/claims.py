"""Claims of the paper as data, and the rules by which a measurement judges them.

A claim is one published figure (evoteam.reporting.expected reads them). `Evidence` is what this run, or its absence,
says about it. `judge` makes a verdict of the two; nothing else does.
"""

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass

REPRODUCED, NOT_REPRODUCED, UNSTABLE = "reproduced", "not-reproduced", "unstable"
RECORDED, NO_HARDWARE, NO_BASELINE = "recorded", "hardware-unavailable", "baseline-unavailable"
NOT_RUN, SHOWN = "not-run", "shown"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, UNSTABLE, RECORDED, NO_HARDWARE, NO_BASELINE, NOT_RUN, SHOWN)
UNJUDGED = (UNSTABLE, RECORDED, NO_HARDWARE, NO_BASELINE, NOT_RUN)

MODES = ("run-only", "extra-budget", "same-budget", "fixed-team", "kda-mi350x", "kda-b200")
SCOPES = ("run", "step", "search", "kda")
FIGURES = ("geomean", "wins", "worst", "score")
ROUNDING = 1e-9  # decimal figures such as 1.21 - 0.005 have no exact binary value


@dataclass(frozen=True, slots=True)
class Claim:
    """One published figure. `value` is a number, or (low, high) when a range was published."""

    id: str
    mode: str
    title: str
    value: float | tuple[float, float]
    unit: str
    judge: str  # "ratio", "range" or "shown"
    scope: str
    conditions: str
    sources: tuple[str, ...]
    hardware: str | None = None  # None: the sources do not name the GPU
    tolerance: float = 0.0
    figure: str = ""
    baseline: str = ""
    workloads: int = 0  # how many workloads the claim is about; 0 where that is not published
    task: str = ""
    arm: str = ""
    runs: int | None = None
    reported: str = ""
    caveats: tuple[str, ...] = ()

    @property
    def bar(self) -> float:
        """The smallest measured value that reproduces the claim, tolerance included."""
        low = self.value[0] if isinstance(self.value, tuple) else self.value
        return low - self.tolerance

    @property
    def published(self) -> str:
        """The figure as the paper prints it: `1.21x`, `0.44-0.51x`, `36 of 47`."""
        if isinstance(self.value, tuple):
            return f"{self.value[0]:.2f}-{self.value[1]:.2f}{self.unit}"
        return self.show(self.value)

    def show(self, value: float) -> str:
        """`value` in this claim's unit."""
        if self.unit == "x":
            return f"{value:.2f}x"
        if self.unit == "USD":
            return f"${value:,.0f}"
        return f"{value:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known here about a claim.

    absent: the verdict to give when nothing was measured now, else "".
    value: the measured figure, or the recorded one. low, high: what unstable rows leave open, value when none is.
    """

    absent: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    device: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A claim with its verdict. `where` carries the GPU, `reason` one sentence for the reader."""

    claim: Claim
    verdict: str
    measured: float | None = None
    device: str = ""
    reason: str = ""
    where: str = ""

    def to_json(self) -> dict:
        return asdict(self.claim) | {
            "published": self.claim.published,
            "measured": self.measured,
            "measured_text": "" if self.measured is None else self.claim.show(self.measured),
            "device": self.device,
            "where": self.where,
            "verdict": self.verdict,
            "reason": self.reason,
        }


def judge(claim: Claim, evidence: Evidence) -> Judgement:
    """The verdict of `claim` on `evidence`; `unstable` only where the spread leaves the verdict open."""
    if claim.judge == "shown":
        return Judgement(claim, SHOWN)
    where = place(claim, evidence.device)
    if evidence.absent:
        verdict = evidence.absent
    elif evidence.value is None or math.isnan(evidence.value):
        raise ValueError(f"evidence for {claim.id} has no value and does not say why")
    else:
        low = evidence.value if evidence.low is None else evidence.low
        high = evidence.value if evidence.high is None else evidence.high
        bar = claim.bar - ROUNDING
        verdict = REPRODUCED if low >= bar else NOT_REPRODUCED if high < bar else UNSTABLE
    return Judgement(claim, verdict, evidence.value, evidence.device, evidence.reason, where)


def place(claim: Claim, device: str) -> str:
    """`on NVIDIA B200`, or on any other chip `on NVIDIA H200, claim is for NVIDIA B200`."""
    if not device:
        return ""
    if claim.hardware is None:
        return f"on {device}, claim is for a GPU its sources do not name"
    chip = claim.hardware.split()[-1]
    if re.search(rf"\b{re.escape(chip)}\b", device, re.IGNORECASE):
        return f"on {device}"
    return f"on {device}, claim is for {claim.hardware}"


def figure(ratios: list[float], name: str) -> float:
    """A claim's figure from per-workload ratios (baseline time / kernel time; 0 for a wrong result)."""
    if name == "wins":
        return float(sum(ratio > 1 for ratio in ratios))
    if name == "worst":
        return min(ratios)
    if min(ratios) <= 0:
        return 0.0  # one wrong workload is not averaged away
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def from_scope(claim: Claim, record: dict, device: str) -> Evidence:
    """Evidence from one scope's record of `kernels.measure` (rows with ratio, status and samples)."""
    rows = record["rows"]
    if not rows:
        return Evidence(NOT_RUN, device=device, reason="no workload was measured")
    wrong = [row["index"] for row in rows if row["status"] == "wrong"]
    if any(row["ratio"] is None and row["status"] != "wrong" for row in rows):
        reason = record.get("baseline_error") or "FlashInfer gave no right answer on some workload"
        return Evidence(NO_BASELINE, device=device, reason=reason)
    bounds = [ratio_bounds(row) if row["status"] == "unstable" else (row["ratio"] or 0.0,) * 2 for row in rows]
    value = figure([row["ratio"] or 0.0 for row in rows], claim.figure)
    low, high = (figure([bound[side] for bound in bounds], claim.figure) for side in (0, 1))
    unstable = [row["index"] for row in rows if row["status"] == "unstable"]
    reason = ""
    if wrong:
        why = next(row["reason"] for row in rows if row["status"] == "wrong")
        reason = f"wrong result on workload {_list(wrong)}, counted as 0: {why}"
    elif unstable:
        reason = f"spread above 10% on workload {_list(unstable)}: {claim.show(low)} to {claim.show(high)}"
    if len(rows) < claim.workloads and not wrong:
        reason = f"{len(rows)} of the claim's {claim.workloads} workloads measured"
        return Evidence(NOT_RUN, value, device=device, reason=reason)
    return Evidence("", value, low, high, device, reason)


def ratio_bounds(row: dict) -> tuple[float, float]:
    """The least and greatest ratio that the middle 80% of a row's samples allow."""
    ours, base = sorted(row["samples"]["ours"]), sorted(row["samples"][row["baseline"]])

    def at(samples: list[float], share: float) -> float:
        return samples[round(share * (len(samples) - 1))]

    return at(base, 0.1) / at(ours, 0.9), at(base, 0.9) / at(ours, 0.1)


def _list(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:6]))
    return shown if len(indices) <= 6 else f"{shown} and {len(indices) - 6} more"


def summary_line(judgements: list[Judgement]) -> str:
    """`claims: 3 reproduced, 1 not-reproduced, 2 hardware-unavailable`: the greppable last line."""
    counts = Counter(judgement.verdict for judgement in judgements)
    return "claims: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def exit_status(judgements: list[Judgement], strict: bool) -> int:
    """1 if some claim is not reproduced; else 3 with `strict` if one could not be judged; else 0."""
    verdicts = {judgement.verdict for judgement in judgements}
    if NOT_REPRODUCED in verdicts:
        return 1
    return 3 if strict and verdicts & set(UNJUDGED) else 0
