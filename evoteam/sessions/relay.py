"""Inside the walls: a port of 127.0.0.1 that leads to the door's socket, and the command line that is told of it.

argv: socket, secret, working folder, then the command. `{door}` in its arguments and in the environment becomes the
door's address. Ends with the command's status. A script by itself, as nothing of this project can be imported here.
"""

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading

FILE_BYTES = 1 << 30
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        try:
            end.shutdown(how)
        except OSError:
            pass


def accept(server: socket.socket, path: str) -> None:
    while True:
        near, _ = server.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(path)
        except OSError:
            near.close()
            continue
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


def main() -> int:
    end_with_parent()
    path, secret, folder, *command = sys.argv[1:]
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, args=(server, path), daemon=True).start()
    door = f"http://127.0.0.1:{server.getsockname()[1]}/{secret}"
    environment = {name: value.replace("{door}", door) for name, value in os.environ.items()}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    command = [part.replace("{door}", door) for part in command]
    return subprocess.run(command, cwd=folder, env=environment, preexec_fn=end_with_parent).returncode


if __name__ == "__main__":
    sys.exit(main() & 0xFF)
