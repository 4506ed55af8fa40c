"""The 47 MLA paged-decode workloads, and page tables with the structure that the published ones have.

The lengths, identifiers and the sharing of prompt pages are facts in `workloads.json`. The page numbers are generated:
a radix cache gives requests with a common prefix the same pages, a prompt takes the rest of its pages from the free
list one after another, and a decode step takes one page a request. A fresh pool hands out a contiguous range, so
decoded tokens interleave with a stride of the batch size; a used pool hands out fragments (family 8, workload 14).
"""

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading a task's definition takes no NumPy; making inputs does
    import numpy as np

FACTS = json.loads(Path(__file__).with_name("workloads.json").read_text())
NUM_PAGES: int = FACTS["num_pages"]
SM_SCALE: float = FACTS["sm_scale"]
NUM_HEADS: int = FACTS["num_heads"]
HEAD_DIM_CKV: int = FACTS["head_dim_ckv"]
HEAD_DIM_KPE: int = FACTS["head_dim_kpe"]

# Eight workloads that span the lengths and batch sizes: what a kernel's author is shown while searching.
FEEDBACK = (1, 11, 9, 16, 22, 29, 45, 41)

# (gap between neighboring free pages, pages) of a used pool, in the order they are handed out; gap 0 stands for
# irregular gaps. Shares follow family 8, where they show as strides of gap x 64 when decoding.
_PROMPT_FRAGMENTS = ((0, 900), (1, 480), (2, 400), (1, 480), (0, 700), (4, 480), (1, 480), (2, 400), (8, 480), (1, 480))
_FIRST_DECODE_FRAGMENTS = ((0, 384), (16, 460), (8, 450), (16, 460), (8, 450))
_LATER_DECODE_FRAGMENTS = (
    *((16, 460),) * 6,
    (32, 420),
    (32, 430),
    (4, 420),
    (32, 420),
    (32, 430),
    (16, 460),
    (32, 420),
    (2, 420),
    (32, 420),
    (32, 430),
    (16, 460),
    (32, 420),
)
_IRREGULAR_GAPS = ((1, 2, 3, 4, 5, 14), (0.50, 0.20, 0.20, 0.03, 0.05, 0.02))  # and their shares
_CACHED_RUN = 128  # pages between runs of the radix cache; the longest shared run has 84


@dataclass(frozen=True, slots=True)
class Workload:
    """One decode step of one request family."""

    index: int  # row in the published list, 0..46
    uuid: str
    family: int
    lens: tuple[int, ...]  # tokens in the cache, one a request
    decoded: int = 0  # how many of each request's last tokens came from decode steps
    steps: int = 0  # decode steps since the family's first workload
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()  # (requests, prompt tokens with pages they have in common)
    fragmented: bool = False
    num_pages: int = NUM_PAGES

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def tokens(self) -> int:
        return sum(self.lens)

    @property
    def duplicate_page_refs(self) -> int:
        return sum((len(requests) - 1) * tokens for requests, tokens in self.shared)


@functools.cache
def load_workloads() -> tuple[Workload, ...]:
    """All 47 workloads in the published order."""
    found = []
    for family in FACTS["families"]:
        batch = family["batch_size"]
        shared = tuple(
            (tuple(range(batch)) if requests == "all" else tuple(requests), tokens)
            for requests, tokens in family["shared"]
        )
        for snapshot in family["snapshots"]:
            steps = snapshot["steps"]
            decoded = family["decoded"] + steps if batch > 1 else 0
            lens = tuple(length + steps for length in family["base_lens"])
            fragmented = snapshot.get("pool", family["pool"]) == "fragmented"
            found.append(
                Workload(
                    snapshot["index"], snapshot["uuid"], family["family"], lens, decoded, steps, shared, fragmented
                )
            )
    return tuple(sorted(found, key=lambda workload: workload.index))


def random_workloads(
    seed: int, count: int = 40, max_len: int = 32_768, max_tokens: int = 262_144
) -> tuple[Workload, ...]:
    """Shapes outside the 47: batch 1..256 (log-uniform), lengths Zipf or uniform, on scattered pages or on fragments.

    At most `max_len` tokens a request and `max_tokens` in all. Indices start at 1000, family is -1.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        batch = int(round(256 ** rng.random()))
        longest = min(max_len, max_tokens // batch)
        if i % 2:
            lens = rng.integers(1, longest, size=batch, endpoint=True)
        else:
            lens = np.minimum(rng.zipf(1.3, size=batch) * 16, longest)
        found.append(
            Workload(1000 + i, f"random-{seed}-{i}", -1, tuple(int(n) for n in lens), fragmented=bool(i % 4 > 1))
        )
    return tuple(found)


def page_table(workload: Workload, seed: int) -> "tuple[np.ndarray, np.ndarray]":
    """(kv_indptr int32 [batch + 1], kv_indices int32 [tokens]) of a workload, page size 1.

    The workloads of one family continue each other: with the same seed, a later one extends an earlier one's table.
    Page 0 is never used and page 1 holds the first token of every request.
    """
    import numpy as np

    single = workload.batch == 1 or workload.family < 0
    rng = np.random.default_rng((seed, workload.family + 1, workload.index if single else 0))
    if workload.family < 0 and not workload.fragmented:
        pages = rng.permutation(workload.num_pages - 1)[: workload.tokens] + 1
        return _indptr(workload.lens), pages.astype(np.int32)

    cached = iter(rng.permutation(np.arange(16, 120_000, _CACHED_RUN)).tolist())
    free = _free_pages(rng, workload, first=120_000)
    prompts = _cached_prefixes(rng, workload, cached)
    for prompt, length in zip(prompts, workload.lens):
        prompt.extend(next(free) for _ in range(length - workload.decoded - len(prompt)))
    if workload.fragmented:
        free = _decode_pages(rng, workload)
    for _ in range(workload.decoded):
        for pages in prompts:
            pages.append(next(free))
    return _indptr(workload.lens), np.concatenate([np.asarray(pages, dtype=np.int32) for pages in prompts])


def _indptr(lens: tuple[int, ...]) -> "np.ndarray":
    import numpy as np

    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def _cached_prefixes(rng, workload: Workload, cached: Iterator[int]) -> list[list[int]]:
    """Pages that were in the radix cache before: those that requests share, then up to three of older requests."""
    prefixes = [[] for _ in workload.lens]
    for requests, tokens in workload.shared or ((range(workload.batch), 1),):
        start = next(cached) if prefixes[requests[0]] else 1
        for request in requests:
            prefixes[request].extend(range(start, start + tokens))
    for prefix, length in zip(prefixes, workload.lens):
        room = length - workload.decoded - len(prefix)
        prefix.extend(next(cached) for _ in range(min(int(rng.integers(0, 4)), max(room - 1, 0))))
    return prefixes


def _free_pages(rng, workload: Workload, first: int) -> Iterator[int]:
    if not workload.fragmented:
        return iter(range(first + int(rng.integers(0, 300_000)), NUM_PAGES))
    return _fragments(rng, _PROMPT_FRAGMENTS, first)


def _decode_pages(rng, workload: Workload) -> Iterator[int]:
    before = (workload.decoded - workload.steps) * workload.batch
    yield from itertools.islice(_fragments(rng, _FIRST_DECODE_FRAGMENTS, 300_000), before)
    yield from _fragments(rng, _LATER_DECODE_FRAGMENTS, 600_000)


def _fragments(rng, kinds: tuple[tuple[int, int], ...], first: int) -> Iterator[int]:
    """Pages of fragment after fragment, four neighbors at a time in random order: page numbers also jump back."""
    import numpy as np

    base, endless = first, itertools.cycle(kinds)
    while True:
        placed = []
        for gap, length in itertools.islice(endless, 4):
            gaps = (
                rng.choice(_IRREGULAR_GAPS[0], size=length, p=_IRREGULAR_GAPS[1]) if gap == 0 else np.full(length, gap)
            )
            placed.append(base + np.cumsum(gaps))
            base = int(placed[-1][-1]) + 1
        for i in rng.permutation(4):
            yield from placed[i].tolist()
