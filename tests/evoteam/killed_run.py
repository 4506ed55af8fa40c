"""Runs an arm on the toy task and kills itself at the given write, rename or evaluation.

Arguments: FOLDER SCRIPT LOG STEPS SEED.
"""

import os
import random
import signal
import sys
from pathlib import Path

from evoteam.llm import ScriptedModel
from evoteam.memory import JOURNAL, SharedFolder, read_events
from evoteam.search import Search
from tests.evoteam.toy import TASK, ToyJudge, settings

folder, script, log = map(Path, sys.argv[1:4])
left, rng = int(sys.argv[4]), random.Random(int(sys.argv[5]))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fatal(call):
    """The call, or death before, in the middle of (for a write), or after it, when its turn has come."""

    def wrapped(*arguments):
        global left
        left -= 1
        if left:
            return call(*arguments)
        if call is write and rng.random() < 0.5:
            write(arguments[0], arguments[1][: rng.randrange(len(arguments[1]))])
        elif rng.random() < 0.5:
            call(*arguments)
        die()

    return wrapped


write = os.write
os.write, os.replace, os.rename = map(fatal, (os.write, os.replace, os.rename))


class Logged(ScriptedModel):
    def ask(self, request):
        with open(log, "a", encoding="utf-8") as file:
            file.write(request.key + "\n")
        return super().ask(request)


class Mortal(ToyJudge):
    def evaluate(self, source, attempt_dir, *, best):
        return fatal(lambda: super(Mortal, self).evaluate(source, attempt_dir, best=best))()


new = not (folder / JOURNAL).exists() or not list(read_events(folder / JOURNAL))
with SharedFolder.open(folder, settings("evolving") if new else None) as shared:
    Search(shared, Logged.load(script), Mortal(), TASK, say=lambda line: None).run()
