"""Made-up measurements and runs, in the shapes that real ones have, for tests of judging and of the page."""

import json
import math
import random

from evoteam.budget import Budget
from evoteam.judging.verdict import Verdict
from evoteam.reporting import claims, record
from evoteam.reporting.claims import Evidence
from evoteam.reporting.expected import load
from evoteam.search import configuration
from evoteam.team import preset
from kernels.workloads import load_workloads


def make_row(workload, rng, speedup, layers=1):
    ours = (4.5 + 25 * (workload.tokens / 75_145) ** 0.8) * layers
    samples = {
        "ours": [round(ours * rng.uniform(0.99, 1.02), 3) for _ in range(30)],
        "fa3": [round(ours * speedup * rng.uniform(0.99, 1.02), 3) for _ in range(30)],
        "fa2": [round(ours * speedup * 1.3 * rng.uniform(0.99, 1.02), 3) for _ in range(30)],
    }
    medians = {name: sorted(values)[15] for name, values in samples.items()}
    return {
        "index": workload.index,
        "uuid": workload.uuid,
        "family": workload.family,
        "batch": workload.batch,
        "tokens": workload.tokens,
        "ours_us": medians["ours"],
        "ours_p10": sorted(samples["ours"])[3],
        "ours_p90": sorted(samples["ours"])[27],
        "baseline_us": medians["fa3"],
        "baseline": "fa3",
        "ratio": medians["fa3"] / medians["ours"],
        "bandwidth_share": workload.tokens * 1152 * layers / (medians["ours"] * 4.2e6),
        "error_ratio": rng.uniform(2e-3, 2.4e-3),
        "max_abs": 3e-3,
        "lse_error": 2e-6,
        "baseline_error_ratio": rng.uniform(2e-3, 2.6e-3),
        "spread": rng.uniform(0.01, 0.05),
        "status": "ok",
        "reason": "",
        "samples": samples,
    }


def make_scope(scope="run", speedup=1.5, workloads=None):
    rng, layers = random.Random(scope), 61 if scope == "step" else 1
    rows = [make_row(w, rng, speedup * rng.uniform(0.8, 1.3), layers) for w in workloads or load_workloads()]
    ratios = [row["ratio"] for row in rows]
    worst = min(rows, key=lambda row: row["ratio"])

    def geomean(values):
        return math.exp(sum(map(math.log, values)) / len(values))

    found = {
        "scope": scope,
        "timer": "wall" if scope == "step" else "cuda-events",
        "flush": "dirty",
        "statistic": "median",
        "floor_us": 2.7,
        "copy_tb_s": 4.2,
        "device": {"name": "made-up GPU"},
        "versions": {"torch": "0.0-made-up"},
        "seed": 1,
        "clocks": {"before": {"sm_clock_mhz": 1, "temperature_c": 2}, "after": {"sm_clock_mhz": 3, "temperature_c": 4}},
        "baseline_build_s": {"fa3": 1.0},
        "baseline_error": "",
        "seconds": 10.0,
        "pairs": 30,
        "rows": rows,
        "summary": {
            "n": len(rows),
            "wrong": [],
            "unstable": [],
            "geomean": geomean(ratios),
            "arithmetic_mean": sum(ratios) / len(ratios),
            "wins": sum(ratio > 1 for ratio in ratios),
            "losses": sum(ratio < 1 for ratio in ratios),
            "worst": {"index": worst["index"], "ratio": worst["ratio"]},
            "geomean_by_batch": {
                str(b): geomean([r["ratio"] for r in rows if r["batch"] == b])
                for b in sorted({r["batch"] for r in rows})
            },
        },
    }
    if scope == "step":
        found |= {
            "layers": 61,
            "caches": 61,
            "runs_per_plan": {str(n): 1.5 + 40 / n for n in (1, 2, 5, 10, 20, 50, 61, 100)} | {"never": 1.5},
            "paper_runs_per_plan": 240.0,
        }
    return found


def make_report():
    expected = load(record.ROOT / "expected_results.json")
    measurements = {"run": make_scope("run"), "step": make_scope("step", 3.0)}
    judgements = []
    for claim in expected.claims:
        scope = measurements.get(claim.scope)
        evidence = (
            claims.from_scope(claim, scope, "made-up GPU")
            if scope
            else Evidence(claims.NOT_RUN, reason="made-up reason")
        )
        judgements.append(claims.judge(claim, evidence))
    return record.begin(["repro.py"], claims.MODES, 1) | {
        "device": {"name": "made-up GPU"},
        "kernel": {"name": "mla_paged_decode", "sha256": "0" * 64, "shipped": True},
        "measurements": measurements,
        "selfcheck": make_selfcheck(),
        "kda": make_kda(),
        "observations": [
            {
                "title": "made-up row",
                "value": "1.9x",
                "device": "made-up GPU",
                "verdict": "recorded",
                "note": "made-up note",
                "conditions": "made-up conditions",
            }
        ],
        "paper": expected.paper,
        "sources": expected.sources,
        "caveats": list(expected.caveats),
        "claims": [judgement.to_json() for judgement in judgements],
        "summary": claims.summary_line(judgements),
    }


def make_run(path, *, attempts, arm="evolving", improves=True, every=5):
    """A run folder whose journal holds `attempts` turns of one attempt each; after every 50th comes a new team."""
    team = preset(arm)
    writer = next(role.name for role in team.roles if role.writes)
    setup = configuration(task="mla-paged-decode-cpu", arm=arm, model="made-up", budget=Budget(tokens=1e9))
    events = [
        {"kind": "run", "schema": 1, "config": setup},
        {"kind": "team", "team": team.model_dump(mode="json"), "diagnosis": ""},
    ]
    kinds = ("wrong-answer", "compile", "timeout")
    for i in range(attempts):
        turn, name = f"turn{i + 1:04d}", f"a{i + 1:04d}"
        good = improves and i % every == 0
        verdict = Verdict(
            "mla-paged-decode-cpu", f"{i:064d}", "0" * 64, "0" * 64, "full", device="made-up CPU", gpu_seconds=0.5
        )
        score = {"score": 2 - 1 / (1 + i / 10)} if good else {"failure": kinds[i % 3]}
        verdict = verdict.to_json() | {"full_score": None, "rows": []} | score
        team_id = team.id or "t0001"
        usage = {"input": 1000, "cache_write": 100, "cache_read": 5000, "output": 300, "estimated": False}
        who = {"role": writer, "team": team_id}
        events += [
            {"kind": "turn", "turn": turn, **who, "stage": 0, "snapshot": 0, "round": 1},
            {"kind": "call", "key": f"{turn}.01", "reserved": usage},
            {
                "kind": "reply",
                "key": f"{turn}.01",
                "content": [],
                "stop_reason": "end_turn",
                "usage": usage,
                "model": "made-up",
            },
            {
                **{
                    "kind": "attempt",
                    "id": name,
                    "call": f"{turn}.01.0",
                    "idea": f"idea {i}",
                    "base": "",
                    "techniques": [],
                    "unconfirmed": [],
                },
                **{"source_sha256": f"{i:064d}", "program_sha256": f"{i:064d}", **who},
            },
            {"kind": "verdict", "attempt": name, "full": True, "verdict": verdict},
            {"kind": "turn_end", "turn": turn, "role": writer, "reason": "finished", "tokens": 3000},
        ]
        if arm == "evolving" and i % 50 == 49:
            team = team.model_copy(update={"id": f"t{i // 50 + 2:04d}", "parent": team_id})
            rule = {
                "action": "revise",
                "diagnosis": "<b>made-up</b> stall",
                "evidence": [name],
                "team": team.model_dump(mode="json"),
            }
            events.append(
                {
                    "kind": "decision",
                    "round": 1,
                    "by": "supervisor",
                    "rules": [],
                    "phase": "search",
                    "tokens": 1,
                    **rule,
                }
            )
    events.append({"kind": "end", "reason": "budget", "text": "made-up end", "best": "", "score": 0})
    path.mkdir(parents=True)
    lines = [json.dumps({"seq": i, "t": "2026-01-01T00:00:00Z"} | event) for i, event in enumerate(events)]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    return path


def make_selfcheck():
    """What a check without a GPU finds, one thing wrong."""
    check = {"name": "one-token", "reason": "", "error_ratio": 1e-3, "lse_error": 1e-6, "seconds": 0.2}
    built = {"kernel": "mla_paged_decode.cu", "variant": "sm_90a, fp16=0, stages=3", "compiler": "NVRTC 0.0"}
    return {
        "interpreter": [check, check | {"name": "wrong-one", "reason": "out[0, 0, 0] is nan"}],
        "compiled": [built | {"registers": 128, "spill_bytes": 0, "shared_bytes": 137_088}],
    }


def make_kda():
    """Evidence on KDA prefill as a machine without a GPU gives it."""
    labels = {"shows": "made-up sense", "does_not_show": "made-up limits"}
    claim = {
        "here": False,
        "verdict": "hardware-unavailable",
        "reason": "the claim is for a made-up chip, which is not here",
    }
    claim |= {"known": ["made-up fact"], "unknown": ["made-up gap"], "to_judge": "a made-up chip"}
    case = {"case": "serial", "o": 1e-7, "state": 2e-7, "limit": 1e-5, "ok": True}
    kernel = {"kernel": "recurrence", "target": "sm_100a", "registers": 100, "spilled": 0, "shared_bytes": 65_536}
    times = {"ours": 1000.0, "fla": 2000.0}
    summary = {
        "fla": {"geomean": 2.0, "n": 1, "wins": 1, "losses": [], "worst": {"workload": "96 x 8192", "ratio": 2.0}}
    }
    record = {
        "device": "made-up GPU",
        "created": "2026-01-01",
        "conditions": ["made-up condition."],
        "summary": summary,
    }
    return {
        "device": None,
        "claims": {"kda-mi350x": claim, "kda-b200": claim},
        "evidence": {
            "correctness": labels | {"rows": [case, case | {"case": "segmented", "ok": False}]},
            "machine_code": labels
            | {
                "kernels": [kernel | {"matrix_instructions": {"HMMA": 12, "HGMMA": 3}}],
                "errors": [{"kernel": "scan", "target": "gfx950", "error": "made-up error"}],
            },
            "record": labels
            | record
            | {
                "rows": [
                    {
                        "workload": "96 x 8192",
                        "us": times,
                        "eager_us": {name: us + 100 for name, us in times.items()},
                        "bound_us": 230.4,
                    },
                    {"workload": "12 x 512", "us": {"fla": 70}, "eager_us": {"fla": 900}, "bound_us": 2.1},
                ]
            },
        },
    }
