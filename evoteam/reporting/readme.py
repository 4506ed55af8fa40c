"""The parts of README.md that the program writes: its commands' help, and the measured table from the shipped record.

`python -m evoteam.reporting.readme` puts them into the README; a test compares.
"""

import click

from evoteam.reporting import kda, record
from evoteam.reporting.formats import WIDE, number

README = record.ROOT / "README.md"
CLAIM_COLUMNS = ("title", "published", "measured_text", "scope", "verdict")
SCOPES = {
    "run": "`run`: the kernel alone, written L2 flush",
    "run-clean": "`run`, clean L2 flush",
    "cupti": "`run`, second timer",
    "random": "`run`, random shapes outside the 47",
    "step": "`step`: 61 layers, one plan",
    "call": "`call`: plan and run on every call",
}


def generated() -> dict[str, str]:
    """Name of a marked place in the README -> the Markdown that belongs there."""
    import repro
    from evoteam import cli
    from kernels import kda_evidence

    group = _context(cli.main, "python -m evoteam")
    commands = sorted(cli.main.commands.items())
    return {
        "repro-help": _help(_context(repro.main, "repro.py")),
        "evoteam-help": "\n\n".join(_help(_context(command, name, group)) for name, command in commands),
        "measured": measured(record.shipped("mla_paged_decode")),
        "kda": kda_measured(kda_evidence.recorded()),
    }


def _context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    settings = {"terminal_width": 80, "max_content_width": 80} | command.context_settings
    return command.context_class(command, info_name=name, parent=parent, **settings)


def _help(context: click.Context) -> str:
    return f"```\n{context.get_help().strip()}\n```"


def measured(found: tuple | None) -> str:
    """The shipped measurement as Markdown, or the sentence that there is none."""
    if found is None:
        return "No measurement ships with this version yet."
    path, stored = found
    versions = {
        name: version for scope in stored["measurements"].values() for name, version in scope["versions"].items()
    }
    shown = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "triton", "flashinfer-python", "cuda", "driver")
        if name in versions
    )
    gpu, command = stored["device"]["name"], " ".join(stored["command"])
    lines = [
        f"Measured {stored['created'][:10]} on one {gpu} by `{command}`; {shown}.",
        f"Raw samples: `{path.relative_to(record.ROOT)}`. {stored.get('note', '')}".strip(),
        "",
        "| claim | paper | here | scope | verdict then |",
        "|---|---|---|---|---|",
        *(
            f"| {' | '.join(claim[key] or '-' for key in CLAIM_COLUMNS)} |"
            for claim in stored["claims"]
            if claim["verdict"] != "shown"
        ),
        "",
        f"Every row was measured on {gpu}; the MLA claims are for a GPU that their sources do not name.",
        "Ratio = FlashInfer's time / ours, the faster of its backends on each workload.",
        "",
        "| what | timer | geometric mean | arithmetic mean | faster / of | worst | B=1 | B=16 | B=64 | wide |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_scope_row(name, stored["measurements"][name]) for name in SCOPES if name in stored["measurements"]),
        "",
        f"{WIDE[0].upper()}{WIDE[1:]}, so its own ratio is uncertain by about that much. In the table",
        "below such rows carry a \\*.",
        "",
        "<details><summary>Every workload, <code>run</code> scope</summary>",
        "",
        "| # | B | tokens | ours us | FlashInfer us | ratio | share of copy rate | spread |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
        *map(_workload_row, stored["measurements"].get("run", {}).get("rows", ())),
        "",
        "</details>",
    ]
    return "\n".join(lines)


def _scope_row(name: str, scope: dict) -> str:
    summary = scope["summary"]
    worst = summary["worst"]
    batches = summary["geomean_by_batch"] if name != "random" else {}
    cells = [
        SCOPES[name],
        scope["timer"],
        number(summary["geomean"], ".2f", "x"),
        number(summary["arithmetic_mean"], ".2f", "x"),
        f"{summary['wins']} / {summary['n']}",
        number(worst and worst["ratio"], ".2f", "x"),
        *(number(batches.get(batch), ".2f", "x") for batch in ("1", "16", "64")),
        f"{len(summary['unstable'])} / {summary['n']}",
    ]
    return f"| {' | '.join(cells)} |"


def _workload_row(row: dict) -> str:
    cells = [
        str(row["index"]),
        str(row["batch"]),
        f"{row['tokens']:,}",
        number(row["ours_us"]),
        f"{number(row['baseline_us'])} {row['baseline']}",
        number(row["ratio"], ".2f", "x"),
        number(row["bandwidth_share"], ".0%"),
        number(row["spread"], ".1%") + (" \\*" if row["status"] == "unstable" else ""),
    ]
    return f"| {' | '.join(cells)} |"


def kda_measured(recorded: dict) -> str:
    """The shipped KDA measurement as Markdown, with its conditions."""
    columns, rows = kda.times(recorded)
    versions = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
    means = "; ".join(f"{s['geomean']:.2f}x against {name} over {s['n']}" for name, s in recorded["summary"].items())
    return "\n".join(
        [
            f"Measured {recorded['created']} on one {recorded['device']}: {recorded['scope']}, {recorded['timer']}, "
            f"{recorded['statistic']}; {versions}. Time in us, that of an eager call from an idle GPU in parentheses; "
            "traffic bound: the bytes that any kernel must move, at the measured copy rate.",
            "",
            f"| {' | '.join(columns)} |",
            f"|{'---|' * len(columns)}",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            " ".join(recorded["conditions"]),
            f"Geometric means under these conditions, where both were measured: {means}.",
        ]
    )


def fill(text: str, parts: dict[str, str]) -> str:
    """`text` with its part between every `<!-- name -->` and `<!-- /name -->`. KeyError where a place is missing."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if begin not in text or end not in text:
            raise KeyError(f"README.md has no place for {name}: wanted {begin.strip()} and {end}")
        before, rest = text.split(begin, 1)
        text = before + begin + part + "\n" + end + rest.split(end, 1)[1]
    return text


if __name__ == "__main__":
    README.write_text(fill(README.read_text(encoding="utf-8"), generated()), encoding="utf-8")
