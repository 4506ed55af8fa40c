"""The loop of a run: the team works through its order, the supervisor looks, the team goes on or is rewritten.

Each step begins with what the journal says, so going on after an interruption and starting anew are the same code.
"""

import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from string import Template
from typing import Any

from evoteam import supervisor
from evoteam.agent import PROMPTS, TurnLimits, open_turn, take_turn
from evoteam.budget import Budget, rates
from evoteam.llm import Model, RecordingEnds
from evoteam.memory import SharedFolder
from evoteam.sessions.turn import Sessions, take_session
from evoteam.signals import Thresholds, read_signals
from evoteam.state import Talk
from evoteam.team import SUPERVISOR, Role, Team, preset
from evoteam.tools import Judge, RoleTools
from evoteam.views import view

MAX_TOKENS = 16_000  # of one answer
EVALUATION_TOKENS = 5_000  # an evaluation for every so many tokens of the budget, for every arm alike
PACKAGES = ("anthropic", "pydantic", "torch", "triton")
TOOL_LOOP = "Act by calling tools. Your turn ends with `finish`, or when its calls or tokens are used."
SESSION = "Act in your folder, and reach the team by the commands that you are told."


def configuration(
    *, task: str, arm: str, model: str, budget: Budget, effort: str = "", evaluate_by: str = "here",
    agent: dict | None = None,
) -> dict:  # fmt: skip
    """What stands in run.json and in the first event: everything that decides how a run goes.

    agent: the command line (see sessions/agents.py) that sits in every role that writes candidates.
    """
    price = rates(model)
    budget.check(model, price)
    if budget.evaluations is None:
        ceiling = budget.tokens or budget.dollars / price.dollars_in * 1e6
        budget = Budget(budget.tokens, budget.dollars, max(1, round(ceiling / EVALUATION_TOKENS)), budget.gpu_seconds)
    return {
        "task": task, "arm": arm, "model": model, "effort": effort, "max_tokens": MAX_TOKENS,
        "evaluate_by": evaluate_by, "budget": asdict(budget), "rates": asdict(price),
        "thresholds": asdict(Thresholds()), "versions": _versions(),
        "machine": {"system": platform.platform(), "python": platform.python_version(), "cpu_count": os.cpu_count()},
        **({"agent": agent} if agent else {}),
    }  # fmt: skip


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class Search:
    """A run on its folder. `say` is told what happens, one line at a time. `sessions`: where the run has an agent."""

    def __init__(
        self, folder: SharedFolder, model: Model, judge: Judge, task: Any, say: Callable[[str], None] = print,
        sessions: Sessions | None = None,
    ):  # fmt: skip
        self.folder, self.model, self.judge, self.task, self.say = folder, model, judge, task, say
        self.state, self.sessions = folder.state, sessions

    def run(self) -> str:
        """Go on until the run ends; the reason.

        ProviderError, EvaluationError and FolderError leave the run to be resumed.
        """
        if self.state.end is None:
            self._take_over()
        while self.state.end is None:
            try:
                self._step()
            except RecordingEnds as end:
                self._end("answers", str(end))
        return self.state.end["reason"]

    def _take_over(self) -> None:
        state, folder = self.state, self.folder
        if not state.tenures:
            team = preset(state.config["arm"])
            self._store_team(team, "")
            folder.append("team", team=team.model_dump(mode="json"), diagnosis="")
            return
        asked_again = self.model.repeatable and not (state.talk and self._agent_of(state.talk.role))
        lost = None if asked_again else state.open_call
        folder.append("resume", torn=folder.torn, **({"lost": lost["key"], "usage": lost["reserved"]} if lost else {}))
        folder.publish_best()

    def _step(self) -> None:
        state = self.state
        slots = state.team.slots()
        if state.talk:
            self._take_turn(state.talk)
        elif state.turns and state.turns[-1].reason == "budget":
            self._end("budget", "the next call could not be paid")
        elif state.decisions and state.decisions[-1]["action"] == "stop":
            self._end("supervisor", state.decisions[-1]["diagnosis"])
        elif not state.ledger.evaluation_allowed():
            self._end("evaluations", "the evaluations or GPU seconds are used up")
        elif state.slot < len(slots):
            self._open_role_turn(*slots[state.slot])
        else:
            self._decide()

    def _talk(self, role: str, stage: int) -> Talk:
        known, snapshot = self.state.stage_snapshot
        snapshot = snapshot if known == stage >= 0 else self.state.seq
        return Talk(f"turn{len(self.state.turns) + 1:04d}", role, self.state.team.id, stage, snapshot)

    def _agent_of(self, role: str) -> str:
        """Name of the command line that sits in this role, "" for the tool loop: it sits where candidates are written."""
        agent = self.state.config.get("agent")
        return agent["name"] if agent and role != SUPERVISOR and self.state.team.role(role).writes else ""

    def _open_role_turn(self, stage: int, role: Role) -> None:
        talk, team = self._talk(role.name, stage), self.state.team
        limits, agent = self._limits(role), self._agent_of(role.name)
        message = _prompt("session" if agent else "turn").substitute(
            round=self.state.round, team=team.id, sections=view(self.folder, talk), calls=limits.calls,
            evaluations=limits.evaluations, tokens=f"{limits.tokens:,.0f}",
        )  # fmt: skip
        system = _prompt("role").substitute(
            role=role.name, title=self.task.title, definition=self.task.definition.strip(), mandate=role.mandate,
            team=_describe(team), techniques=", ".join(self.task.techniques),
            acting=SESSION if agent else TOOL_LOOP,
        )  # fmt: skip
        open_turn(self.folder, talk, system, message, agent)

    def _limits(self, role: Role) -> TurnLimits:
        limits = self.state.team.limits
        calls = math.inf if self._agent_of(role.name) else limits.calls
        return TurnLimits(calls, self.state.team.turn_tokens(role.name), limits.evaluations * role.writes)

    def _take_turn(self, talk: Talk) -> None:
        state = self.state
        if talk.role == SUPERVISOR:
            tools = supervisor.SupervisorTools(self.folder, talk, read_signals(state))
            take_turn(self.folder, self.model, tools, supervisor.LIMITS, state.config["effort"])
        else:
            role = state.team.role(talk.role)
            limits, effort = self._limits(role), role.effort or state.config["effort"]
            session = bool(self._agent_of(role.name))
            tools = RoleTools(self.folder, talk, state.team, self.judge, self.task, session)
            if session:
                steps = self.sessions.steps(self.folder, talk, limits, effort)
                take_session(self.folder, steps, tools, limits)
            else:
                take_turn(self.folder, self.model, tools, limits, effort)
        turn = state.turns[-1]
        best = f"best {state.best_score:.3f} ({state.best.id})" if state.best else "nothing valid yet"
        self.say(
            f"{turn.id} {turn.role}: {turn.reason}, {turn.attempts} attempts, {turn.tokens:,.0f} tokens; {best}; "
            f"{state.ledger.total.tokens:,.0f} tokens used"
        )

    def _decide(self) -> None:
        """The end of a round: go on, or, where the arm may be revised and work has stalled, ask the supervisor."""
        state = self.state
        turn = state.turns[-1]
        if turn.role == SUPERVISOR and turn.round == state.round:
            self._conclude(turn.result or _gave_up(turn.reason))
            return
        signals = read_signals(state)
        if state.config["arm"] != "evolving" or not signals.stalled:
            self._append_decision("rule", {"action": "continue", "diagnosis": "", "evidence": []}, signals)
            return
        talk = self._talk(SUPERVISOR, -1)
        open_turn(self.folder, talk, supervisor.system_prompt(self.task), supervisor.brief(self.folder, talk, signals))

    def _conclude(self, decision: dict) -> None:
        self._append_decision(SUPERVISOR, decision, read_signals(self.state))
        self.say(f"supervisor: {decision['action']}: {decision['diagnosis']}")

    def _append_decision(self, by: str, decision: dict, signals: Any) -> None:
        state = self.state
        rules = [asdict(rule) for rule in signals.rules]
        if "team" in decision:
            self._store_team(Team.model_validate(decision["team"]), decision["diagnosis"])
        tokens = state.ledger.total.tokens
        self.folder.append(
            "decision", round=state.round, by=by, rules=rules, phase=signals.phase, tokens=tokens, **decision
        )

    def _store_team(self, team: Team, diagnosis: str) -> None:
        record = {"diagnosis": diagnosis} | team.model_dump(mode="json")
        self.folder.store_file(f"teams/{team.id}.json", json.dumps(record, indent=1) + "\n")

    def _end(self, reason: str, text: str) -> None:
        best = self.state.best
        self.folder.append("end", reason=reason, text=text, best=best.id if best else "", score=self.state.best_score)


def _gave_up(reason: str) -> dict:
    diagnosis = f"the supervisor's turn gave no valid decision ({reason}); the present team goes on"
    return {"action": "continue", "diagnosis": diagnosis, "evidence": [], "fallback": True}


def _prompt(name: str) -> Template:
    return Template((PROMPTS / f"{name}.md").read_text("utf-8"))


def _describe(team: Team) -> str:
    lines = [f"- {role.name}: {role.mandate.splitlines()[0]}" for role in team.roles]
    order = ", then ".join(" and ".join(stage) for stage in team.order)
    return "\n".join(lines) + f"\n\nOrder of a round: {order}."
