"""The harness of a candidate for a GPU task: inputs made on the GPU from seeds, timing by CUDA events.

As in `harness.py` nothing here is believed: times must agree with the evaluator's clock, outputs with its reference.
"""

import inspect
import mmap
import os

import harness
from gpu_side import AUDIT_CALLS, GpuSide

GUARDED = (
    *(f"torch.cuda.{name}" for name in ("synchronize", "current_stream", "_sleep", "Event", "CUDAGraph.replay")),
    *(f"torch.cuda.Event.{name}" for name in ("record", "query", "synchronize", "elapsed_time")),
    *(f"torch.Tensor.{name}" for name in ("clone", "copy_", "fill_", "mul_", "cpu")),
)


class GpuRunner(harness.Runner):
    """One candidate on the GPU; outputs go back through shared host memory, with their dtypes and shapes."""

    def __init__(self, side: GpuSide):
        super().__init__()
        self.side = side
        self.originals = {name: _resolve(name) for name in GUARDED}
        self.steps |= {"prepare": self.prepare, "sample": self.sample, "fetch": self.fetch}
        self.steps |= {"audit_setup": self.audit_setup, "audit": self.audit}

    def load(self, request: dict, fds: list[int]) -> None:
        self.memory = [mmap.mmap(fds[1], 0)]
        os.close(fds[1])
        super().load(request, fds[:1])
        self.side.function = self.checked

    def checked(self, *inputs, **keywords):
        returned = self.function(*inputs, **keywords)
        if len(self.specs) == 1 and not isinstance(returned, (tuple, list)):
            returned = (returned,)
        if not isinstance(returned, (tuple, list)):
            raise harness.WrongOutput(f"it returned {harness.describe(returned)}, must return a tuple of tensors")
        for value in returned:
            if type(value) is not self.side.torch.Tensor or value.device != self.side.device:
                wanted = f"must be a plain torch.Tensor on {self.side.device}"
                raise harness.WrongOutput(f"it returned {harness.describe(value)}, {wanted}")
        return tuple(returned)

    def prepare(self, request: dict, fds: list[int]) -> None:
        self._guard()
        self.side.prepare(request["number"], request["seed"], request["rotate"])
        self.specs = request["outputs"]
        self.side.buffers = self._buffers()

    def _buffers(self) -> dict:
        if not all(spec["name"] in self.parameters for spec in self.specs):
            return {}
        torch, device = self.side.torch, self.side.device
        return {
            spec["name"]: torch.full(spec["shape"], torch.nan, dtype=getattr(torch, spec["dtype"]), device=device)
            for spec in self.specs
        }

    def call(self, request: dict, fds: list[int]) -> dict:
        self._guard()
        self.side.taken = self.side.call()
        self.side.torch.cuda.synchronize()
        return {}

    def sample(self, request: dict, fds: list[int]) -> dict:
        self._guard()
        return self.side.sample(request["seed"])

    def audit_setup(self, request: dict, fds: list[int]) -> dict:
        self._guard()
        self.side.audit_setup()
        return {"graph": self.side.audit_capture([self._buffers() for _ in range(AUDIT_CALLS)])}

    def audit(self, request: dict, fds: list[int]) -> None:
        self.side.audit(request["seed"], request["calls"])

    def fetch(self, request: dict, fds: list[int]) -> dict:
        """Outputs of the last call or sample, or of call `number` of the audit."""
        taken = self.side.taken if request["number"] is None else self.side.audited[request["number"]]
        offset, found = 0, []
        for value in taken:
            data = value.detach().contiguous().cpu().reshape(-1).view(self.side.torch.uint8).numpy()
            self.memory[0][offset : offset + data.size] = data.tobytes()
            dtype = str(value.dtype).removeprefix("torch.")
            found.append({"dtype": dtype, "shape": list(value.shape), "offset": offset})
            offset += -(-data.size // 64) * 64
        return {"outputs": found}

    def _guard(self) -> None:
        patched = [name for name, original in self.originals.items() if _resolve(name) is not original]
        if patched:
            raise harness.Cheat(f"it replaced {', '.join(patched)}")


def _resolve(name: str):
    module, *path = name.split(".")
    found = __import__(module)
    for part in path:
        found = inspect.getattr_static(found, part)
    return found
