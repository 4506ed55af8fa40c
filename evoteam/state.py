"""What the journal of a run says: a fold over its events. Nothing here reads the clock, the disk or a model."""

from collections import Counter
from dataclasses import dataclass, field

from evoteam.budget import Budget, Ledger, Rates, Usage
from evoteam.team import SUPERVISOR, Team, parse_team

SETTINGS = ("task", "arm", "model", "effort", "max_tokens", "evaluate_by", "budget", "rates", "thresholds")
FIGURE = (int, float)
VERDICT = {"phase": str, "failure": str, "score": FIGURE, "rows": list, "worst": dict, "message": str, "device": str}
DECISION = {
    **{"round": int, "by": str, "action": str, "diagnosis": str, "evidence": list},
    **{"rules": list, "phase": str, "tokens": FIGURE},
}
END = {"reason": str, "text": str}


def _require(record: dict, shape: dict) -> None:
    """Refuse a record that is kept as it is and would only be found wanting later, by whoever reads it."""
    for name, kind in shape.items():
        if not isinstance(record[name], kind):
            raise TypeError(f"{name} is {record[name]!r:.60}")


@dataclass(slots=True)
class Attempt:
    """One candidate and what its evaluation said. `seq` is the event that made the verdict known, 0 before."""

    id: str
    call: str
    role: str
    team: str
    idea: str
    base: str
    source_sha256: str
    program_sha256: str
    techniques: tuple[str, ...]
    unconfirmed: tuple[str, ...]
    seq: int = 0
    tokens: float = 0.0
    score: float = 0.0
    full_score: float | None = None
    failure: str = ""
    verdict: dict = field(default_factory=dict)
    improved: bool = False

    @property
    def valid(self) -> bool:
        return bool(self.seq) and not self.failure

    @property
    def outcome(self) -> str:
        return f"{self.score:.3f}x" if self.valid else self.failure or "not judged"


@dataclass(slots=True)
class Note:
    id: str
    call: str
    role: str
    team: str
    text: str
    evidence: tuple[str, ...]
    seq: int


@dataclass(slots=True)
class Call:
    """A tool call of the model that waits for its result. `fault`: why its arguments cannot be used, "" if they can."""

    key: str
    id: str
    name: str
    input: dict
    fault: str


@dataclass(slots=True)
class Talk:
    """The open turn: the conversation after its first message, and what it has used."""

    turn: str
    role: str
    team: str
    stage: int
    snapshot: int
    messages: list[dict] = field(default_factory=list)
    pending: list[Call] = field(default_factory=list)
    calls: int = 0
    evaluations: int = 0
    tokens: float = 0.0
    nudges: int = 0
    refusals: int = 0
    silent: bool = False
    ends: str = ""
    result: dict | None = None


@dataclass(slots=True)
class Tenure:
    """One team's time at work. `diagnosis` is what caused it, "" for the first."""

    team: Team
    diagnosis: str
    seq: int
    round: int
    tokens: float
    score: float  # best score when it took over


@dataclass(slots=True)
class Turn:
    id: str
    role: str
    team: str
    round: int
    reason: str
    tokens: float
    attempts: int
    result: dict | None
    seq: int


@dataclass
class State:
    """The derived state of a run. Feed every event to `apply` in order."""

    config: dict = field(default_factory=dict)
    ledger: Ledger = field(default_factory=lambda: Ledger(Budget(), Rates(1, 1, 1)))
    attempts: dict[str, Attempt] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)
    tenures: list[Tenure] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    decisions: list[dict] = field(default_factory=list)
    repeats: list[dict] = field(default_factory=list)
    curve: list[dict] = field(default_factory=list)
    answers: Counter = field(default_factory=Counter)
    best: Attempt | None = None
    talk: Talk | None = None
    open_call: dict | None = None
    providers: list[dict] = field(default_factory=list)
    models: Counter = field(default_factory=Counter)
    end: dict | None = None
    round: int = 1
    slot: int = 0
    stage_snapshot: tuple[int, int] = (-1, 0)
    seq: int = -1
    started: str = ""
    last_event: str = ""
    programs: dict[str, str] = field(default_factory=dict)

    @property
    def team(self) -> Team:
        return self.tenures[-1].team

    @property
    def judged(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts.values() if attempt.seq]

    @property
    def best_score(self) -> float:
        return self.best.score if self.best else 0.0

    def apply(self, event: dict) -> None:
        """Take one event in. Kinds of a newer version are passed over."""
        self.seq, self.last_event = event["seq"], event["t"]
        if handler := getattr(self, f"_on_{event['kind']}", None):
            handler(event)

    def _on_run(self, event: dict) -> None:
        if missing := [name for name in SETTINGS if name not in event["config"]]:
            raise ValueError(f"the configuration lacks {', '.join(missing)}")
        self.config, self.started = event["config"], event["t"]
        self.ledger = Ledger(Budget(**self.config["budget"]), Rates(**self.config["rates"]))
        self.ledger.budget.check(self.config["model"], self.ledger.price)

    def _on_team(self, event: dict) -> None:
        team, tokens = parse_team(event["team"], stored=True), self.ledger.total.tokens
        _require({"diagnosis": ""} | event, {"diagnosis": str})
        self.tenures.append(Tenure(team, event.get("diagnosis", ""), event["seq"], self.round, tokens, self.best_score))

    def _on_turn(self, event: dict) -> None:
        self.talk = Talk(event["turn"], event["role"], event["team"], event["stage"], event["snapshot"])
        self.stage_snapshot = (event["stage"], event["snapshot"])

    def _on_call(self, event: dict) -> None:
        self.open_call = event

    def _on_resume(self, event: dict) -> None:
        if event.get("usage"):
            self._charge(Usage.of(event["usage"]))
            self.open_call = None

    def _on_provider(self, event: dict) -> None:
        self.providers.append(event)
        if event.get("usage"):
            self._charge(Usage.of(event["usage"]))
        self.open_call = None

    def _on_reply(self, event: dict) -> None:
        talk, self.open_call = self.talk, None
        self._charge(Usage.of(event["usage"]))
        talk.calls += 1
        self.answers[talk.role] += 1
        self.models[event["model"]] += 1
        talk.messages.append({"role": "assistant", "content": event["content"]})
        uses = [block for block in event["content"] if block.get("type") == "tool_use"]
        faults = event.get("faults", {})
        talk.pending = [
            Call(f"{event['key']}.{index}", use["id"], use["name"], use["input"], faults.get(use["id"], ""))
            for index, use in enumerate(uses)
        ]
        talk.silent = not uses
        if event["stop_reason"] in ("refusal", "model_context_window_exceeded"):
            talk.ends = event["stop_reason"]

    def _on_spent(self, event: dict) -> None:
        """A call that a coding agent's session made of its model."""
        self.open_call = None
        self._charge(Usage.of(event["usage"]))
        self.talk.calls += 1
        self.models[event["model"]] += 1

    def _on_asked(self, event: dict) -> None:
        """What a session asks of the run: a tool call outside any answer."""
        block = {"type": "tool_use", "id": event["key"], "name": event["name"], "input": event["input"]}
        self.talk.messages.append({"role": "assistant", "content": [block]})
        self.talk.pending = [Call(event["key"], event["key"], event["name"], event["input"], event["fault"])]

    def _charge(self, usage: Usage) -> None:
        self.ledger.charge(usage, self.talk.role, self.talk.team)
        self.talk.tokens += self.ledger.price.tokens(usage)

    def _on_tool(self, event: dict) -> None:
        talk = self.talk
        call = talk.pending.pop(0)
        if talk.messages[-1]["role"] != "user":
            talk.messages.append({"role": "user", "content": []})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": event["text"]}
        talk.messages[-1]["content"].append(result | ({"is_error": True} if event["error"] else {}))
        talk.refusals += event["error"]
        talk.ends = talk.ends or event.get("ends", "")
        talk.result = event.get("result", talk.result)

    def _on_nudge(self, event: dict) -> None:
        self.talk.messages.append({"role": "user", "content": [{"type": "text", "text": event["text"]}]})
        self.talk.silent, self.talk.nudges = False, self.talk.nudges + 1

    def _on_turn_end(self, event: dict) -> None:
        talk, self.talk = self.talk, None
        ended = event["reason"], talk.tokens, talk.evaluations, talk.result, event["seq"]
        self.turns.append(Turn(talk.turn, talk.role, talk.team, self.round, *ended))
        self.slot += talk.role != SUPERVISOR

    def _on_attempt(self, event: dict) -> None:
        names = ("id", "call", "role", "team", "idea", "base", "source_sha256", "program_sha256")
        marks = tuple(event["techniques"]), tuple(event["unconfirmed"])
        attempt = Attempt(*(event[name] for name in names), *marks)
        self.attempts[attempt.id] = attempt
        self.programs.setdefault(attempt.program_sha256, attempt.id)
        self.talk.evaluations += 1

    def _on_verdict(self, event: dict) -> None:
        attempt, verdict = self.attempts[event["attempt"]], event["verdict"]
        _require(verdict, VERDICT)
        self.ledger.evaluated(attempt.role, attempt.team, verdict["gpu_seconds"])
        attempt.seq, attempt.tokens = event["seq"], self.ledger.total.tokens
        attempt.failure, attempt.verdict = verdict["failure"], verdict
        attempt.score, attempt.full_score = verdict["score"], verdict["full_score"]
        if attempt.valid and attempt.score > self.best_score:
            self._new_best(attempt)

    def _new_best(self, attempt: Attempt) -> None:
        before = next((point["score"] for point in reversed(self.curve) if point["gain"]), 0.0)
        gain = attempt.score > before * (1 + self.config["thresholds"]["min_gain"])
        attempt.improved, self.best = gain, attempt
        spent = {name: getattr(self.ledger.total, name) for name in ("tokens", "full_cache_tokens", "dollars")}
        who = {"attempt": attempt.id, "role": attempt.role, "team": attempt.team}
        self.curve.append({"seq": self.seq, "score": attempt.score, "gain": gain} | who | spent)

    def _on_repeat(self, event: dict) -> None:
        self.repeats.append(event)

    def _on_note(self, event: dict) -> None:
        names = ("id", "call", "role", "team", "text")
        note = Note(*(event[name] for name in names), tuple(event["evidence"]), event["seq"])
        self.notes[note.id] = note

    def _on_decision(self, event: dict) -> None:
        _require(event, DECISION)
        self.decisions.append(event)
        self.round, self.slot = self.round + 1, 0
        self.stage_snapshot = (-1, 0)
        if event.get("team"):
            self._on_team(event)

    def _on_end(self, event: dict) -> None:
        _require(event, END)
        self.end = event
