"""`python -m evoteam` as a session has it: what it asks goes to the run, which alone evaluates and writes."""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evoteam", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    evaluate = commands.add_parser("evaluate", help="have a candidate judged; prints the verdict")
    evaluate.add_argument("file", help="its source")
    evaluate.add_argument("--idea", required=True, help="what it changes and what that should bring")
    evaluate.add_argument("--base", default="", metavar="ID", help="the attempt it starts from, such as a0003")
    evaluate.add_argument("--technique", action="append", default=[], metavar="TAG", help="once for each tag")
    note = commands.add_parser("note", help="leave a note for the team")
    note.add_argument("text", help="the note, - for standard input")
    note.add_argument("--evidence", nargs="*", default=[], metavar="ID", help="ids of attempts")
    read = commands.add_parser("read", help="show a file of the shared folder, such as attempts/a0003/log.txt")
    read.add_argument("path")
    read.add_argument("--offset", type=int, default=0)
    return parser.parse_args()


def question(given: argparse.Namespace) -> dict:
    if given.command == "note":
        text = sys.stdin.read() if given.text == "-" else given.text
        return {"text": text, "evidence": given.evidence}
    if given.command == "read":
        return {"path": given.path, "offset": given.offset}
    with open(given.file, "rb") as file:
        source = file.read().decode("utf-8", "replace")
    return {"source": source, "idea": given.idea, "base": given.base, "techniques": given.technique}


def main() -> int:
    given = arguments()
    try:
        asked = {"name": given.command, "input": question(given)}
        request = urllib.request.Request(os.environ["EVOTEAM_DOOR"] + "/run", json.dumps(asked).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        print(error.read().decode("utf-8", "replace"), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"not done: {error}", file=sys.stderr)
        return 1
    print(answer["text"])
    return int(answer["refused"])


if __name__ == "__main__":
    sys.exit(main())
