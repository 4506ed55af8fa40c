"""One run of repro.py: what the command line chose, and the report and evidence that grow while its parts run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evoteam.reporting.claims import Claim, Evidence
from evoteam.reporting.console import Terminal
from kernels.selection import Kernel
from kernels.workloads import Workload

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Session:
    """`kernel` is None where no mode measures one. `tables` holds page tables of a real FlashInfer-Trace checkout by
    workload index, None for generated ones."""

    claims: tuple[Claim, ...]
    kernel: Kernel | None
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

    def gpu(self) -> "torch.device | None":
        """The GPU to measure on, entered into the report; None where there is none."""
        import torch

        if not torch.cuda.is_available():
            return None
        from kernels import device as facts

        device = torch.device("cuda", torch.cuda.current_device())
        if self.report["device"] is None:
            self.report["device"] = facts.describe(device)
            self.report["versions"] |= facts.versions()
        return device
