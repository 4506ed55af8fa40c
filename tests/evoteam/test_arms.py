"""Runs of the arms beside the paper's figures: recorded, measured again, live, and absent."""

import json
from pathlib import Path

import pytest
import torch

from evoteam.reporting import arms, claims, record
from evoteam.reporting.console import Terminal
from evoteam.reporting.expected import load
from evoteam.reporting.session import Session
from evoteam.summary import summarise
from kernels import measure, selection
from kernels.workloads import load_workloads
from tests.evoteam import responses_server
from tests.evoteam.messages_server import MessagesServer, serve
from tests.evoteam.sitting import MODEL, real, stand_in

ROOT = Path(__file__).parents[2]
EXPECTED = load(ROOT / "expected_results.json")


def session(*modes):
    chosen = tuple(claim for claim in EXPECTED.claims if claim.mode in modes)
    report = record.begin(["repro.py"], modes, 1) | {"device": {"name": "made-up GPU"}}
    return Session(
        chosen, selection.Kernel("mla_paged_decode", print, "f" * 64), load_workloads(), 1, Terminal(quiet=True), report
    )


def verdicts(made):
    return {c.id: claims.judge(c, made.evidence[c.id]) for c in made.of(arms.ARMS)}


@pytest.fixture
def ship(monkeypatch, run_folder):
    """Ships the given run folders instead of the real ones; replays of made-up journals are left out."""

    def shipped(*folders):
        monkeypatch.setattr(
            arms, "_recorded", lambda wanted, complain: [f for f in folders if summarise(f)["arm"] in wanted]
        )
        monkeypatch.setattr(
            "evoteam.replay.replay", lambda folder, target: type("Outcome", (), {"text": "5 of 5 decisions"})
        )

    return shipped


def on_gpu_task(folder, full_score=0.8):
    """The made-up run as if it had been made on the GPU task."""
    text = (folder / "events.jsonl").read_text().replace("mla-paged-decode-cpu", "mla-paged-decode")
    (folder / "events.jsonl").write_text(
        text.replace('"full_score": null', f'"full_score": {full_score}').replace("made-up CPU", "made-up GPU")
    )
    best = folder / "attempts" / summarise(folder)["best"]["id"]
    best.mkdir(parents=True)
    (best / "kernel.py").write_text(
        "def mla_paged_decode(q_nope, q_pe, ckv, kpe, kv_indptr, kv_indices, sm_scale): ...\n"
    )
    return folder


def test_without_a_run_nothing_is_judged(ship):
    ship()
    made = session("same-budget", "fixed-team")
    arms.judge(made)
    assert {j.verdict for j in verdicts(made).values()} == {"not-run"}
    assert "Codex" in verdicts(made)["fixed-team-codex"].reason and made.report["observations"] == []


def test_a_run_on_the_cpu_task_is_a_row_of_its_own(ship, run_folder):
    ship(run_folder("a", attempts=20), run_folder("b", attempts=20, arm="single"))
    made = session("same-budget")
    arms.judge(made)
    judged = verdicts(made)
    assert {j.verdict for j in judged.values()} == {"not-run"} and {j.measured for j in judged.values()} == {None}
    assert "its run on mla-paged-decode-cpu is a row of its own" in judged["same-budget-evolving"].reason
    rows = {row["title"]: row for row in made.report["observations"]}
    assert rows["Arm evolving on mla-paged-decode-cpu"]["verdict"] == "recorded"
    assert "5 of 5 decisions" in rows["Arm single on mla-paged-decode-cpu"]["note"]
    assert [run["arm"] for run in made.report["runs"]] == ["evolving", "single"]
    assert json.dumps(made.report["runs"]) and all(
        "rows" not in a for run in made.report["runs"] for a in run["attempts"]
    )


def test_a_recorded_run_on_the_gpu_task_is_shown_without_a_gpu(ship, run_folder):
    ship(on_gpu_task(run_folder("a", attempts=20)))
    made = session("same-budget")
    arms.judge(made)
    judged = verdicts(made)["same-budget-evolving"]
    assert (judged.verdict, judged.measured, judged.device) == ("recorded", 0.8, "made-up GPU")


@pytest.mark.parametrize("live", [False, True])
def test_a_best_that_was_not_evaluated_on_all_workloads_judges_nothing(ship, run_folder, monkeypatch, live):
    folder = on_gpu_task(run_folder("a", attempts=20), full_score="null")
    ship(folder)
    monkeypatch.setattr(arms, "_run_live", lambda *_: ([folder], ""))
    made = session("same-budget")
    arms.judge(made, arms.Live("m", 1, "mla-paged-decode", folder) if live else None)
    judged = verdicts(made)["same-budget-evolving"]
    assert judged.verdict == "not-run" and judged.reason.endswith("was not evaluated on all workloads")
    assert made.report["observations"][0]["value"].endswith("x on the agents' workloads")


def test_nothing_on_all_workloads_is_not_hidden_by_the_agents_score(ship, run_folder):
    ship(on_gpu_task(run_folder("a", attempts=20), full_score=0.0))
    made = session("same-budget")
    arms.judge(made)
    assert made.report["observations"][0]["value"] == "0.000x on all workloads"


def test_with_a_gpu_its_best_kernel_is_measured_again(ship, run_folder, monkeypatch, scope_record):
    ship(on_gpu_task(run_folder("a", attempts=20)))
    seen = []
    monkeypatch.setattr(
        measure,
        "measure_run",
        lambda kernel, workloads, **more: seen.append(kernel.__name__) or scope_record("run", 2.0),
    )
    made = session("same-budget")
    monkeypatch.setattr(Session, "gpu", lambda self: torch.device("cpu"))
    arms.judge(made)
    judged = verdicts(made)["same-budget-evolving"]
    assert seen == ["mla_paged_decode"] and judged.verdict == "reproduced" and judged.measured > 1.5
    assert verdicts(made)["same-budget-single"].verdict == "not-run"


def test_a_run_that_found_nothing_is_recorded_as_nothing(ship, run_folder):
    folder = run_folder("a", attempts=3, improves=False)
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(text.replace("mla-paged-decode-cpu", "mla-paged-decode"))
    ship(folder)
    made = session("same-budget")
    arms.judge(made)
    assert verdicts(made)["same-budget-evolving"].measured == 0.0
    assert made.report["observations"][0]["value"] == "nothing valid"


def test_shipped_runs_are_found_by_arm(tmp_path):
    for name, arm in (("x", "single"), ("y/z", "evolving"), ("w", "fixed-four")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(json.dumps({"arm": arm}))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    said = []
    found = arms._recorded(("single", "evolving"), said.append, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["x", "y/z"]
    assert len(said) == 1 and "bad/run.json does not name an arm: JSONDecodeError" in said[0]


def test_a_run_that_cannot_be_read_is_named_and_left_out(run_folder):
    good, bad = run_folder("good", attempts=2), run_folder("bad", attempts=2)
    (bad / "events.jsonl").unlink()
    said = []
    assert [folder for folder, _ in arms._summaries([bad, good], said.append)] == [good]
    assert len(said) == 1 and f"left out: {bad} cannot be read: FolderError: " in said[0]


KERNEL = """
import math
import torch


def mla_paged_decode(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    out = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -math.inf)
    ends = kv_indptr.tolist()
    for b in range(len(ends) - 1):
        rows = kv_indices[ends[b] : ends[b + 1]].long()
        if len(rows):
            keys, rope = ckv_cache[rows, 0].float(), kpe_cache[rows, 0].float()
            scores = (q_nope[b].float() @ keys.T + q_pe[b].float() @ rope.T) * sm_scale
            lse[b] = torch.logsumexp(scores, -1) / math.log(2)
            out[b] = (torch.softmax(scores, -1) @ keys).to(out.dtype)
    return out, lse
"""


def test_a_live_run_of_both_arms_from_a_script(repro, tmp_path):
    use = [{"type": "tool_use", "name": "write_kernel", "input": {"source": KERNEL, "idea": "plain", "techniques": []}}]
    end = [{"type": "tool_use", "name": "finish", "input": {}}]
    (tmp_path / "script.json").write_text(json.dumps({"engineer": [use, end], "writer": [use, end], "critic": [end]}))
    options = (
        "--live",
        "--model",
        "scripted:script.json",
        "--budget-tokens",
        "200000",
        "--task",
        "mla-paged-decode-cpu",
    )
    result = repro("--mode", "same-budget", *options, "--json", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert {run["arm"]: len(run["attempts"]) for run in report["runs"]} == {"evolving": 1, "single": 1}
    assert {row["verdict"] for row in report["observations"]} == {"measured"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert (
        'id="mla-paged-decode-cpu-arms-best"' in page
        and (tmp_path / "out" / "runs" / "single" / "events.jsonl").is_file()
    )


def test_a_codex_run_is_an_arm_of_its_own(repro, tmp_path, monkeypatch):
    real("codex")
    write = f"cat > k.py <<'END'\n{KERNEL}END\npython -m evoteam evaluate k.py --idea plain"
    options = ("--live", "--agent", "codex", "--model", "gpt-5-codex", "--budget-tokens", "30000")
    options += ("--task", "mla-paged-decode-cpu", "--json", "--out", tmp_path / "out")
    with responses_server.serve(responses_server.ResponsesServer([write])) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        result = repro("--mode", "fixed-team", *options)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    (row,) = report["observations"]
    assert row["title"] == "Arm codex on mla-paged-decode-cpu" and row["value"].endswith("x")
    assert "written by codex codex-cli" in row["note"] and len(report["runs"]) == 1
    reasons = {claim["id"]: claim["reason"] for claim in report["claims"]}
    assert "its run on mla-paged-decode-cpu is a row of its own" in reasons["fixed-team-codex"]


def test_both_arms_written_by_a_command_line(repro, tmp_path, monkeypatch):
    code = f"open('k.py', 'w').write({KERNEL!r})\nrun('evaluate', 'k.py', '--idea', 'plain')"
    agent = stand_in(tmp_path, code)
    path = tmp_path / "program" / "agent.json"
    options = (
        "--live",
        "--agent",
        path,
        "--model",
        MODEL,
        "--budget-tokens",
        "12000",
        "--task",
        "mla-paged-decode-cpu",
    )
    with serve(MessagesServer([])) as url:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
        result = repro("--mode", "same-budget", *options, "--json", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    runs = {run["arm"]: run for run in json.loads(result.stdout)["runs"]}
    assert runs.keys() == {"evolving", "single"} and {len(run["attempts"]) for run in runs.values()} == {1}
    assert {run["agent"] for run in runs.values()} == {agent.name}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--live",), "--live needs --mode same-budget or fixed-team, and it is all"),
        (
            ("--mode", "same-budget", "--live"),
            "--live needs --model NAME (or mailbox), --budget-tokens N and --task NAME",
        ),
        (("--mode", "same-budget", "--model", "x"), "--model can be given only with --live"),
        (("--mode", "same-budget", "--agent", "x"), "--agent can be given only with --live"),
        (
            (
                "--mode",
                "same-budget",
                "--live",
                "--model",
                "x",
                "--budget-tokens",
                "1",
                "--task",
                "t",
                "--agent",
                "codex",
            ),
            "--agent codex makes the row of one Codex agent, which stands in --mode fixed-team",
        ),
        (("--mode", "same-budget", "--live", "--model", "x", "--budget-tokens", "0"), "0.0 is not in the range x>0"),
    ],
)
def test_live_options_are_checked_before_anything_is_paid(repro, arguments, message):
    result = repro(*arguments)
    assert result.returncode == 2 and message in " ".join(result.stderr.split())


def test_a_live_run_that_cannot_start_says_why(repro, tmp_path):
    options = ("--live", "--model", "mailbox", "--budget-tokens", "1e5", "--task", "no-such-task")
    result = repro("--mode", "same-budget", *options, "--json", "--out", tmp_path)
    assert result.returncode == 2 and "--live could not start: arm evolving: there is no task 'no-such-task'" in result.stderr
