"""The journal of a run: one event a line, numbered and sealed, so that damage is named and never passed over.

A process that ends while it writes leaves the beginning of a line. Such a torn line is ended, skipped and reported; the
event that it was to be is written again under the same number, so torn lines never leave a gap.
"""

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

SCHEMA = 2  # 1: lines without a seal
JOURNAL = "events.jsonl"
SEAL = re.compile(rb',"crc":"[^"]*"\}\n?$')
SCAN = json.JSONDecoder().scan_once
SEALED = len(',"crc":"00000000"}')


class FolderError(RuntimeError):
    """The run folder cannot be used as asked; the message says why and what to do."""


def damaged(path: Path, number: int, what: str) -> FolderError:
    return FolderError(
        f"{path}, line {number}: {what}; nothing was written: restore this file from a copy, "
        "or start a new run in another --folder"
    )


def line_of(event: dict) -> bytes:
    """An event as a line of the journal."""
    text = json.dumps(event, separators=(",", ":")).encode()[:-1]
    return text + _seal(text) + b"\n"


def _seal(text: bytes) -> bytes:
    """What ends the line of an event: its last field is the checksum of what it would be without it."""
    return b',"crc":"%08x"}' % zlib.crc32(b"}", zlib.crc32(text))


def read_events(path: Path) -> Iterator[dict]:
    """The events of a journal in order; FolderError at the first line that is not what was written there."""
    return (event for _, event in read_lines(path) if event)


def read_lines(path: Path) -> Iterator[tuple[int, dict | None]]:
    """As `read_events`, each with the number of its line; None for a torn line."""
    wanted, schema, fragments = 0, SCHEMA, []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            event, fault = _event(line)
            if event is None and not SEAL.search(line):
                fragments.append((number, line, fault))
                yield number, None
                continue
            if event is None:
                raise damaged(path, number, fault)
            if event["seq"] != wanted:
                raise damaged(path, *_misplaced(number, event["seq"], wanted, fragments))
            schema = schema if wanted else _schema_of(path, number, event)
            if schema > 1 and "crc" not in event:
                raise damaged(path, number, "it has no checksum, and every line of this journal has one")
            wanted, fragments = wanted + 1, []
            event.pop("crc", None)
            yield number, event
    beginning = b'{"seq":%d,' % wanted
    for number, line, fault in fragments[:-1]:
        if not beginning.startswith(line.rstrip(b"\n")[: len(beginning)]):
            raise damaged(path, number, fault)


def _parse(text: str):
    """json.loads without its search for white space, where there is none; all else is left to it, errors too."""
    try:
        value, end = SCAN(text, 0)
    except StopIteration:
        return json.loads(text)
    return value if text[end:] in ("", "\n") else json.loads(text)


def _event(line: bytes) -> tuple[dict | None, str]:
    """The event of a line, or what is wrong with the line."""
    try:
        event = _parse(line.decode())
    except json.JSONDecodeError as error:
        return None, f"it is not JSON ({error.msg} at column {error.colno})"
    except (ValueError, RecursionError) as error:
        return None, f"it is not JSON ({error})"
    if not isinstance(event, dict) or not isinstance(event.get("seq"), int) or not isinstance(event.get("kind"), str):
        return None, "it is no event: an object with seq and kind is wanted"
    if "crc" in event and _seal(line.rstrip(b"\n")[:-SEALED]) != line.rstrip(b"\n")[-SEALED:]:
        return None, "its checksum does not fit: the line was changed after it had been written"
    return event, ""


def _misplaced(number: int, seq: int, wanted: int, fragments: list[tuple[int, bytes, str]]) -> tuple[int, str]:
    if seq < wanted:
        return number, f"it is event {seq}, which was there before; wanted is event {wanted}"
    if fragments:
        return fragments[0][0], fragments[0][2]
    return number, f"it is event {seq}, wanted is event {wanted}: what came before it is missing"


def _schema_of(path: Path, number: int, event: dict) -> int:
    """The schema that the first event states. Raises FolderError when it is no first event or cannot be read here."""
    schema = event.get("schema")
    if event["kind"] != "run" or not isinstance(schema, int):
        raise damaged(path, number, f"it is {event['kind']!r}; a journal begins with the event 'run' and its schema")
    if schema > SCHEMA:
        raise FolderError(f"{path.parent} was written by a newer version (schema {schema}, this one reads {SCHEMA})")
    return schema
