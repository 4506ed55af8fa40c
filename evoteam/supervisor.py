"""The supervisor: reads the signals, asks a model for a diagnosis, and takes nothing from it but a typed decision."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from evoteam.agent import PROMPTS, TurnLimits
from evoteam.memory import SharedFolder
from evoteam.signals import Signals
from evoteam.state import Call, State, Talk
from evoteam.team import Team, TeamError, parse_team
from evoteam.tools import TEXTS, Arguments, Read, Refused, Result, Toolbox, schema_of
from evoteam.views import view

SEATS = (
    " Roles that write candidates are sessions of the coding agent {}: they have a shell and an editor of their own, no "
    "limit of calls, and begin with some 10,000 tokens of instructions; the others work by tool calls."
)
LIMITS = TurnLimits(calls=6, tokens=float("inf"), refusals=3)


class Decide(Arguments):
    action: Literal["continue", "revise", "stop"]
    diagnosis: Annotated[str, Field(min_length=1, max_length=4_000)]
    evidence: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=30)] = []
    team: Any = None


class SupervisorTools(Toolbox):
    """What the supervisor may do: read, and decide. Every other call is refused."""

    def __init__(self, folder: SharedFolder, talk: Talk, signals: Signals):
        super().__init__(folder, talk)
        self.signals = signals
        self.tools = {"read": (Read, self.read), "decide": (Decide, self.decide)}

    def specs(self) -> list[dict]:
        specs = super().specs()
        team = schema_of(Team, TEXTS["decide"]["team"])
        team["properties"] = {name: value for name, value in team["properties"].items() if name not in ("id", "parent")}
        team["properties"]["roles"]["items"]["required"].remove("mandate")
        specs[-1]["input_schema"]["properties"]["team"] = team | {"description": TEXTS["decide"]["arguments"]["team"]}
        return specs

    def decide(self, given: Decide, call: Call) -> Result:
        state = self.folder.state
        decision: dict[str, Any] = {"action": given.action, "diagnosis": given.diagnosis, "evidence": given.evidence}
        if given.action == "revise":
            decision["team"] = self._revised(given.team, state).model_dump(mode="json")
        elif given.team is not None:
            raise Refused(f"action {given.action!r} takes no team; use 'revise' to put a new team to work")
        if given.action == "stop" and not self.signals.may_stop:
            raise Refused(
                "stopping is not open: too few revisions have been tried since the last gain; continue or revise"
            )
        return Result("decided", ends="decided", value=decision)

    def _revised(self, record: Any, state: State) -> Team:
        name = f"t{len(state.tenures) + 1:04d}"
        if isinstance(record, str):
            try:
                record = json.loads(record)
            except (ValueError, RecursionError):
                raise Refused("team is a text that is not JSON; give an object") from None
        if not isinstance(record, dict):
            raise Refused(f"action 'revise' needs a team, an object; got {type(record).__name__}")
        try:
            team = parse_team(_with_mandates(record, state) | {"id": name, "parent": state.team.id})
        except TeamError as error:
            raise Refused(str(error)) from None
        if not state.team.diff(team):
            raise Refused("this team is the present one; change it, or decide to continue")
        return team


def _with_mandates(record: dict, state: State) -> dict:
    """A role without a mandate keeps the latest one of a role with its name."""
    known = {role.name: role.mandate for tenure in state.tenures for role in tenure.team.roles}
    roles = record.get("roles")
    if not isinstance(roles, list):
        return record
    return record | {"roles": [_with_mandate(role, known) for role in roles]}


def _with_mandate(role: Any, known: dict[str, str]) -> Any:
    name = role.get("name") if isinstance(role, dict) else None
    return {"mandate": known[name]} | role if isinstance(name, str) and name in known else role


def brief(folder: SharedFolder, talk: Talk, signals: Signals) -> str:
    """The supervisor's message: signals, the present team, and what the folder holds."""
    team = folder.state.team.model_dump(mode="json", exclude={"parent"}, exclude_none=True)
    present = json.dumps(team, ensure_ascii=False)
    stop = "open" if signals.may_stop else "not open now"
    agent = folder.state.config.get("agent")
    seats = SEATS.format(agent["name"]) if agent else ""
    parts = [
        f"## signals\n{signals.text()}",
        f"## present team\n```json\n{present}\n```\nThe action 'stop' is {stop}.{seats}",
        view(folder, talk),
    ]
    return "\n\n".join(parts)


def system_prompt(task: Any) -> str:
    return (
        (PROMPTS / "supervisor.md")
        .read_text("utf-8")
        .replace("$title", task.title)
        .replace("$techniques", ", ".join(task.techniques))
    )
