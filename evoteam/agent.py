"""One turn: the model is asked, its tool calls are answered, until the turn is over. (A coding agent's command line has
turns of its own kind: sessions/turn.py.)

Where the turn stands is read from the journal before every step, so an interrupted turn goes on at the same place.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from evoteam.budget import Usage
from evoteam.llm import BudgetSpent, Model, ProviderError, Reply, Request, call_key
from evoteam.memory import SharedFolder, sha256
from evoteam.state import Talk
from evoteam.tools import Refused, Result, Toolbox

PROMPTS = Path(__file__).parent / "prompts"
BREAK = "\n\n<!-- message -->\n\n"
NUDGES = 2


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """What one turn may use. `refusals`: tool calls refused before the turn is given up, None for no such limit."""

    calls: float
    tokens: float
    evaluations: int = 0
    refusals: int | None = None


def open_turn(folder: SharedFolder, talk: Talk, system: str, message: str, agent: str = "") -> None:
    """Write down a turn and its prompt; `take_turn` carries it out, or a session of `agent`."""
    text = system + BREAK + message
    folder.store_file(f"turns/{talk.turn}.md", text)
    folder.append(
        "turn", turn=talk.turn, role=talk.role, team=talk.team, stage=talk.stage, snapshot=talk.snapshot,
        round=folder.state.round, prompt_sha256=sha256(text), **({"agent": agent} if agent else {}),
    )  # fmt: skip


def take_turn(folder: SharedFolder, model: Model, toolbox: Toolbox, limits: TurnLimits, effort: str) -> None:
    """Carry the open turn to its end. ProviderError and EvaluationError leave it open, to be resumed."""
    talk = toolbox.talk
    text = folder.text(f"turns/{talk.turn}.md")
    system, _, message = text.partition(BREAK)
    try:
        while not (reason := _over(talk, limits)):
            if talk.pending:
                answer(folder, toolbox, limits)
            elif talk.silent:
                folder.append("nudge", text=(PROMPTS / "nudge.md").read_text("utf-8").strip())
            else:
                _ask(folder, model, toolbox, system, message, effort)
    except BudgetSpent:
        reason = "budget"
    folder.append("turn_end", turn=talk.turn, role=talk.role, reason=reason, tokens=round(talk.tokens))


def _over(talk: Talk, limits: TurnLimits) -> str:
    """Why the turn ends here, "" if it goes on."""
    if talk.ends or talk.pending:
        return talk.ends
    if talk.silent and talk.nudges >= NUDGES:
        return "silent"
    if limits.refusals is not None and talk.refusals >= limits.refusals:
        return "refused"
    if talk.calls >= limits.calls:
        return "calls"
    return "tokens" if talk.tokens >= limits.tokens else ""


def answer(folder: SharedFolder, toolbox: Toolbox, limits: TurnLimits) -> tuple[str, bool]:
    """Answer the first call that waits; the text, and whether it was refused."""
    talk, call = toolbox.talk, toolbox.talk.pending[0]
    try:
        result, refused = toolbox.run(call), False
    except Refused as refusal:
        result, refused = Result(str(refusal)), True
    text = result.text + (f"\n\n{_left(folder, talk, limits)}" if len(talk.pending) == 1 else "")
    ending = ({"ends": result.ends} if result.ends else {}) | ({"result": result.value} if result.value else {})
    folder.append("tool", key=call.key, name=call.name, error=refused, text=text, **ending)
    return text, refused


def _left(folder: SharedFolder, talk: Talk, limits: TurnLimits) -> str:
    parts = [f"{limits.calls - talk.calls} calls"] if math.isfinite(limits.calls) else []
    if limits.evaluations:
        parts.append(f"{limits.evaluations - talk.evaluations} evaluations")
    if math.isfinite(limits.tokens):
        parts.append(f"about {max(0.0, limits.tokens - talk.tokens):,.0f} tokens")
    return f"[left in this turn: {', '.join(parts)}; left of the run: {folder.state.ledger.share_left:.0%}]"


def _ask(folder: SharedFolder, model: Model, toolbox: Toolbox, system: str, message: str, effort: str) -> None:
    """Reserve, send, settle. A call that cannot be reserved is not made."""
    state, talk = folder.state, toolbox.talk
    messages = [{"role": "user", "content": [{"type": "text", "text": message}]}, *talk.messages]
    key = call_key(talk.turn, talk.calls + 1)
    request = Request(key, talk.role, state.answers[talk.role], system, messages, toolbox.specs(), 0, effort)
    prompt = request.prompt_tokens
    allowed = state.config["max_tokens"]
    if model.metered:
        allowed = state.ledger.output_allowed(prompt, allowed)
    if not allowed:
        raise BudgetSpent
    folder.check_space()
    if state.open_call is None:
        reserved = Usage(cache_write=prompt, output=allowed, estimated=True)
        folder.append("call", key=key, reserved=reserved.record())
    request = Request(key, talk.role, request.number, system, messages, request.tools, allowed, effort, _seen(request))
    try:
        reply = model.ask(request)
    except ProviderError as error:
        folder.append("provider", key=key, error=str(error), usage=error.usage.record())
        raise
    faults = reply.faults | (_cut_call(reply, allowed) if model.metered else {})
    folder.append(
        "reply", key=key, content=reply.content, stop_reason=reply.stop_reason, usage=reply.usage.record(),
        model=reply.model, faults=faults, retries=reply.retries,
    )  # fmt: skip


def _seen(request: Request) -> int:
    """Tokens of the turn's previous prompt, which this one begins with; 0 on the first call."""
    answers = [index for index, message in enumerate(request.messages) if message["role"] == "assistant"]
    if not answers:
        return 0
    before = request.messages[: answers[-1]]
    return Request(request.key, request.role, 0, request.system, before, request.tools, 0, "").prompt_tokens


def _cut_call(reply: Reply, allowed: int) -> dict[str, str]:
    """The last call of an answer that hit the length limit cannot be trusted."""
    uses = [block["id"] for block in reply.content if block["type"] == "tool_use"]
    if reply.stop_reason != "max_tokens" or not uses:
        return {}
    return {
        uses[-1]: f"your answer was cut at {allowed} tokens, so this call may be incomplete; write less in one answer"
    }
