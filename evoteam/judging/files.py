"""Files at paths that somebody else chose: only regular ones are read, to a bound; written whole or not at all."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def read_regular(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a regular file. OSError for what else stands there: a pipe could block."""
    _require_regular(os.stat(path))
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _require_regular(os.fstat(file.fileno()))
        return file.read(limit)


def _require_regular(found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(0, f"it is {KINDS.get(kind, 'a device')}, wanted a regular file")


def write_atomically(path: Path, data: str, durable: bool = True) -> None:
    """Write a file so that it is there whole or not at all, in place of a link too. durable: even after a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
