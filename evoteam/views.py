"""What a role is shown of the shared folder: bounded digests in Markdown, as of the snapshot of its stage.

The full text stays on disk; `read` serves it within the same rights.
"""

import re
from collections import Counter
from collections.abc import Callable

from evoteam.digest import pairs, profile_lines
from evoteam.judging.verdict import head_and_tail
from evoteam.memory import SharedFolder
from evoteam.state import Attempt, Note, State, Talk
from evoteam.team import SUPERVISOR, shorten

CODE, MESSAGE, NOTE, IDEA = 16_000, 500, 1_200, 160  # characters
LATEST, TOP, FAILURES, NOTES, TEAMS = 10, 3, 4, 3, 8  # entries
LOOK = ("team_attempts", "failures", "profile", "techniques", "lineage", "notes:*")  # what the supervisor is shown


def visible(record: Attempt | Note, talk: Talk) -> bool:
    """Known to this turn: in the snapshot of its stage, or the role's own."""
    return bool(record.seq) and (record.seq <= talk.snapshot or record.role == talk.role)


def granted(state: State, talk: Talk) -> tuple[str, ...]:
    """Sections of the folder that this turn may see."""
    return LOOK if talk.role == SUPERVISOR else state.team.sharing[talk.role]


def best_known(state: State, talk: Talk) -> Attempt | None:
    """The best attempt that this turn may know of."""
    bests = (state.attempts[point["attempt"]] for point in reversed(state.curve))
    return next((attempt for attempt in bests if visible(attempt, talk)), None)


def may_read(path: str, state: State, talk: Talk) -> str:
    """Why this turn may not read the file, "" if it may."""
    sections = granted(state, talk)
    if found := re.fullmatch(r"attempts/(a\d{4,})/(?:kernel\.py|log\.txt)", path):
        attempt = state.attempts.get(found[1])
        if attempt is None or not visible(attempt, talk):
            return f"there is no attempt {found[1]} that you can see"
        shared = (
            attempt.role == talk.role
            or "team_attempts" in sections
            or ("failures" in sections and attempt.failure)
            or ("best_code" in sections and attempt is best_known(state, talk))
        )
        return "" if shared else f"{found[1]} is not shared with you; your sections are {', '.join(sections)}"
    if found := re.fullmatch(r"notes/([a-z][a-z0-9-]*)/(n\d{4,})\.md", path):
        note = state.notes.get(found[2])
        if note is None or note.role != found[1] or not visible(note, talk):
            return f"there is no note {path} that you can see"
        shared = found[1] == talk.role or {f"notes:{found[1]}", "notes:*"} & set(sections)
        return "" if shared else f"notes of {found[1]} are not shared with you; your sections are {', '.join(sections)}"
    return "readable are attempts/<id>/kernel.py, attempts/<id>/log.txt and notes/<role>/<id>.md, each by its full name"


def view(folder: SharedFolder, talk: Talk) -> str:
    """All sections that this turn is shown, one after the other."""
    state = folder.state
    attempts = [attempt for attempt in state.attempts.values() if visible(attempt, talk)]
    notes = [note for note in state.notes.values() if visible(note, talk)]
    parts: dict[str, Callable[[], str]] = {
        "best_code": lambda: _best_code(folder, best_known(state, talk)),
        "own_attempts": lambda: attempt_table([a for a in attempts if a.role == talk.role]),
        "team_attempts": lambda: attempt_table(attempts),
        "failures": lambda: failures(attempts),
        "profile": lambda: _profile(best_known(state, talk)),
        "techniques": lambda: technique_table(attempts),
        "lineage": lambda: lineage(state),
    }
    shown = []
    for section in granted(state, talk):
        role = section.removeprefix("notes:")
        text = parts[section]() if section in parts else _notes([n for n in notes if role in ("*", n.role)])
        shown.append(f"## {section}\n{text or '(nothing yet)'}")
    return "\n\n".join(shown)


def _best_code(folder: SharedFolder, best: Attempt | None) -> str:
    if best is None:
        return ""
    source = head_and_tail(folder.source(best.id).encode(), CODE)
    head = f"{best.id}, score {best.score:.3f}, by {best.role}: {shorten(best.idea, IDEA)}"
    return f"{head}\n```python\n{source.rstrip()}\n```"


def _profile(best: Attempt | None) -> str:
    return "\n".join([f"of the best, {best.id}:", *profile_lines(best.verdict)]) if best else ""


def attempt_table(attempts: list[Attempt]) -> str:
    """The latest attempts and the best ones, in order of time."""
    best = sorted((a for a in attempts if a.valid), key=lambda a: -a.score)[:TOP]
    chosen = {a.id: a for a in [*best, *attempts[-LATEST:]]}
    lines = [f"({len(attempts) - len(chosen)} older attempts are not listed)"] if len(attempts) > len(chosen) else []
    for attempt in sorted(chosen.values(), key=lambda a: a.id):
        origin = f" from {attempt.base}" if attempt.base else ""
        tags = f" [{', '.join(attempt.techniques)}]" if attempt.techniques else ""
        lines.append(f"- {attempt.id}{origin} by {attempt.role}: {attempt.outcome}{tags} {shorten(attempt.idea, IDEA)}")
    return "\n".join(lines)


def failures(attempts: list[Attempt]) -> str:
    """Counts by kind, and the latest failures with what the evaluator said."""
    failed = [attempt for attempt in attempts if attempt.failure]
    if not failed:
        return ""
    counts = Counter(attempt.failure for attempt in failed)
    lines = [", ".join(f"{count} {kind}" for kind, count in counts.most_common()) + f" of {len(attempts)} attempts"]
    for attempt in failed[-FAILURES:]:
        worst = f" worst: {pairs(attempt.verdict['worst'])};" if attempt.verdict["worst"] else ""
        message = head_and_tail(attempt.verdict["message"].encode(), MESSAGE)
        what = f"{attempt.failure} in {attempt.verdict['phase']};{worst} {shorten(attempt.idea, IDEA)}"
        lines.append(f"- {attempt.id} ({what})\n{_indent(message)}")
    return "\n".join(lines)


def technique_table(attempts: list[Attempt]) -> str:
    rows = []
    for tag in sorted({tag for attempt in attempts for tag in attempt.techniques}):
        having = [attempt for attempt in attempts if tag in attempt.techniques]
        valid = [attempt.score for attempt in having if attempt.valid]
        failed = Counter(attempt.failure for attempt in having if attempt.failure)
        best = f"best {max(valid):.3f}" if valid else "never valid"
        kinds = "".join(f"; {count} {kind}" for kind, count in failed.most_common())
        rows.append(f"- {tag}: {len(having)} attempts, {len(valid)} valid, {best}{kinds}; last in {having[-1].id}")
    return "\n".join(rows)


def _notes(notes: list[Note]) -> str:
    shown = []
    for note in notes[-NOTES:]:
        evidence = f" (evidence: {', '.join(note.evidence)})" if note.evidence else ""
        shown.append(f"**{note.id}** by {note.role}{evidence}:\n{head_and_tail(note.text.encode(), NOTE)}")
    return "\n\n".join(shown)


def lineage(state: State, teams: int | None = TEAMS, diagnosis: int = 400) -> str:
    """The latest `teams`, None for all: what caused each (so many characters of it), what it changed and achieved."""
    first = max(0, len(state.tenures) - teams) if teams else 0
    return "\n".join(_tenure(state, index, diagnosis) for index in range(first, len(state.tenures)))


def _tenure(state: State, index: int, diagnosis: int) -> str:
    tenure = state.tenures[index]
    after = state.tenures[index + 1] if index + 1 < len(state.tenures) else None
    team = tenure.team
    attempts = [attempt for attempt in state.judged if attempt.team == team.id]
    reached = after.score if after else state.best_score
    spent = (after.tokens if after else state.ledger.total.tokens) - tenure.tokens
    rounds = (after.round if after else state.round + 1) - tenure.round
    tried = f"{len(attempts)} attempts ({sum(a.valid for a in attempts)} valid)"
    work = f"{rounds} rounds, {spent:,.0f} tokens, {tried}"
    lines = [f"- {team.id}: {work}, best {tenure.score:.3f} -> {reached:.3f}"]
    if tenure.diagnosis:
        lines.append(f"  because: {shorten(tenure.diagnosis, diagnosis)}")
    if index:
        lines += [f"  {line}" for line in state.tenures[index - 1].team.diff(team)]
    return "\n".join(lines)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
