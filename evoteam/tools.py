"""The tools of a role, and the one door by which candidates and notes enter the shared folder.

A tool call is answered whatever its arguments are: what cannot be done is `Refused`, and the role is told why.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evoteam.digest import verdict_digest
from evoteam.judging.evaluator import EvaluationError
from evoteam.judging.verdict import Verdict, head_and_tail
from evoteam.memory import FolderError, SharedFolder, sha256
from evoteam.source import EditError, apply_edit, confirmed, program_sha256
from evoteam.state import Attempt, Call, Talk
from evoteam.team import Team, problems_of
from evoteam.views import may_read, visible

PAGE = 12_000  # characters of one read
MESSAGE = 1_200  # characters of an evaluator's message kept in the journal
HASHES = ("task", "source_sha256", "task_sha256", "evaluator_sha256")
KEPT = ("phase", "failure", "score", "full_score", "worst", "confinement", "device", "seconds", "gpu_seconds")
ROW = ("index", "workload", "batch", "tokens", "ratio", "ours_us", "baseline_us", "spread", "status")
BOUNDS = ("Length", "Items", "Minimum", "Maximum", "minimum", "maximum")
TEXTS = json.loads((Path(__file__).parent / "prompts" / "tools.json").read_text("utf-8"))


class Refused(Exception):
    """What a tool call asked for cannot be done; the message goes to the role."""


class Judge(Protocol):
    """Evaluates a source file, over all workloads if its score is above `best`.

    EvaluationError: evaluating does not work here, and nothing is said about the candidate.
    """

    def evaluate(self, source: Path, attempt_dir: Path, *, best: float) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool answers. `ends`: the reason why the turn is over now; `value`: what the turn leaves behind."""

    text: str
    ends: str = ""
    value: dict | None = None


class Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


_Idea = Annotated[str, Field(min_length=1, max_length=600)]
_Techniques = Annotated[list[Annotated[str, Field(max_length=60)]], Field(max_length=12)]
_Source = Annotated[str, Field(min_length=1, max_length=200_000)]


class WriteKernel(Arguments):
    source: _Source
    idea: _Idea
    techniques: _Techniques = []


class Evaluate(WriteKernel):
    base: str = ""


class Edit(Arguments):
    search: Annotated[str, Field(min_length=1, max_length=20_000)]
    replace: Annotated[str, Field(max_length=100_000)]


class EditKernel(Arguments):
    base: str
    edits: Annotated[list[Edit], Field(min_length=1, max_length=30)]
    idea: _Idea
    techniques: _Techniques = []


class Read(Arguments):
    path: Annotated[str, Field(max_length=300)]
    offset: Annotated[int, Field(ge=0, le=100_000_000)] = 0


class WriteNote(Arguments):
    text: Annotated[str, Field(min_length=1, max_length=6_000)]
    evidence: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=30)] = []


class Finish(Arguments):
    summary: Annotated[str, Field(max_length=2_000)] = ""


class Toolbox:
    """The tools of one turn: name -> (arguments, handler). `run` answers any call with a Result or raises Refused."""

    def __init__(self, folder: SharedFolder, talk: Talk):
        self.folder, self.talk = folder, talk
        self.tools: dict[str, tuple[type[Arguments], Callable[[Any, Call], Result]]] = {}

    def specs(self) -> list[dict]:
        return [
            {
                "name": name,
                "description": TEXTS[name]["description"],
                "input_schema": schema_of(arguments, TEXTS[name]["arguments"]),
            }
            for name, (arguments, _) in self.tools.items()
        ]

    def run(self, call: Call) -> Result:
        if call.name not in self.tools:
            raise Refused(f"there is no tool {call.name[:80]!r} here; the tools are {', '.join(self.tools)}")
        if call.fault:
            raise Refused(f"{call.fault}; nothing was done, call {call.name} again")
        arguments, handler = self.tools[call.name]
        try:
            given = arguments.model_validate(call.input)
        except ValidationError as error:
            raise Refused("the arguments do not fit:\n" + "\n".join(f"- {p}" for p in problems_of(error))) from None
        return handler(given, call)

    def read(self, given: Read, call: Call) -> Result:
        refusal = may_read(given.path, self.folder.state, self.talk)
        if refusal:
            raise Refused(refusal)
        try:
            text = self.folder.text(given.path)
        except (FolderError, OSError, ValueError) as error:
            raise Refused(str(error)) from None
        part = text[given.offset : given.offset + PAGE]
        end = given.offset + len(part)
        more = f"\n[{len(text) - end} characters follow; read on with offset {end}]" if end < len(text) else ""
        return Result(part + more)


class RoleTools(Toolbox):
    """What a role of the team may do: the tools it was given, and ending its turn.

    session: the role is a coding agent's command line, which edits by itself and hands in whole files.
    """

    def __init__(self, folder: SharedFolder, talk: Talk, team: Team, judge: Judge, task: Any, session: bool = False):
        super().__init__(folder, talk)
        self.judge, self.task, self.team = judge, task, team
        known = {
            "write_kernel": (WriteKernel, self.write_kernel),
            "edit_kernel": (EditKernel, self.edit_kernel),
            "read": (Read, self.read),
            "note": (WriteNote, self.note),
        }
        role = team.role(talk.role)
        if session:
            known |= {"evaluate": (Evaluate, self.evaluate)}
            given = [*(name for name in ("read", "note") if name in role.tools), *(["evaluate"] if role.writes else [])]
        else:
            known |= {"finish": (Finish, self.finish)}
            given = [*role.tools, "finish"]
        self.tools = {name: known[name] for name in given}

    def write_kernel(self, given: WriteKernel, call: Call) -> Result:
        return self._attempt(call, given.source, given.idea, given.techniques, "")

    def evaluate(self, given: Evaluate, call: Call) -> Result:
        base = self._base(given.base).id if given.base else ""
        return self._attempt(call, given.source, given.idea, given.techniques, base)

    def edit_kernel(self, given: EditKernel, call: Call) -> Result:
        base = self._base(given.base)
        if refusal := may_read(f"attempts/{base.id}/kernel.py", self.folder.state, self.talk):
            raise Refused(refusal)
        source = self.folder.source(base.id)
        for number, edit in enumerate(given.edits, 1):
            try:
                source = apply_edit(source, edit.search, edit.replace)
            except EditError as error:
                raise Refused(f"edit {number}: {error}") from None
        return self._attempt(call, source, given.idea, given.techniques, base.id)

    def _base(self, name: str) -> Attempt:
        base = self.folder.state.attempts.get(name)
        if base is None or not visible(base, self.talk):
            raise Refused(f"there is no attempt {name[:40]!r} that you can see; give an id such as a0003")
        return base

    def note(self, given: WriteNote, call: Call) -> Result:
        state = self.folder.state
        known = _begun(state.notes, call)
        unknown = [attempt for attempt in given.evidence if attempt not in state.attempts]
        if unknown:
            raise Refused(f"evidence must be ids of attempts, such as a0003; unknown: {', '.join(unknown)}")
        name = known.id if known else f"n{len(state.notes) + 1:04d}"
        if not known:
            self.folder.store_file(f"notes/{self.talk.role}/{name}.md", given.text + "\n")
            who = {"role": self.talk.role, "team": self.talk.team}
            self.folder.append("note", id=name, call=call.key, **who, text=given.text, evidence=given.evidence)
        return Result(f"noted as {name}")

    def finish(self, given: Finish, call: Call) -> Result:
        return Result("turn ended", ends="finished")

    def _attempt(self, call: Call, source: str, idea: str, techniques: list[str], base: str) -> Result:
        """Store, evaluate and describe a candidate; a call that was interrupted goes on where it stood."""
        state = self.folder.state
        attempt = _begun(state.attempts, call) or self._enter(call, source, idea, techniques, base)
        if not attempt.seq:
            self._judge(attempt)
        if state.best is attempt:
            self.folder.publish_best()
        before = [point["score"] for point in state.curve if point["attempt"] != attempt.id]
        return Result(verdict_digest(attempt.id, attempt.verdict, before[-1] if before else 0.0))

    def _enter(self, call: Call, source: str, idea: str, techniques: list[str], base: str) -> Attempt:
        state, limits = self.folder.state, self.team.limits
        if self.talk.evaluations >= limits.evaluations:
            raise Refused(f"all {limits.evaluations} evaluations of this turn are used; leave a note or finish")
        if not state.ledger.evaluation_allowed():
            raise Refused("the run's evaluations are used up; leave a note or finish")
        program = program_sha256(source)
        if known := state.programs.get(program):
            if not state.repeats or state.repeats[-1]["call"] != call.key:
                self.folder.append("repeat", call=call.key, role=self.talk.role, team=self.talk.team, attempt=known)
            outcome = state.attempts[known].outcome
            raise Refused(f"this is the same program as {known} ({outcome}); it was not evaluated again")
        name = f"a{len(state.attempts) + 1:04d}"
        self.folder.store(f"attempts/{name}", {"kernel.py": source})
        seen, unconfirmed = confirmed(techniques, self.task.techniques, source)
        self.folder.append(
            "attempt", id=name, call=call.key, role=self.talk.role, team=self.talk.team, idea=idea, base=base,
            source_sha256=sha256(source), program_sha256=program, techniques=seen, unconfirmed=unconfirmed,
        )  # fmt: skip
        return state.attempts[name]

    def _judge(self, attempt: Attempt) -> None:
        folder = self.folder.path / "attempts" / attempt.id
        self.folder.source(attempt.id)
        verdict = self.judge.evaluate(folder / "kernel.py", folder, best=self.folder.state.best_score)
        if verdict.failure == "evaluator":
            raise EvaluationError(f"the evaluator failed on {attempt.id}: {verdict.message}")
        if verdict.source_sha256 != attempt.source_sha256:
            raise EvaluationError(f"the verdict of {attempt.id} is of another source ({verdict.source_sha256[:12]}...)")
        record = verdict.to_json()
        self.folder.store_file(f"attempts/{attempt.id}/verdict.json", json.dumps(record, indent=1) + "\n")
        brief = {name: record[name] for name in (*HASHES, *KEPT)}
        shown = [row for row in record["rows"] if row["index"] in self.task.feedback]  # authors see no others
        brief["rows"] = [{name: row[name] for name in ROW if name in row} for row in shown]
        brief["message"] = head_and_tail(verdict.message.encode("utf-8", "replace"), MESSAGE)
        self.folder.append("verdict", attempt=attempt.id, verdict=brief)


def _begun(records: dict[str, Any], call: Call) -> Any:
    """What this call entered before it was interrupted: only the latest record can be it."""
    latest = next(reversed(records.values()), None)
    return latest if latest and latest.call == call.key else None


def schema_of(arguments: type[BaseModel], texts: dict[str, str]) -> dict:
    """JSON Schema of a tool's arguments with the descriptions of prompts/tools.json, references put in place.

    Bounds are left out to save tokens: a value beyond them is refused with the bound.
    """
    schema = arguments.model_json_schema()
    definitions = schema.pop("$defs", {})

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return plain(definitions[node["$ref"].rpartition("/")[2]])
        if "properties" in node:
            node = node | {"properties": {name: plain(value) for name, value in node["properties"].items()}}
            return {key: value for key, value in node.items() if key not in ("title", "description")}
        return {key: plain(value) for key, value in node.items() if key != "title" and not key.endswith(BOUNDS)}

    schema = plain(schema)
    for name, text in texts.items():
        node = schema["properties"]
        *path, last = name.split(".")
        for part in path:
            node = (node[part].get("items") or node[part])["properties"]
        node[last] = node[last] | {"description": text}
    return schema
