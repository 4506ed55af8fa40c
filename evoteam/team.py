"""A team as data: its roles, the order in which they work, and what each is shown of the shared folder."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SECTIONS = ("best_code", "own_attempts", "team_attempts", "failures", "profile", "techniques", "lineage")
WRITING_TOOLS = ("write_kernel", "edit_kernel")
TOOLS = (*WRITING_TOOLS, "read", "note")
ARMS = {"evolving": "founding_team", "single": "single_agent", "fixed-four": "fixed_four"}
NOTES = re.compile(r"notes:([a-z][a-z0-9-]*|\*)")
SUPERVISOR = "supervisor"
Effort = Literal["low", "medium", "high", "xhigh", "max"]


class TeamError(ValueError):
    """A team that cannot work. `problems` names every fault with its place."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("the team is not valid:\n" + "\n".join(f"- {problem}" for problem in problems))


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Role(_Record):
    """One member. `turns`: how often it works each time its stage comes; `share`: its part of the round's tokens."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
    mandate: Annotated[str, Field(min_length=1, max_length=6000)]
    tools: Annotated[tuple[Literal["write_kernel", "edit_kernel", "read", "note"], ...], Field(min_length=1)]
    share: Annotated[float, Field(gt=0, le=1)]
    turns: Annotated[int, Field(ge=1, le=4)] = 1
    effort: Effort | None = None

    @property
    def writes(self) -> bool:
        return any(tool in self.tools for tool in WRITING_TOOLS)


class Limits(_Record):
    """What one turn may use (model calls, evaluations), and the tokens of one round in the budget's unit."""

    calls: Annotated[int, Field(ge=1, le=100)] = 8
    evaluations: Annotated[int, Field(ge=0, le=50)] = 3
    round_tokens: Annotated[int, Field(ge=5_000, le=100_000_000)] = 100_000


class Team(_Record):
    """Roles, order of stages (roles of one stage see the same snapshot), and the sections each role is shown."""

    id: str = ""
    parent: str = ""
    rationale: Annotated[str, Field(max_length=4000)] = ""
    roles: Annotated[tuple[Role, ...], Field(min_length=1, max_length=8)]
    order: Annotated[tuple[tuple[str, ...], ...], Field(min_length=1, max_length=12)]
    sharing: dict[str, tuple[str, ...]]
    limits: Limits = Limits()

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    def slots(self) -> list[tuple[int, Role]]:
        """The turns of one round, in order, as (stage, role)."""
        named = [(stage, self.role(name)) for stage, names in enumerate(self.order) for name in names]
        return [(stage, role) for stage, role in named for _ in range(role.turns)]

    def turn_tokens(self, name: str) -> float:
        """Tokens of one turn of this role: its share of the round, split over the turns it takes there."""
        turns = sum(role.name == name for _, role in self.slots())
        return self.limits.round_tokens * self.role(name).share / turns

    def diff(self, other: "Team") -> list[str]:
        """What a revision from this team to `other` changes, one line each, for people."""
        old, new = {r.name: r for r in self.roles}, {r.name: r for r in other.roles}
        lines = [f"+ role {name}: {_first_line(new[name].mandate)}" for name in new if name not in old]
        lines += [f"- role {name}" for name in old if name not in new]
        for name in (name for name in new if name in old):
            for field in Role.model_fields:
                before, after = getattr(old[name], field), getattr(new[name], field)
                if before != after:
                    change = "rewritten" if field == "mandate" else f"{_show(before)} -> {_show(after)}"
                    lines.append(f"~ role {name}: {field} {change}")
        if self.order != other.order:
            lines.append(f"~ order {_show_order(self.order)} -> {_show_order(other.order)}")
        for name in (name for name in new if name in old):
            before, after = set(self.sharing[name]), set(other.sharing[name])
            if before != after:
                changes = [f"+{section}" for section in sorted(after - before)]
                lines.append(f"~ sharing {name}: " + " ".join(changes + [f"-{s}" for s in sorted(before - after)]))
        for field in Limits.model_fields:
            before, after = getattr(self.limits, field), getattr(other.limits, field)
            if before != after:
                lines.append(f"~ limit {field}: {before} -> {after}")
        return lines


def parse_team(record: Any, *, stored: bool = False) -> Team:
    """The team described by a JSON-like `record`; TeamError lists all its faults at once.

    stored: the record comes from a run folder, so fields of a newer version are passed over instead of refused.
    """
    try:
        team, problems = Team.model_validate(record, extra="ignore" if stored else "forbid"), []
        record = team.model_dump()
    except ValidationError as error:
        problems = problems_of(error)
    problems += _cross_faults(record)
    if problems:
        raise TeamError(problems)
    return team


def preset(arm: str) -> Team:
    """The team an arm starts with; mandates are the Markdown files in prompts/roles."""
    here = Path(__file__).parent
    record = json.loads((here / "teams" / f"{ARMS[arm]}.json").read_text("utf-8"))
    for role in record["roles"]:
        role["mandate"] = (here / "prompts" / "roles" / f"{role['name']}.md").read_text("utf-8").strip()
    return parse_team(record)


def founding_team() -> Team:
    return preset("evolving")


def single_agent() -> Team:
    return preset("single")


def fixed_four() -> Team:
    return preset("fixed-four")


def _cross_faults(record: Any) -> list[str]:
    """Faults between fields, found on the raw record so that they are reported together with faults of fields."""
    record = record if isinstance(record, dict) else {}
    roles = [role for role in _items(record.get("roles")) if isinstance(role, dict)]
    names = [role["name"] for role in roles if isinstance(role.get("name"), str)]
    twice = sorted({name for name in names if names.count(name) > 1})
    faults = [f"roles: the name {name!r} is used {names.count(name)} times" for name in twice]
    if SUPERVISOR in names:
        faults.append(f"roles: {SUPERVISOR!r} is not a role of the team; choose another name")
    tools = [tool for role in roles for tool in _items(role.get("tools")) if isinstance(tool, str)]
    if roles and not any(tool in WRITING_TOOLS for tool in tools):
        faults.append(f"roles: no role may write candidates; give one of them {' or '.join(WRITING_TOOLS)}")
    shares = [role.get("share") for role in roles]
    if shares and all(isinstance(share, (int, float)) for share in shares) and abs(sum(shares) - 1) > 0.01:
        faults.append(f"roles: the shares sum to {sum(shares):g}, wanted 1")
    working = set()
    for index, stage in enumerate(_items(record.get("order"))):
        if isinstance(stage, (list, tuple)) and not stage:
            faults.append(f"order[{index}]: the stage is empty; name at least one role")
        for place, name in enumerate(_items(stage)):
            working.add(name if isinstance(name, str) else None)
            if isinstance(name, str) and name not in names:
                faults.append(f"order[{index}][{place}]: no role is named {name!r}; the roles are {', '.join(names)}")
    idle = [name for name in names if name not in working]
    faults += [f"order: role {name!r} never works; put it in a stage or drop it" for name in idle]
    sharing = record.get("sharing") if isinstance(record.get("sharing"), dict) else {}
    blind = [name for name in names if name not in sharing]
    faults += [f"sharing: no entry for role {name!r}; list the sections it is shown" for name in blind]
    for name, sections in sharing.items():
        if name not in names:
            faults.append(f"sharing.{name}: no role has this name")
        for section in _items(sections):
            if isinstance(section, str) and section not in SECTIONS and not NOTES.fullmatch(section):
                known = ", ".join((*SECTIONS, "notes:<role>", "notes:*"))
                faults.append(f"sharing.{name}: unknown section {shorten(repr(section))}; wanted one of {known}")
    return faults


def _items(value: Any) -> list | tuple:
    return value if isinstance(value, (list, tuple)) else ()


def problems_of(error: ValidationError) -> list[str]:
    """The faults that pydantic found, each with its place and the value there."""
    return [f"{_path(e['loc'])}: {e['msg']} (got {shorten(repr(e['input']))})" for e in error.errors()]


def _path(location: tuple) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "team"


def shorten(text: str, size: int = 80) -> str:
    """The text on one line, cut to `size` characters."""
    text = " ".join(text.split())
    return text if len(text) <= size else text[: size - 3] + "..."


def _first_line(text: str) -> str:
    return shorten(text.strip().splitlines()[0])


def _show(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _show_order(order: tuple[tuple[str, ...], ...]) -> str:
    return " > ".join("+".join(stage) for stage in order)
