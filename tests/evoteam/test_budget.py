"""The unit of equal tokens, reservations, and prices."""

import json
from pathlib import Path

import pytest

from evoteam import budget
from evoteam.budget import MIN_OUTPUT, Budget, BudgetError, Ledger, Rates, Usage, rates

USAGE = Usage(input=100, cache_write=1_000, cache_read=10_000, output=500)


def test_the_unit_is_what_the_tokens_cost_in_input_tokens():
    sonnet = rates("claude-sonnet-5-5")
    assert sonnet.tokens(USAGE) == 100 + 1_000 * 1.25 + 10_000 * 0.05 + 500 * 5
    assert sonnet.tokens(USAGE, cache_read=1) == 100 + 1_250 + 10_000 + 2_500
    assert sonnet.dollars(USAGE) == pytest.approx(sonnet.tokens(USAGE) * 2 / 1e6)


def test_a_model_without_a_price_gets_the_assumed_ratios_and_says_so():
    mailbox = rates("mailbox")
    assert mailbox.tokens(USAGE) == 100 + 1_250 + 1_000 + 2_500 and mailbox.dollars(USAGE) == 0
    assert mailbox.describe().endswith("(assumed: no price is known for this model)")


def test_a_dated_name_has_the_price_of_its_model():
    assert rates("claude-haiku-4-5-20251001") == rates("claude-haiku-4-5") != rates("claude-haiku-5-5")


def test_a_long_prompt_has_its_own_price_and_sums_are_made_of_calls():
    haiku = rates("claude-haiku-5-5")
    short, long = Usage(input=60_000), Usage(input=120_000)
    assert haiku.dollars(long) == pytest.approx(5 * 2 * haiku.dollars(short))
    ledger = Ledger(Budget(tokens=1e9), haiku)
    for _ in range(2):
        ledger.charge(short, "r", "t")
    assert ledger.total.dollars == pytest.approx(2 * haiku.dollars(short))
    assert ledger.total.dollars < haiku.dollars(long)


def test_the_price_file_is_dated_and_every_row_is_whole():
    table = json.loads((Path(budget.__file__).parent / "prices.json").read_text())
    assert table["date"] and all(
        {"input", "cache_write", "cache_read", "output"} <= row.keys() for row in table["models"].values()
    )


def test_a_call_is_reserved_within_what_is_left():
    ledger = Ledger(Budget(tokens=20_000), Rates(1.25, 0.1, 5))
    assert ledger.output_allowed(1_000, 16_000) == (20_000 - 1_250) // 5
    assert ledger.output_allowed(1_000, 100) == 100
    ledger.charge(Usage(output=2_000), "r", "t")
    assert ledger.output_allowed(1_000, 16_000) == 1_750
    ledger.charge(Usage(input=4_000), "r", "t")
    assert (20_000 - 10_000 - 4_000 - 1_250) // 5 == 950 < MIN_OUTPUT
    assert ledger.output_allowed(1_000, 16_000) == 0


def test_dollars_are_reserved_too_long_prompts_included():
    haiku = rates("claude-haiku-5-5")
    ledger = Ledger(Budget(dollars=0.1), haiku)
    allowed = ledger.output_allowed(120_000, 1_000_000)
    whole = Usage(cache_write=120_000, output=allowed)
    assert haiku.dollars(whole) <= 0.1 < haiku.dollars(whole + Usage(output=2))
    assert ledger.ceiling_tokens == pytest.approx(1_000_000)


def test_evaluations_and_gpu_seconds_have_ceilings():
    ledger = Ledger(Budget(tokens=1e6, evaluations=2, gpu_seconds=10), Rates(1.25, 0.1, 5))
    ledger.evaluated("r", "t", 4.0)
    assert ledger.evaluation_allowed() and ledger.share_left == 0.5
    ledger.evaluated("r", "t", 7.0)
    assert not ledger.evaluation_allowed() and ledger.share_left == 0


def test_every_charge_is_booked_on_role_and_team():
    ledger = Ledger(Budget(tokens=1e6), Rates(1.25, 0.1, 5))
    ledger.charge(USAGE, "writer", "t0001")
    ledger.charge(USAGE, "supervisor", "t0001")
    assert ledger.total.tokens == ledger.by_team["t0001"].tokens == 2 * ledger.by_role["writer"].tokens
    assert ledger.total.usage == USAGE + USAGE and ledger.total.full_cache_tokens > ledger.total.tokens


@pytest.mark.parametrize(
    ("ceilings", "model", "message"),
    [
        (Budget(), "claude-sonnet-5-5", "a run needs a ceiling"),
        (Budget(tokens=0), "claude-sonnet-5-5", "the ceiling for tokens is 0; wanted a number above 0"),
        (Budget(tokens=float("nan")), "mailbox", "the ceiling for tokens is nan"),
        (Budget(dollars=1), "mailbox", "no price is known for 'mailbox': give --budget-tokens"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(ceilings, model, message):
    with pytest.raises(BudgetError, match=message):
        ceilings.check(model, rates(model))
