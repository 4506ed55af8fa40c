"""A verdict in a few lines of text, for roles and for the terminal."""


def verdict_digest(name: str, verdict: dict, best: float = 0.0) -> str:
    """What the evaluator says about the candidate `name`. `best`: the score to beat, 0 for none."""
    if verdict["failure"]:
        worst = f"\nworst: {pairs(verdict['worst'])}" if verdict["worst"] else ""
        return f"{name} failed in phase {verdict['phase']}: {verdict['failure']}{worst}\n{verdict['message']}".rstrip()
    head = f"{name}: score {verdict['score']:.3f}"
    if best:
        head += f", the best before was {best:.3f}" + (": a new best" if verdict["score"] > best else "")
    if verdict["full_score"] is not None:
        head += f"; {verdict['full_score']:.3f} over all workloads"
    return "\n".join([head, *profile_lines(verdict)])


def profile_lines(verdict: dict) -> list[str]:
    """One line a workload, as far as the verdict's rows go."""
    return [f"- {_subject(row)}: {_figures(row)}" for row in verdict["rows"]]


def count(number: int, what: str) -> str:
    """The number of things, in words that agree with it."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def pairs(record: dict) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in record.items()
    )


def _subject(row: dict) -> str:
    name = " ".join(str(row[key]) for key in ("index", "workload") if key in row)
    size = ", ".join(f"{key} {row[key]}" for key in ("batch", "tokens") if key in row)
    return f"workload {name}" + (f" ({size})" if size else "")


def _figures(row: dict) -> str:
    if "ratio" not in row:
        return str(row.get("status", "not timed"))
    unstable = " (unstable)" if row.get("status") == "unstable" else ""
    return f"{row['ratio']:.2f}x{unstable}; candidate {row['ours_us']:.1f} us, baseline {row['baseline_us']:.1f} us"
