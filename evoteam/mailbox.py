"""Models and evaluators at another desk: a request is a file, the answer a file beside it.

Any person, program or coding agent can play a role: it reads one Markdown file and writes one. Requests and answers
stay in RUN/mailbox, so a resumed run finds the answers that came while it was down.
"""

import hashlib
import json
import os
import re
import string
import time
from collections.abc import Callable
from pathlib import Path

from evoteam.budget import KINDS, Usage
from evoteam.judging.files import read_regular
from evoteam.judging.verdict import Verdict, VerdictError
from evoteam.llm import Reply, Request, estimated_usage, tidy
from evoteam.memory import write_atomically

END = "<!-- end of answer -->"
POLL_S = 0.2
SETTLED_S = 5.0
ANSWER_BYTES = 16 << 20
FORMAT = Path(__file__).parent / "prompts" / "mailbox.md"


class MailboxModel:
    """`folder`: where requests go. `say` is told which file waits. Waits for as long as it takes."""

    name, repeatable, metered = "mailbox", True, True

    def __init__(self, folder: Path, say: Callable[[str], None] = print, poll_s: float = POLL_S):
        self.folder, self.say, self.poll_s = folder, say, poll_s

    def ask(self, request: Request) -> Reply:
        stem = f"{request.key}-{request.role}"
        question, answer = self.folder / f"{stem}.request.md", self.folder / f"{stem}.answer.md"
        self.folder.mkdir(exist_ok=True)
        if not question.exists():
            write_atomically(question, render(request, answer.name))
        if _lacks(answer):
            self.say(f"waiting for {answer} (the request is {question})")
        watch = _Watch(answer)
        while lacking := _lacks(answer):
            if watch.settled():
                self.say(f"{answer} {lacking}; still waiting")
            time.sleep(self.poll_s)
        return read_answer(answer.read_text("utf-8", "replace"), request)


def waiting(folder: Path) -> list[Path]:
    """Requests in a mailbox that have no finished answer yet."""
    return [path for path in sorted(folder.glob("*.request.md")) if _lacks(_answer_of(path))]


class _Watch:
    """Tells once of every version of a file that it has come to rest: it may still be being written or copied."""

    def __init__(self, path: Path):
        self.path, self.version, self.since, self.told = path, None, 0.0, True

    def settled(self) -> bool:
        try:
            found = self.path.stat() if self.path.exists() else self.path.lstat()
            version = found.st_ino, found.st_size, found.st_mtime_ns
        except OSError:
            version = None
        if version != self.version:
            self.version, self.since, self.told = version, time.monotonic(), version is None
        if self.told or time.monotonic() - self.since < SETTLED_S:
            return False
        self.told = True
        return True


def _answer_of(question: Path) -> Path:
    return question.with_name(question.name.replace(".request.md", ".answer.md"))


def _lacks(answer: Path) -> str:
    """What keeps a file from being an answer, "" when it is one."""
    try:
        text = read_regular(answer, ANSWER_BYTES + 1)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(text) > ANSWER_BYTES:
        return f"has more than {ANSWER_BYTES >> 20} MiB, which is no answer"
    return "" if text.rstrip().endswith(END.encode()) else f"has no line {END} at its end, the sign that it is finished"


def render(request: Request, answer: str) -> str:
    """The request as one Markdown document that needs nothing beside it."""
    tools = "\n\n".join(_render_tool(tool) for tool in request.tools)
    talk = "\n\n".join(
        f"## {_speaker(message)}\n\n{_render_content(message['content'])}" for message in request.messages
    )
    page = string.Template(FORMAT.read_text("utf-8"))
    return page.substitute(
        role=request.role, key=request.key, answer=answer, end=END, max_tokens=request.max_tokens,
        system=request.system, conversation=talk, tools=tools,
    )  # fmt: skip


def _render_tool(tool: dict) -> str:
    schema = json.dumps(tool["input_schema"], separators=(", ", ": "))
    return f"### {tool['name']}\n\n{tool['description']}\n\nArguments (JSON Schema): `{schema}`"


def _speaker(message: dict) -> str:
    return "Your earlier answer" if message["role"] == "assistant" else "Message to you"


def _render_content(content: str | list[dict]) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(_render_block(block) for block in content)


def _render_block(block: dict) -> str:
    if block["type"] == "tool_use":
        return _render_use(block["name"], block["input"])
    if block["type"] == "tool_result":
        return ("The tool refused:\n\n" if block.get("is_error") else "Result of the tool:\n\n") + str(block["content"])
    return str(block.get("text", ""))


def _render_use(name: str, arguments: dict) -> str:
    """A tool call in the answer format: short arguments as JSON, texts of several lines in blocks of their own."""
    short: dict = {}
    long: list[tuple[str, str]] = []
    for key, value in arguments.items():
        if isinstance(value, str) and "\n" in value:
            long.append((key, value))
        elif isinstance(value, list) and value and all(_is_texts(item) for item in value):
            long += [(f"{key}.{field}", text) for item in value for field, text in item.items()]
        else:
            short[key] = value
    parts = [f"### call {name}", f"```json\n{json.dumps(short)}\n```"]
    for key, text in long:
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
        parts.append(f"#### {key}\n{fence}\n{text.removesuffix(chr(10))}\n{fence}")
    return "\n\n".join(parts)


def _is_texts(item: object) -> bool:
    return isinstance(item, dict) and bool(item) and all(isinstance(text, str) for text in item.values())


def read_answer(text: str, request: Request) -> Reply:
    """An answer file as a reply: optional front matter, text, calls. A call that cannot be read becomes a fault of
    that call, which the role is told like any other malformed tool input."""
    body = text.rstrip().removesuffix(END).strip()
    facts, body = _front_matter(body)
    said, calls = _parse(body)
    content, faults = tidy([{"type": "text", "text": said}, *calls], request.key)
    stop = "tool_use" if calls else "end_turn"
    return Reply(
        content, stop, _stated_usage(facts) or estimated_usage(request, body), facts.get("model") or "unstated", faults
    )


def _front_matter(body: str) -> tuple[dict[str, str], str]:
    found = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", body, flags=re.DOTALL)
    if not found:
        return {}, body
    pairs = (line.partition(":") for line in found[1].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}, body[found.end() :]


def _stated_usage(facts: dict[str, str]) -> Usage | None:
    counts = [facts.get(f"{kind}_tokens", "0") for kind in KINDS]
    if not {"input_tokens", "output_tokens"} <= facts.keys() or not all(count.isdecimal() for count in counts):
        return None
    return Usage(*map(int, counts))


def _parse(body: str) -> tuple[str, list[dict]]:
    """Text before the first call, and the calls as tool-use blocks."""
    said: list[str] = []
    calls: list[dict] = []
    argument, fence, block = "", "", []
    for line in body.replace("\r\n", "\n").split("\n"):
        if fence:
            if re.fullmatch(rf" {{0,3}}{fence}`*[ \t]*", line):
                _take_block(calls, said, argument, "\n".join(block))
                argument, fence = "", ""
            else:
                block.append(line)
        elif found := re.match(r" {0,3}(`{3,})", line):
            fence, block = found[1], []
        elif found := re.match(r"###[ \t]+call[ \t]+`?([\w-]+)", line):
            calls.append({"type": "tool_use", "name": found[1], "input": {}})
        elif calls and (found := re.match(r"####[ \t]+`?([\w.]+)", line)):
            argument = found[1]
        elif not calls:
            said.append(line)
    if fence and calls:
        calls[-1]["fault"] = f"the block opened with {fence} is never closed; close it with the same fence"
    return "\n".join(said).strip(), calls


def _take_block(calls: list[dict], said: list[str], argument: str, text: str) -> None:
    if not calls:
        said.append(text)
    elif argument:
        _put(calls[-1]["input"], argument, text + "\n")
    else:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            calls[-1]["fault"] = f"the block after the heading is not valid JSON: {error}"
            return
        if isinstance(given, dict):
            calls[-1]["input"] |= given
        else:
            calls[-1]["fault"] = f"the arguments are {type(given).__name__}, wanted a JSON object"


def _put(arguments: dict, name: str, text: str) -> None:
    """Set an argument; `edits.search` is a field of the next object in the list `edits`."""
    outer, _, field = name.partition(".")
    if not field:
        arguments[outer] = text
        return
    items = arguments.setdefault(outer, [])
    if not isinstance(items, list):
        arguments[outer] = items = []
    if not items or not isinstance(items[-1], dict) or field in items[-1]:
        items.append({})
    items[-1][field] = text


class MailboxJudge:
    """Verdicts made on another machine by `python -m evoteam evaluate ATTEMPT_FOLDER --task T` and copied back.

    The attempt folder is the mail: kernel.py goes out, verdict.json comes back. A verdict of another source, task
    or evaluator is set aside and waited for again.
    """

    def __init__(self, task: str, hashes: dict[str, str], say: Callable[[str], None] = print, poll_s: float = POLL_S):
        self.task, self.hashes, self.say, self.poll_s = task, hashes, say, poll_s

    def evaluate(self, source: Path, attempt_dir: Path, *, best: float) -> Verdict:
        path = attempt_dir / "verdict.json"
        expected = self.hashes | {"task": self.task, "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
        if not os.path.lexists(path):
            self.say(
                f"waiting for {path}; make it with: python -m evoteam evaluate {attempt_dir} --task {self.task} --full"
            )
        watch = _Watch(path)
        while True:
            if os.path.lexists(path) and (verdict := self._accept(path, expected, best, watch)):
                return verdict
            time.sleep(self.poll_s)

    def _accept(self, path: Path, expected: dict[str, str], best: float, watch: _Watch) -> Verdict | None:
        try:
            verdict = Verdict.from_json(read_regular(path, ANSWER_BYTES).decode())
            wrong = [name for name, value in expected.items() if getattr(verdict, name) != value]
            reason = ", ".join(f"{name} is {getattr(verdict, name)}, wanted {expected[name]}" for name in wrong)
            if verdict.score > best and verdict.full_score is None:
                reason = reason or "it is above the best and does not cover all workloads; evaluate with --full"
        except (VerdictError, UnicodeDecodeError, OSError) as error:
            if not watch.settled():
                return None
            reason = error.strerror if isinstance(error, OSError) else str(error)
        if not reason:
            return verdict
        refused = path.with_name(f"verdict.refused-{len(list(path.parent.glob('verdict.refused-*'))) + 1}.json")
        os.replace(path, refused)
        self.say(f"refused {path}: {reason}; it is kept as {refused.name}, still waiting")
        return None
