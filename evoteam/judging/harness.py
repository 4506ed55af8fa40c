"""Runs inside the candidate's process: loads the candidate, maps the shared memory, calls the candidate when told to.

Started as a script, with nothing of this project importable. Everything here is at the candidate's mercy, so nothing
here is believed: clock, inputs, reference and verdict are the evaluator process's. One message each way per step over a
SEQPACKET socket; a reply repeats the nonce of its request.
"""

import array
import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import resource
import socket
import sys
import traceback

REQUEST_BYTES = 1 << 16
MESSAGE_CHARACTERS = 4000


def send(sock: socket.socket, message: dict) -> None:
    sock.send(json.dumps(message).encode())


def receive(sock: socket.socket) -> tuple[dict, list[int]]:
    """The next request and the file descriptors that came with it; ends the process when the evaluator has gone."""
    data, ancillary, _, _ = sock.recvmsg(REQUEST_BYTES, socket.CMSG_SPACE(16))
    if not data:
        os._exit(0)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) // 4 * 4])
    return json.loads(data), list(fds)


def map_tensors(memory: mmap.mmap, specs: list[dict]) -> list:
    """Tensors on shared memory; a spec without an offset is a plain number."""
    import torch

    tensors = []
    for spec in specs:
        if "offset" not in spec:
            tensors.append(spec["value"])
            continue
        dtype, shape = getattr(torch, spec["dtype"]), spec["shape"]
        count = 1
        for size in shape:
            count *= size
        if count:
            tensors.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=spec["offset"]).view(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
    return tensors


class WrongOutput(Exception):
    """What the candidate defines or returns is not what the definition asks for."""


class Cheat(Exception):
    """The candidate replaced something that its measurement rests on."""


KINDS = {WrongOutput: "output", Cheat: "cheat"}


class Runner:
    """One candidate (or the baseline) and the shared memory it works on."""

    def __init__(self):
        self.function = None
        self.parameters: tuple[str, ...] = ()
        self.memory: list[mmap.mmap] = []
        self.steps = {"load": self.load, "bind": self.bind, "call": self.call}

    def load(self, request: dict, fds: list[int]) -> None:
        path = os.path.join(os.environ["HOME"], "candidate.py")
        source = os.read(fds[0], 1 << 24)
        os.close(fds[0])
        with open(path, "wb") as file:
            file.write(source)
        spec = importlib.util.spec_from_file_location("candidate", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["candidate"] = module
        spec.loader.exec_module(module)
        self.function = getattr(module, request["entry_point"], None)
        if not callable(self.function):
            raise WrongOutput(f"{request['entry_point']} is {describe(self.function)}, must be a function")
        try:
            self.parameters = tuple(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            pass  # a built-in function without a signature takes no keywords

    def bind(self, request: dict, fds: list[int]) -> None:
        if fds:
            self.memory = [mmap.mmap(fd, 0) for fd in fds]
            for fd in fds:
                os.close(fd)
        self.inputs = map_tensors(self.memory[0], request["inputs"])
        self.outputs = map_tensors(self.memory[1], request["outputs"])
        self.names = [spec["name"] for spec in request["outputs"]]
        takes_outputs = all(name in self.parameters for name in self.names)
        self.keywords = dict(zip(self.names, self.outputs)) if takes_outputs else {}

    def call(self, request: dict, fds: list[int]) -> None:
        returned = self.function(*self.inputs, **self.keywords)
        if len(self.names) == 1 and not isinstance(returned, (tuple, list)):
            returned = (returned,)
        if not isinstance(returned, (tuple, list)) or len(returned) != len(self.outputs):
            raise WrongOutput(f"it returned {describe(returned)}, must return ({', '.join(self.names)})")
        for name, wanted, got in zip(self.names, self.outputs, returned):
            if got is wanted:
                continue
            if getattr(got, "dtype", None) != wanted.dtype or tuple(got.shape) != tuple(wanted.shape):
                raise WrongOutput(f"{name} is {describe(got)}, must be {describe(wanted)}")
            wanted.copy_(got)


def _traceback(error: BaseException) -> str:
    """The traceback from the candidate's first frame on."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def describe(value) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def serve(sock: socket.socket, runner: Runner) -> None:
    """Answers requests until the socket closes."""
    steps = runner.steps
    while True:
        request, fds = receive(sock)
        reply = {"nonce": request["nonce"]}
        try:
            reply |= steps[request["op"]](request, fds) or {}
        except (WrongOutput, Cheat) as error:
            reply |= {"error": KINDS[type(error)], "message": str(error)}
        except BaseException as error:  # the candidate's code may raise anything, SystemExit included
            text = _traceback(error)
            os.write(2, text.encode("utf-8", "replace"))
            reply |= {"error": type(error).__name__, "message": text[-MESSAGE_CHARACTERS:]}
        send(sock, reply)


def limit(limits: dict[str, int]) -> None:
    """Hard limits that nothing started from here can raise again."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, it is this process that goes
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def main() -> None:
    """argv: file descriptor of the socket, JSON with the limits and, if it needs a GPU, the task's name."""
    options = json.loads(sys.argv[2])
    sys.modules["harness"] = sys.modules["__main__"]
    gpu = importlib.import_module("gpu_harness") if options["gpu_task"] else None
    del sys.path[0]  # this file's folder: the candidate must find nothing of the project by accident
    faulthandler.enable()
    limit(options["limits"])
    sock = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module("torch")
    runner = gpu.GpuRunner(gpu.GpuSide.on_gpu(options["gpu_task"])) if gpu else Runner()
    send(sock, {"nonce": "ready"})
    serve(sock, runner)


if __name__ == "__main__":
    main()
