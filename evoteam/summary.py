"""A run in figures: for the report, for comparisons of arms, and for a look at the terminal."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from evoteam.budget import Rates, Spend
from evoteam.mailbox import waiting
from evoteam.memory import SharedFolder
from evoteam.state import Attempt, State, Tenure


def summarise(path: Path) -> dict:
    """Everything a report shows of a run, JSON-able. Tokens are input-equivalent unless a name says otherwise."""
    folder = SharedFolder.read(path)
    state = folder.state
    config, ledger = state.config, state.ledger
    return {
        "folder": path.name,
        **{
            name: config.get(name)
            for name in ("task", "arm", "model", "effort", "evaluate_by", "machine", "versions", "thresholds", "note")
        },
        "agent": _agent(config),
        "answered_by": dict(state.models),
        "started": state.started,
        "last_event": state.last_event,
        "ended": state.end and {"reason": state.end["reason"], "text": state.end["text"]},
        "devices": dict(Counter(attempt.verdict.get("device", "") for attempt in state.judged)),
        "budget": config["budget"],
        "rates": config["rates"],
        "unit": "input-equivalent tokens: " + Rates(**config["rates"]).describe(),
        "spend": _spend(ledger.total) | {"estimated_calls": ledger.estimated_calls},
        "best": state.best and _attempt(state.best),
        "curve": state.curve,
        "attempts": [_attempt(attempt) for attempt in state.judged],
        "spread": _spread(state.judged),
        "repeats": len(state.repeats),
        "failures": [{"tokens": a.tokens, "kind": a.failure, "attempt": a.id} for a in state.judged if a.failure],
        "teams": [_team(state, index) for index in range(len(state.tenures))],
        "revisions": max(0, len(state.tenures) - 1),
        "decisions": [_decision(decision) for decision in state.decisions],
        "roles": [_role(state, role, spend) for role, spend in ledger.by_role.items()],
        "turns": [
            {name: value for name, value in asdict(turn).items() if name not in ("result", "seq")}
            for turn in state.turns
        ],
        "notes": [
            {"id": n.id, "role": n.role, "team": n.team, "text": n.text, "evidence": n.evidence}
            for n in state.notes.values()
        ],
        "provider_failures": len(state.providers),
        "torn_lines": folder.torn,
    }


def _spread(judged: list) -> dict:
    """How many timed rows there are, and how many of them spread so widely that they say little."""
    status = [row["status"] for attempt in judged for row in attempt.verdict["rows"] if "status" in row]
    return {"rows": len(status), "wide": sum(value != "ok" for value in status)}


def _agent(config: dict) -> str:
    """The command line that sat in the writing roles and its version, "" for the tool loop."""
    agent = config.get("agent")
    return f"{agent['name']} {agent['version']}".strip() if agent else ""


def _spend(spend: Spend) -> dict:
    usage = spend.usage.record()
    usage.pop("estimated")
    prompt = spend.usage.prompt
    return {
        "tokens": spend.tokens,
        "full_cache_tokens": spend.full_cache_tokens,
        "raw_tokens": sum(usage.values()),
        "by_kind": usage,
        "cache_hit_rate": spend.usage.cache_read / prompt if prompt else 0.0,
        "dollars": spend.dollars,
        "calls": spend.calls,
        "evaluations": spend.evaluations,
        "gpu_seconds": spend.gpu_seconds,
    }


def _attempt(attempt: Attempt) -> dict:
    names = ("id", "role", "team", "base", "idea", "score", "full_score", "failure", "tokens", "improved")
    return {name: getattr(attempt, name) for name in names} | {
        "techniques": list(attempt.techniques),
        "rows": attempt.verdict["rows"],
    }


def _team(state: State, index: int) -> dict:
    tenure = state.tenures[index]
    following: Tenure | None = state.tenures[index + 1] if index + 1 < len(state.tenures) else None
    attempts = [attempt for attempt in state.judged if attempt.team == tenure.team.id]
    decision = next((d for d in state.decisions if d["seq"] == tenure.seq), None)
    return {
        "id": tenure.team.id,
        "parent": tenure.team.parent,
        "diagnosis": tenure.diagnosis,
        "evidence": decision["evidence"] if decision else [],
        "rules": decision["rules"] if decision else [],
        "rationale": tenure.team.rationale,
        "round": tenure.round,
        "from_tokens": tenure.tokens,
        "to_tokens": following.tokens if following else state.ledger.total.tokens,
        "best_before": tenure.score,
        "best_after": following.score if following else state.best_score,
        "attempts": len(attempts),
        "valid": sum(attempt.valid for attempt in attempts),
        "roles": [
            {"name": r.name, "mandate": r.mandate, "tools": list(r.tools), "share": r.share} for r in tenure.team.roles
        ],
        "order": [list(stage) for stage in tenure.team.order],
        "sharing": {role: list(sections) for role, sections in tenure.team.sharing.items()},
        "diff": state.tenures[index - 1].team.diff(tenure.team) if index else [],
    }


def _decision(decision: dict) -> dict:
    shown = {name: decision[name] for name in ("round", "by", "action", "diagnosis", "phase", "tokens", "rules")}
    return shown | {"fallback": decision.get("fallback", False)}


def _role(state: State, role: str, spend: Spend) -> dict:
    attempts = [attempt for attempt in state.judged if attempt.role == role]
    return {
        "role": role,
        **_spend(spend),
        "attempts": len(attempts),
        "valid": sum(attempt.valid for attempt in attempts),
        "new_bests": sum(point["role"] == role for point in state.curve),
        "notes": sum(note.role == role for note in state.notes.values()),
    }


def teams_text(state: State) -> str:
    """Every team of a run for the terminal: what it was, what caused it, what it did and achieved."""
    return "\n\n".join(_team_text(state, index) for index in range(len(state.tenures)))


def _team_text(state: State, index: int) -> str:
    team = _team(state, index)
    after = state.tenures[index + 1].round if index + 1 < len(state.tenures) else state.round + 1
    first, last, spent = team["round"], after - 1, team["to_tokens"] - team["from_tokens"]
    which = f"1 round ({first})" if last <= first else f"{last - first + 1} rounds ({first} to {last})"
    best = " before, ".join(
        f"{score:.3f}" if score else "nothing valid" for score in (team["best_before"], team["best_after"])
    )
    lines = [f"{team['id']}, " + (f"made of {team['parent']}" if team["parent"] else "the first team")]
    if team["diagnosis"]:
        lines.append(f"because: {team['diagnosis']}")
    lines += [f"role     {role['name']}: {role['mandate'].splitlines()[0]}" for role in team["roles"]]
    lines.append("order    " + ", then ".join(" and ".join(stage) for stage in team["order"]))
    lines += [f"changed  {line}" for line in team["diff"]]
    lines.append(f"worked   {which}, {spent:,.0f} tokens")
    lines.append(f"attempts {team['attempts']}, {team['valid']} valid")
    lines.append(f"best     {best} after")
    return "\n  ".join(lines)


def status_text(folder: SharedFolder) -> str:
    """How a run stands, in a few lines."""
    state = folder.state
    total, config = state.ledger.total, state.config
    best = (
        f"{state.best.score:.3f} by {state.best.id} ({state.best.role}, {state.best.team})"
        if state.best
        else "nothing valid yet"
    )
    judged = state.judged
    left = f"{state.ledger.share_left:.0%} of the tightest ceiling left"
    lines = [
        f"{config['task']}, arm {config['arm']}, model {config['model']}"
        + (f", written by {_agent(config)}" if "agent" in config else ""),
        f"best       {best}",
        f"attempts   {len(judged)}, {sum(attempt.valid for attempt in judged)} valid",
        f"tokens     {total.tokens:,.0f} of {state.ledger.ceiling_tokens:,.0f}; {left}",
    ]
    if state.tenures:
        order = ", then ".join("+".join(stage) for stage in state.team.order)
        lines.append(f"team       {state.team.id}, round {state.round}: {order}")
    looks = [decision for decision in state.decisions if decision["diagnosis"]]
    if looks:
        lines.append(f"diagnosis  round {looks[-1]['round']}, {looks[-1]['action']}: {looks[-1]['diagnosis']}")
    if state.end:
        lines.append(f"ended      {state.end['reason']}: {state.end['text']}")
    elif state.talk:
        lines.append(f"now        {state.talk.turn} of {state.talk.role}, call {state.talk.calls + 1}")
        lines += [f"waiting    {path}" for path in waiting(folder.path / "mailbox")]
    if folder.torn:
        lines.append(f"torn       {folder.torn} lines of the journal could not be read")
    return "\n".join(lines)
