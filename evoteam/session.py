"""One run of repro.py: what the command line chose, and the report and evidence that grow while its parts run."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from evoteam.claims import Claim, Evidence
from evoteam.console import Terminal
from kernels.selection import Kernel
from kernels.workloads import Workload


@dataclass(slots=True)
class Session:
    """`tables` holds page tables of a real FlashInfer-Trace checkout by workload index, None for generated ones."""

    claims: tuple[Claim, ...]
    kernel: Kernel
    workloads: tuple[Workload, ...]
    seed: int
    terminal: Terminal
    report: dict
    tables: dict | None = None
    evidence: dict[str, Evidence] = field(default_factory=dict)

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(claim.mode for claim in self.claims))

    def of(self, modes: Iterable[str]) -> list[Claim]:
        """The session's claims of these modes that can be judged."""
        wanted = tuple(modes)
        return [claim for claim in self.claims if claim.mode in wanted and claim.judge != "shown"]
