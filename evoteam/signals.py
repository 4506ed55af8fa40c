"""What the journal says about the progress of a run: numbers, and the rules by which work counts as stalled.

A pure function of the state. Thresholds count tokens and attempts, never seconds: a slow evaluation is no stall.
"""

from collections import Counter
from dataclasses import dataclass

from evoteam.digest import pairs
from evoteam.state import Attempt, State
from evoteam.team import SUPERVISOR, shorten

RETREAT_LOOK = 2  # latest attempts that must have dropped a technique


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When work counts as stalled.

    min_gain: a new best by less than this part is noise. valid, token_share: valid attempts and part of the budget
    without a gain. streak: failures of one kind in a row, or twice as many of any kind. retreat: failures of a
    technique after which dropping it is a retreat. repeats: programs submitted again in one round. futile: revisions
    without a gain after which the supervisor may stop.
    """

    min_gain: float = 0.02
    valid: int = 4
    token_share: float = 0.08
    streak: int = 3
    retreat: int = 2
    repeats: int = 2
    futile: int = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that fired. `subject` tells one firing from another (technique, failure), `text` has the numbers."""

    name: str
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class Signals:
    phase: str
    rules: tuple[Rule, ...]
    may_stop: bool
    lines: tuple[str, ...]

    @property
    def stalled(self) -> bool:
        return bool(self.rules)

    def text(self) -> str:
        fired = [f"- **{rule.name}**: {rule.text}" for rule in self.rules] or ["- none"]
        return (
            "Rules that fired:\n" + "\n".join(fired) + "\n\nNumbers:\n" + "\n".join(f"- {line}" for line in self.lines)
        )


def read_signals(state: State) -> Signals:
    """The signals at this point of the run."""
    limits = Thresholds(**state.config["thresholds"])
    rules = [rule for find in (_plateau, _streak, _retreat, _repeats, _silent) for rule in find(state, limits)]
    return Signals(_phase(state), tuple(rules), _may_stop(state, limits), tuple(_numbers(state)))


def _last_look(state: State) -> int:
    """Event of the supervisor's last decision: what it has looked at does not alarm again."""
    looks = [decision["seq"] for decision in state.decisions if decision["by"] == SUPERVISOR]
    return looks[-1] if looks else -1


def _last_gain(state: State) -> dict | None:
    gains = [point for point in state.curve if point["gain"]]
    return gains[-1] if gains else None


def _tokens_at_look(state: State) -> float:
    looks = [decision["tokens"] for decision in state.decisions if decision["by"] == SUPERVISOR]
    return looks[-1] if looks else 0.0


def _plateau(state: State, limits: Thresholds) -> list[Rule]:
    gain = _last_gain(state)
    since = max(_last_look(state), gain["seq"] if gain else -1)
    tokens = state.ledger.total.tokens - max(_tokens_at_look(state), gain["tokens"] if gain else 0.0)
    valid = sum(attempt.valid and attempt.seq > since for attempt in state.judged)
    wanted = limits.token_share * state.ledger.ceiling_tokens
    if valid < limits.valid or tokens < wanted:
        return []
    best = f"the best is still {state.best.id} with {state.best.score:.3f}" if state.best else "nothing is valid yet"
    seen = f"{valid} valid attempts and {tokens:,.0f} tokens without a gain of {limits.min_gain:.0%}"
    return [Rule("plateau", "", f"{seen} (limits {limits.valid} and {wanted:,.0f}); {best}")]


def _streak(state: State, limits: Thresholds) -> list[Rule]:
    recent = [attempt for attempt in state.judged if attempt.seq > _last_look(state)]
    failed: list[Attempt] = []
    for attempt in reversed(recent):
        if attempt.valid:
            break
        failed.insert(0, attempt)
    if not failed:
        return []
    kind, count = Counter(attempt.failure for attempt in failed).most_common(1)[0]
    if count < limits.streak and len(failed) < 2 * limits.streak:
        return []
    last = next(attempt for attempt in reversed(failed) if attempt.failure == kind)
    worst = f" (worst: {pairs(last.verdict['worst'])})" if last.verdict["worst"] else ""
    return [
        Rule("failure-streak", kind, f"{len(failed)} failures in a row, {count} of them {kind}, last {last.id}{worst}")
    ]


def _retreat(state: State, limits: Thresholds) -> list[Rule]:
    """A technique failed, never worked, and the latest attempts do without it."""
    judged, rules = state.judged, []
    named = {rule["subject"] for decision in state.decisions for rule in decision["rules"] if rule["name"] == "retreat"}
    for tag in sorted({tag for attempt in judged for tag in attempt.techniques}):
        having = [attempt for attempt in judged if tag in attempt.techniques]
        failed = [attempt for attempt in having if attempt.failure]
        if len(failed) < limits.retreat or len(failed) < len(having):
            continue
        after = [attempt for attempt in judged if attempt.seq > failed[-1].seq]
        subject = f"{tag} after {failed[-1].id}"
        if len(after) >= RETREAT_LOOK and subject not in named:
            kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(a.failure for a in failed).items())
            ids = ", ".join(attempt.id for attempt in failed[-4:])
            seen = f"{tag} failed {len(failed)} times ({kinds}; {ids}), never worked"
            rules.append(Rule("retreat", subject, f"{seen}, and the {len(after)} attempts since then do without it"))
    return rules


def _this_round(state: State) -> int:
    return state.decisions[-1]["seq"] if state.decisions else -1


def _repeats(state: State, limits: Thresholds) -> list[Rule]:
    recent = [repeat for repeat in state.repeats if repeat["seq"] > _this_round(state)]
    if len(recent) < limits.repeats:
        return []
    programs = ", ".join(sorted({repeat["attempt"] for repeat in recent}))
    return [Rule("repeats", "", f"{len(recent)} submissions of this round were programs tried before ({programs})")]


def _silent(state: State, limits: Thresholds) -> list[Rule]:
    if any(attempt.seq > _this_round(state) for attempt in state.judged):
        return []
    spent = sum(turn.tokens for turn in state.turns if turn.seq > _this_round(state))
    return [Rule("no-attempts", "", f"a round of {spent:,.0f} tokens brought no attempt")]


def _phase(state: State) -> str:
    """The phase of work: no valid kernel yet; gains still large; gains small."""
    if state.best is None:
        return "correctness"
    scores = [point["score"] for point in state.curve][-3:]
    gains = [new / old - 1 for old, new in zip(scores, scores[1:])]
    return "refinement" if len(gains) == 2 and max(gains) < 0.05 else "speed"


def _may_stop(state: State, limits: Thresholds) -> bool:
    gain = _last_gain(state)
    since = gain["seq"] if gain else -1
    return sum(tenure.seq > since for tenure in state.tenures[1:]) >= limits.futile


def _numbers(state: State) -> list[str]:
    total, ledger = state.ledger.total, state.ledger
    judged = state.judged
    rounds = max(1, state.round)
    gain = _last_gain(state)
    lines = [
        f"phase of work: {_phase(state)}; round {state.round}, team {state.team.id}",
        f"{len(judged)} attempts: {sum(a.valid for a in judged)} valid, "
        + (
            ", ".join(f"{n} {kind}" for kind, n in Counter(a.failure for a in judged if a.failure).most_common())
            or "no failure"
        ),
        f"tokens used {total.tokens:,.0f}, {ledger.share_left:.0%} of the budget left, about "
        f"{(ledger.ceiling_tokens - total.tokens) / max(1.0, total.tokens / rounds):.0f} more rounds like these",
        "best over time: "
        + (", ".join(f"{p['score']:.3f} by {p['attempt']} at {p['tokens']:,.0f}" for p in state.curve[-5:]) or "none"),
    ]
    if gain:
        since = [attempt for attempt in judged if attempt.seq > gain["seq"]]
        tried = f"{len(since)} attempts ({sum(a.valid for a in since)} valid)"
        lines.append(f"since the last gain: {tried}, {total.tokens - gain['tokens']:,.0f} tokens")
    for role, spend in ledger.by_role.items():
        own = [point for point in state.curve if point["role"] == role]
        lines.append(f"role {role}: {spend.tokens:,.0f} tokens, {spend.evaluations} evaluations, {len(own)} new bests")
    lines += _unread(state)
    return lines


def _unread(state: State) -> list[str]:
    """Notes that nobody in the present team is shown."""
    shown = {section for role, sections in state.team.sharing.items() for section in sections}
    unread = [note.id for note in state.notes.values() if not {f"notes:{note.role}", "notes:*"} & shown]
    return [f"notes that nobody is shown: {shorten(', '.join(unread), 200)}"] if unread else []
