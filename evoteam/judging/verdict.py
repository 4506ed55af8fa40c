"""What became of one candidate: the record that the evaluator writes and everything else reads."""

import json
from dataclasses import asdict, dataclass, field, fields

SCHEMA = 1
MAX_SOURCE_BYTES = 1 << 20
PHASES = ("screen", "import", "compile", "check", "time", "full")
FAILURES = ("", "screen", "import", "compile", "wrong-answer", "timeout", "crash", "cheat", "evaluator")
SHAPES = (
    (("task", "source_sha256", "task_sha256", "evaluator_sha256", "message", "log", "device"), str, "a text"),
    (("worst", "confinement", "versions", "seconds", "techniques"), dict, "an object"),
    (("rows",), list, "a list"),
)


class VerdictError(ValueError):
    """A verdict that cannot be read."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgment of one candidate.

    phase        the last phase that was entered; a failure happened in it
    failure      "" for a valid candidate, else its kind; "evaluator" is a fault of the machine or of this program
    score        geometric mean of baseline time / candidate time over the feedback workloads; 0 on any failure
    full_score   the same over all workloads, None unless all of them were run
    rows         one record a workload: times in microseconds, ratio, errors, status
    worst        the workload that failed or came out slowest, with its figures
    message      what the author of the candidate needs to know, bounded
    log          file in the attempt folder with the head and tail of the candidate's output
    confinement  level, tool and what the level leaves open
    techniques   tags declared in the source, and those that the task's patterns confirm
    """

    task: str
    source_sha256: str
    task_sha256: str
    evaluator_sha256: str
    phase: str
    failure: str = ""
    score: float = 0.0
    full_score: float | None = None
    rows: list[dict] = field(default_factory=list)
    worst: dict = field(default_factory=dict)
    message: str = ""
    log: str = ""
    confinement: dict = field(default_factory=dict)
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    techniques: dict[str, list[str]] = field(default_factory=lambda: {"declared": [], "confirmed": []})
    schema: int = SCHEMA
    extra: dict = field(default_factory=dict)  # fields of a newer version, kept as they came

    def __post_init__(self):
        for name, allowed in (("phase", PHASES), ("failure", FAILURES)):
            if getattr(self, name) not in allowed:
                raise VerdictError(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(map(repr, allowed))}")
        for names, kind, wanted in SHAPES:
            for name in names:
                if not isinstance(getattr(self, name), kind):
                    raise VerdictError(
                        f"{name} is a field of the wrong type: {getattr(self, name)!r:.80}, not {wanted}"
                    )
        for name in ("score", "full_score", "gpu_seconds"):
            if getattr(self, name) is not None or name != "full_score":
                _require_figure(name, getattr(self, name))
        if self.failure and (self.score or self.full_score):
            raise VerdictError(f"score is {self.score} with failure {self.failure!r}: a failed candidate scores 0")
        for row in self.rows:
            if not isinstance(row, dict) or "index" not in row:
                raise VerdictError(f"a row is {row!r:.80}, must be an object with the index of its workload")
            for name in ("ratio", "ours_us", "baseline_us") if "ratio" in row else ():
                _require_figure(f"{name} of a row", row.get(name))

    @property
    def valid(self) -> bool:
        return not self.failure

    def to_json(self) -> dict:
        record = asdict(self)
        return record.pop("extra") | record

    @classmethod
    def from_json(cls, record: dict | str) -> "Verdict":
        """Reads a record (a dict or its JSON text). Unknown fields are kept and come back out of `to_json`."""
        if isinstance(record, str):
            try:
                record = json.loads(record)
            except (ValueError, RecursionError) as error:
                raise VerdictError(f"the verdict is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise VerdictError(f"the verdict is a {type(record).__name__}, must be a JSON object")
        known = {f.name for f in fields(cls)} - {"extra"}
        required = ("task", "source_sha256", "task_sha256", "evaluator_sha256", "phase")
        missing = [name for name in required if name not in record]
        if missing:
            raise VerdictError(f"the verdict lacks {', '.join(missing)}")
        return cls(
            **{name: value for name, value in record.items() if name in known},
            extra={name: value for name, value in record.items() if name not in known},
        )


def _require_figure(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise VerdictError(f"{name} is a field of the wrong type: {value!r:.80}, not a number")
    if not 0 <= value < float("inf"):
        raise VerdictError(f"{name} is {value}, must be finite and at least 0")


def head_and_tail(data: bytes, limit: int = 4000) -> str:
    """At most about `limit` bytes of `data` as printable text: head, tail, how many bytes were left out between."""
    if len(data) <= limit:
        return printable(data)
    half = limit // 2
    return f"{printable(data[:half])}\n[... {len(data) - 2 * half:,} bytes left out ...]\n{printable(data[-half:])}"


def printable(data: bytes) -> str:
    """As UTF-8 text; what is not text, and what a terminal would obey, becomes replacement characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in data.decode("utf-8", "replace"))
