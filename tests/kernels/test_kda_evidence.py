"""What is said about the KDA claims without their hardware, and the arithmetic of a measurement's summary."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import kda_check, kda_evidence, kda_measure
from kernels.kda_task import WORKLOADS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch):
    """Evidence without its slow parts, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kda_evidence, "_interpreted", lambda progress: {"rows": []})
    monkeypatch.setattr(kda_evidence, "_compiled", lambda targets, progress: {"kernels": targets, "errors": []})
    return kda_evidence.evidence


def test_both_claims_are_hardware_unavailable_and_say_what_is_unknown(quick):
    found = quick()
    assert found["device"] is None and set(found["claims"]) == {"kda-mi350x", "kda-b200"}
    for claim in found["claims"].values():
        assert claim["verdict"] == "hardware-unavailable" and not claim["here"]
        assert claim["known"] and claim["unknown"] and claim["to_judge"]
    assert "factor of two" in " ".join(found["claims"]["kda-mi350x"]["unknown"])
    json.dumps(found)


def test_every_kind_of_evidence_says_what_it_does_not_show(quick):
    found = quick()["evidence"]
    assert set(found) == {"correctness", "machine_code", "record"}
    assert all(kind["shows"] and kind["does_not_show"] for kind in found.values())
    assert found["machine_code"]["kernels"] == ["gfx950", "sm_100a"]


@pytest.mark.parametrize(
    "message, said", [("out of memory\nand more of it", "RuntimeError: out of memory"), ("", "RuntimeError")]
)
def test_a_measurement_that_fails_leaves_the_rest_and_the_record(quick, monkeypatch, message, said):
    def measure_kda(device, progress):
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kda_check, "run", lambda device, progress: [])
    monkeypatch.setattr("kernels.kda_prefill.implementation", lambda device: "ours")
    monkeypatch.setattr(kda_measure, "measure_kda", measure_kda)
    found = quick()["evidence"]
    assert set(found) == {"correctness", "hardware_correctness", "machine_code", "record"}
    assert found["record"]["error"] == f"the measurement on this GPU failed: {said}"
    assert found["record"]["rows"] == kda_evidence.recorded()["rows"]


def test_one_mode_compiles_for_its_own_target_alone(quick):
    assert quick(modes=("kda-b200",))["evidence"]["machine_code"]["kernels"] == ["sm_100a"]


@pytest.mark.parametrize(
    "chip, mode, flash_kda, verdict",
    [
        ("gfx950", "kda-mi350x", True, "baseline-unavailable"),
        ("gfx950", "kda-b200", True, "hardware-unavailable"),
        ("sm_100a", "kda-b200", True, "not-run"),
        ("sm_100a", "kda-b200", False, "baseline-unavailable"),
        ("", "kda-b200", True, "hardware-unavailable"),
    ],
)
def test_verdict_by_chip_and_baseline(chip, mode, flash_kda, verdict, monkeypatch):
    monkeypatch.setattr("kernels.kda_baselines.installed", lambda name: flash_kda)
    claim = kda_evidence._claim(mode, chip)
    assert claim["verdict"] == verdict and claim["here"] == (chip == kda_evidence.CLAIMS[mode]["target"])


def test_verdicts_are_words_of_the_claims_module():
    from evoteam.reporting import claims

    assert {"hardware-unavailable", "baseline-unavailable", "not-run"} <= {
        claims.NO_HARDWARE, claims.NO_BASELINE, claims.NOT_RUN,
    }  # fmt: skip


def test_claims_are_those_of_the_expected_results():
    expected = json.loads((ROOT / "expected_results.json").read_text())["claims"]
    assert {claim["mode"] for claim in expected if claim["mode"].startswith("kda")} == set(kda_evidence.CLAIMS)


def test_the_shipped_record():
    record = kda_evidence.recorded()
    assert [row["workload"] for row in record["rows"]] == [workload.name for workload in WORKLOADS]
    assert {name: record["summary"][name]["n"] for name in ("fla-safe-gate", "flash-kda")} == {
        "fla-safe-gate": len(WORKLOADS),
        "flash-kda": len(WORKLOADS),
    }
    for row, workload in zip(record["rows"], WORKLOADS, strict=True):
        assert row["us"]["ours"] > workload.bytes_moved / 4.8e6  # nothing is faster than the memory


def row(workload, status="ok", **us):
    return {"workload": workload, "us": us, "status": status}


def test_summary():
    rows = [
        row("a", ours=10.0, **{"fla-safe-gate": 40.0, "flash-kda": 20.0}),
        row("b", ours=10.0, **{"fla-safe-gate": 10.0, "flash-kda": 5.0}),
        row("c", ours=10.0, **{"flash-kda": 80.0}),
        row("d", **{"flash-kda": 1.0}),
        row("e", "wrong", ours=1.0, **{"flash-kda": 100.0}),
    ]
    found = kda_measure.summarize(rows)
    assert set(found) == {"fla-safe-gate", "flash-kda", "fastest baseline"}
    assert found["fla-safe-gate"] == {
        "geomean": pytest.approx(2.0), "n": 2, "wins": 1, "losses": [], "worst": {"workload": "b", "ratio": 1.0},
    }  # fmt: skip
    assert found["flash-kda"]["geomean"] == pytest.approx(2.0) and found["flash-kda"]["losses"] == ["b"]
    assert found["fastest baseline"]["geomean"] == pytest.approx(1.0) and found["fastest baseline"]["n"] == 2
    assert kda_measure.summarize([row("d", ours=3.0)]) == {}


def test_an_interpreter_that_fails_is_reported(monkeypatch, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such module' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    assert kda_check.in_interpreter() == {"error": "no such module"}


def test_the_check_as_a_program_prints_json_alone():
    """On a machine where kernels cannot be interpreted because TRITON_INTERPRET is not set it fails with a message."""
    done = subprocess.run(
        [sys.executable, "-m", "kernels.kda_check"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode and done.stdout == "" and "TRITON_INTERPRET=1" in done.stderr
