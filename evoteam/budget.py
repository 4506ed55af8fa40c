"""What a run may use, and what it has used.

The unit of "equal tokens" is the input-equivalent token: uncached input x 1, cache writes, cache reads and output
x their price divided by the price of input (prices.json). A model without a price gets the assumed ratios there.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

CHARS_PER_TOKEN = 3.5  # only for reservations and for models that report no usage
MIN_OUTPUT = 1_024  # an answer shorter than this cannot carry a useful call
KINDS = ("input", "cache_write", "cache_read", "output")


class BudgetError(ValueError):
    """The budget cannot be kept as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or more calls. `input` is the uncached part alone; `estimated`: counted from characters."""

    input: int = 0
    cache_write: int = 0
    cache_read: int = 0
    output: int = 0
    estimated: bool = False

    def __add__(self, other: "Usage") -> "Usage":
        counts = {kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS}
        return Usage(**counts, estimated=self.estimated or other.estimated)

    @property
    def prompt(self) -> int:
        return self.input + self.cache_write + self.cache_read

    def record(self) -> dict:
        return asdict(self)

    @classmethod
    def of(cls, record: dict) -> "Usage":
        return cls(**{name: record[name] for name in cls.__slots__ if name in record})


def tokens_of(text: str) -> int:
    """Estimated tokens of a text."""
    return round(len(text) / CHARS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Rates:
    """Prices of one model. Ratios are relative to uncached input; `dollars_in`: per million tokens, None if unknown."""

    cache_write: float
    cache_read: float
    output: float
    dollars_in: float | None = None
    long_above: int | None = None
    long_factor: float = 1.0

    @property
    def assumed(self) -> bool:
        return self.dollars_in is None

    def tokens(self, usage: Usage, *, cache_read: float | None = None) -> float:
        """Input-equivalent tokens. cache_read: another weight for cache reads, for the comparison at full weight."""
        reads = self.cache_read if cache_read is None else cache_read
        weighted = usage.input + usage.cache_write * self.cache_write + usage.cache_read * reads
        return weighted + usage.output * self.output

    def dollars(self, usage: Usage) -> float:
        """Dollars of one call (long prompts have a price of their own, so sums must be made of calls)."""
        if self.dollars_in is None:
            return 0.0
        factor = self.long_factor if self.long_above is not None and usage.prompt > self.long_above else 1.0
        return self.tokens(usage) * self.dollars_in * factor / 1e6

    def describe(self) -> str:
        ratios = (
            f"input x1, cache write x{self.cache_write:g}, cache read x{self.cache_read:g}, output x{self.output:g}"
        )
        return ratios + (" (assumed: no price is known for this model)" if self.assumed else "")


def rates(model: str) -> Rates:
    """The rates of a model by its name; a dated name falls back on the name without its date."""
    table = json.loads((Path(__file__).parent / "prices.json").read_text("utf-8"))
    row = table["models"].get(model) or table["models"].get(model.rpartition("-20")[0])
    if row is None:
        assumed = table["assumed"]
        return Rates(assumed["cache_write"], assumed["cache_read"], assumed["output"])
    ratios = (row[kind] / row["input"] for kind in KINDS[1:])
    long_prompt = row.get("long_prompt", {})
    return Rates(*ratios, row["input"], long_prompt.get("above"), long_prompt.get("factor", 1.0))


@dataclass(frozen=True, slots=True)
class Budget:
    """Ceilings of a run; None is no ceiling. `tokens` in input-equivalent tokens."""

    tokens: float | None = None
    dollars: float | None = None
    evaluations: int | None = None
    gpu_seconds: float | None = None

    def check(self, model: str, price: Rates) -> None:
        if self.tokens is None and self.dollars is None:
            raise BudgetError("a run needs a ceiling: give --budget-tokens N or --budget-dollars D")
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise BudgetError(f"the ceiling for {name} is {value!r:.40}; wanted a number above 0, and finite")
        if self.dollars is not None and price.assumed:
            raise BudgetError(
                f"no price is known for {model!r}: give --budget-tokens, or add a row to evoteam/prices.json"
            )


@dataclass(slots=True)
class Spend:
    """A sum of charges. `tokens` in the budget's unit, `full_cache_tokens` with cache reads at weight 1."""

    usage: Usage = Usage()
    tokens: float = 0.0
    full_cache_tokens: float = 0.0
    dollars: float = 0.0
    calls: int = 0
    evaluations: int = 0
    gpu_seconds: float = 0.0

    def charge(self, usage: Usage, price: Rates) -> None:
        self.usage += usage
        self.tokens += price.tokens(usage)
        self.full_cache_tokens += price.tokens(usage, cache_read=1.0)
        self.dollars += price.dollars(usage)
        self.calls += 1


@dataclass(slots=True)
class Ledger:
    """Charges of a run, in total and per role and team, and what the ceilings still allow."""

    budget: Budget
    price: Rates
    total: Spend = field(default_factory=Spend)
    by_role: dict[str, Spend] = field(default_factory=dict)
    by_team: dict[str, Spend] = field(default_factory=dict)
    estimated_calls: int = 0

    def accounts(self, role: str, team: str) -> tuple[Spend, Spend, Spend]:
        return self.total, self.by_role.setdefault(role, Spend()), self.by_team.setdefault(team, Spend())

    def charge(self, usage: Usage, role: str, team: str) -> None:
        self.estimated_calls += usage.estimated
        for account in self.accounts(role, team):
            account.charge(usage, self.price)

    def evaluated(self, role: str, team: str, gpu_seconds: float) -> None:
        for account in self.accounts(role, team):
            account.evaluations += 1
            account.gpu_seconds += gpu_seconds

    def output_allowed(self, prompt_tokens: int, wanted: int) -> int:
        """How many output tokens a call with this prompt may ask for, at most `wanted`; 0: it cannot be paid."""
        prompt = Usage(cache_write=prompt_tokens)
        allowed = float(wanted)
        if self.budget.tokens is not None:
            allowed = min(
                allowed, (self.budget.tokens - self.total.tokens - self.price.tokens(prompt)) / self.price.output
            )
        if self.budget.dollars is not None:
            left = self.budget.dollars - self.total.dollars - self.price.dollars(prompt)
            one = self.price.dollars(prompt + Usage(output=1)) - self.price.dollars(prompt)
            allowed = min(allowed, left / one)
        return int(allowed) if allowed >= min(MIN_OUTPUT, wanted) else 0

    def evaluation_allowed(self) -> bool:
        limit, gpu = self.budget.evaluations, self.budget.gpu_seconds
        return (limit is None or self.total.evaluations < limit) and (gpu is None or self.total.gpu_seconds < gpu)

    @property
    def ceiling_tokens(self) -> float:
        """The ceiling in input-equivalent tokens, from the dollars where only these are limited."""
        if self.budget.tokens is not None:
            return self.budget.tokens
        return self.budget.dollars / self.price.dollars_in * 1e6

    @property
    def share_left(self) -> float:
        """The part of the tightest ceiling that is left, 0 to 1."""
        parts = [1.0]
        for name in Budget.__slots__:
            if (limit := getattr(self.budget, name)) is not None:
                parts.append(1 - getattr(self.total, name) / limit)
        return max(0.0, min(parts))
