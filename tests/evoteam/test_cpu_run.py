"""The whole loop for real: CPU task, confined evaluator, wall time; only the answers are scripted."""

import json
import subprocess
import sys
from pathlib import Path

from evoteam.memory import SharedFolder
from tests.evoteam.toy import FINISH, use

ROOT = Path(__file__).parents[2]

SOURCE = """\
import math

import torch


def mla_paged_decode(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    offsets = kv_indptr.tolist()
    query = torch.cat([q_nope, q_pe], -1).PRECISION() * sm_scale
    out = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -math.inf)
    for request, (first, last) in enumerate(zip(offsets, offsets[1:])):
        if first == last:
            continue
        rows = kv_indices[first:last].long()
        keys = torch.cat([ckv_cache[rows, 0], kpe_cache[rows, 0]], -1).PRECISION()
        scores = torch.matmul(query[request], keys.T)
        lse[request] = torch.logsumexp(scores, -1)SCALE
        out[request] = torch.matmul(scores.softmax(-1), keys[:, :512]).bfloat16()
    return out, lse
"""


def kernel(precision, scale, extra=""):
    return SOURCE.replace("PRECISION", precision).replace("SCALE", scale) + extra


def attempt(source, idea, techniques=()):
    return use("write_kernel", source=source, idea=idea, techniques=list(techniques))


RIGHT = " / math.log(2)"
ONE_HEAD_AT_A_TIME = "torch.stack([torch.matmul(row, keys.T) for row in query[request] for _ in range(3)][::3])"
PLAIN = kernel("double", RIGHT).replace("torch.matmul(query[request], keys.T)", ONE_HEAD_AT_A_TIME)
REPAIR_TEAM = {
    "rationale": "repair before anything else",
    "roles": [{"name": "repairer", "mandate": "Repair lse of a0003.", "tools": ["edit_kernel"], "share": 1.0}],
    "order": [["repairer"]],
    "sharing": {"repairer": ["failures"]},
}
DIAGNOSIS = "fp32 was given up over the base of a logarithm"
REPAIR = [{"search": " * math.log(2)", "replace": RIGHT}]
SCRIPT = {
    "writer": [
        [attempt(PLAIN, "plain, in fp64, head by head, each three times"), FINISH],
        [
            attempt(kernel("float", ""), "fp32", ["batched"]),
            attempt(kernel("float", " * math.log(2)"), "fp32 again", ["batched"]),
            FINISH,
        ],
        [attempt("def mla_paged_decode(:\n", "does not parse"), attempt("def f(:\n", "nor this"), FINISH],
    ],
    "critic": [[FINISH]] * 3,
    "supervisor": [
        [use("decide", action="revise", diagnosis=DIAGNOSIS, evidence=["a0002", "a0003"], team=REPAIR_TEAM)]
    ],
    "repairer": [[use("edit_kernel", base="a0003", idea="lse in base 2", techniques=["batched"], edits=REPAIR)]],
}


def evoteam(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "evoteam", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_stall_a_diagnosis_a_rewritten_team_and_an_improvement_by_it(tmp_path):
    script, folder = tmp_path / "script.json", tmp_path / "run"
    script.write_text(json.dumps(SCRIPT))
    evoteam(
        "run",
        "--folder",
        folder,
        "--task",
        "mla-paged-decode-cpu",
        "--model",
        f"scripted:{script}",
        "--budget-tokens",
        "1e6",
    )
    state = SharedFolder.read(folder).state
    first, *failed, repaired = state.attempts.values()
    assert first.valid and [attempt.failure for attempt in failed] == [
        "wrong-answer",
        "wrong-answer",
        "screen",
        "screen",
    ]
    (revision,) = [decision for decision in state.decisions if decision["by"] == "supervisor"]
    assert [rule["name"] for rule in revision["rules"]] == ["retreat"]
    assert state.best is repaired and repaired.role == "repairer" and repaired.team == "t0002"
    assert repaired.score > 1.1 * first.score > 0 and repaired.full_score > 0
    assert revision["diagnosis"] == DIAGNOSIS and DIAGNOSIS in evoteam("status", folder)
    assert "decisions are the recorded ones" in evoteam("replay", folder)
