"""A live session: the command line is started, its calls are reserved and settled, its requests go to the run."""

import contextlib
import threading
import time
from collections.abc import Generator
from queue import Empty, SimpleQueue
from typing import Any

from evoteam.agent import BREAK, TurnLimits
from evoteam.budget import Usage
from evoteam.judging.verdict import head_and_tail
from evoteam.llm import ProviderError, call_key, tidy
from evoteam.memory import SharedFolder
from evoteam.sessions.agents import TABLE, Agent
from evoteam.sessions.door import Door, ModelCall, Outcome, Question
from evoteam.sessions.turn import Steps
from evoteam.sessions.workplace import Workplace, walls
from evoteam.state import Talk

QUESTIONS = 60  # requests to the run in one turn
ASKED_CHARACTERS = 1_000_000  # of all of them, as each is kept in the journal
WATCH_S = 1.0
POLL_S = 0.1
LEFT_S = 5.0  # for the outcome of a call whose session is gone
RECALLED = 1_500  # characters of an answer that an interrupted turn is reminded of


class LiveSessions:
    """Sessions of one agent's command line. `base_url`: another server for its model."""

    def __init__(self, agent: Agent, model: str, *, base_url: str | None = None, unsafe: bool = False):
        self.agent, self.model = agent, model
        self.server, self.key = agent.server(base_url)
        self.walls = walls(unsafe)
        agent.find()

    def steps(self, folder: SharedFolder, talk: Talk, limits: TurnLimits, effort: str) -> Steps:
        with Workplace(folder, talk) as place:
            api = TABLE["apis"][self.agent.api]
            with Door(place.socket, api, self.server, self.key, self.model) as door:
                threading.Thread(target=door.serve_forever, kwargs={"poll_interval": POLL_S}, daemon=True).start()
                try:
                    place.start(self.agent, self.walls, door.secret, self._values(folder, talk, place), effort)
                    yield from _Session(self.agent, folder, talk, limits, place, door).steps()
                finally:
                    place.end()
                    _dismiss(door.inbox)
                    door.shutdown()

    def _values(self, folder: SharedFolder, talk: Talk, place: Workplace) -> dict[str, str]:
        system, _, message = folder.text(f"turns/{talk.turn}.md").partition(BREAK)
        for name in ("workspace", "shared"):  # not in the stored prompt: it is the same wherever the run lies
            message = message.replace(f"<<{name}>>", str(getattr(place, name)))
        texts = {"system": system, "prompt": message + _history(talk)}
        return texts | {"model": self.model, "max_tokens": str(folder.state.config["max_tokens"])}


class _Session:
    def __init__(
        self, agent: Agent, folder: SharedFolder, talk: Talk, limits: TurnLimits, place: Workplace, door: Door
    ):  # fmt: skip
        self.agent, self.folder, self.talk, self.limits, self.place, self.door = (
            agent,
            folder,
            talk,
            limits,
            place,
            door,
        )
        self.deadline = time.monotonic() + agent.minutes * 60
        self.failed = self.excess = ""
        self.asked, self.characters = False, 0
        self.watched = time.monotonic()

    def steps(self) -> Steps:
        reason = ""
        while not reason:
            item = self._next(self.door.inbox)
            if item is None:
                ended = self.place.process.poll() is not None
                reason = self.excess or ("finished" if ended else "timeout")
            elif isinstance(item, Question):
                reason = yield from self._question(item)
            else:
                reason = yield from self._call(item)
        if not self.asked and reason in ("finished", "timeout") or reason == "finished" and self.failed:
            silent = f"the session ended ({reason}) without asking its model"
            what = f"its model's server failed: {self.failed}" if self.failed else silent
            raise ProviderError(f"{self.agent.name}: {what}; it printed: {self.place.last_words()}")
        yield "turn_end", {"reason": reason}

    def _next(self, queue: SimpleQueue, after: float = 0.0) -> Any:
        """The next item, None once the session is over and nothing came for `after` seconds more."""
        ended = None
        while True:
            with contextlib.suppress(Empty):
                return queue.get(timeout=POLL_S)
            now = time.monotonic()
            if self.place.process.poll() is not None:
                ended = ended or now
                if now - ended >= after:
                    return None
            if now > self.deadline:
                return None
            if now > self.watched + WATCH_S:
                self.watched, self.excess = now, self.place.excess()
                if self.excess:
                    return None

    def _question(self, question: Question) -> Generator[tuple[str, dict], Any, str]:
        """Have it answered; why the turn ends here, "" if it goes on."""
        number = sum(message["role"] == "assistant" for message in self.talk.messages) + 1
        key = f"{self.talk.turn}.q{number:02d}"
        (block,), faults = tidy([{"type": "tool_use", "name": question.name, "input": question.input}], key)
        started = time.monotonic()
        fields = {"key": key, "name": block["name"], "input": block["input"], "fault": "".join(faults.values())}
        told = yield "asked", fields
        self.deadline += time.monotonic() - started
        question.answer.put(told)
        self.characters += len(str(fields["input"]))
        return "calls" if number >= QUESTIONS or self.characters >= ASKED_CHARACTERS else ""

    def _call(self, call: ModelCall) -> Generator[tuple[str, dict], Any, str]:
        """Reserve, let it pass, settle; why the turn ends here, "" if it goes on."""
        state, key = self.folder.state, call_key(self.talk.turn, self.talk.calls + 1)
        wanted = min(call.wanted or state.config["max_tokens"], state.config["max_tokens"])
        spent = self.talk.tokens >= self.limits.tokens
        allowed = 0 if spent else state.ledger.output_allowed(call.prompt_tokens, wanted)
        if not allowed:
            call.grant.put(0)
            if spent:
                return "tokens"
            return "prompt" if self.asked else "budget"  # a prompt that grew too long ends its turn, not the run
        reserved = Usage(cache_write=call.prompt_tokens, output=allowed, estimated=True)
        yield "call", {"key": key, "reserved": reserved.record()}
        self.asked = True
        call.grant.put(allowed)
        outcome = self._next(call.outcome, LEFT_S) or Outcome(reserved, error="no outcome is known")
        self.failed = outcome.error
        if outcome.error:
            yield "provider", {"key": key, "error": outcome.error, "usage": outcome.usage.record()}
        else:
            yield "spent", {"key": key, "usage": outcome.usage.record(), "model": outcome.model}
        return ""


def _dismiss(inbox: SimpleQueue) -> None:
    """Nobody waits for an answer that will not come."""
    with contextlib.suppress(Empty):
        while True:
            item = inbox.get_nowait()
            if isinstance(item, Question):
                item.answer.put(("this turn is over", True))
            else:
                item.grant.put(0)


def _history(talk: Talk) -> str:
    """What an interrupted turn had asked already; its workspace is as it was left."""
    told = [block for message in talk.messages for block in message["content"]]
    if not told:
        return ""
    lines = [
        "",
        "## so far",
        "This turn was interrupted and its session lost; your folder is as you left it. You had asked:",
    ]
    for block in told:
        if block["type"] == "tool_use":
            lines.append(f"- {block['name']}: {block['input'].get('idea') or block['input'].get('text') or ''}"[:300])
        else:
            lines.append(head_and_tail(block["content"].encode("utf-8", "replace"), RECALLED))
    return "\n".join(lines) + "\n"
