"""Inputs of MLA paged decode on which a wrong read shows: whatever must not be read holds NaN or an impossible page."""

import itertools

import torch

GARBAGE_PAGE = 2_147_480_000


def paged_inputs(
    lengths,
    *,
    heads=16,
    page_size=1,
    dtype=torch.bfloat16,
    device="cpu",
    seed=0,
    first=0,
    tail=5,
    fused=False,
    shared_pages=0,
):
    """((q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale), kv_lens) for requests of these lengths.

    Pages are scattered, and only rows that hold a token are not NaN. `first` entries before kv_indptr[0] and `tail`
    entries behind kv_indptr[B] name a page that does not exist. `fused` makes the queries and the caches slices of
    [..., 576] tensors. The first `shared_pages` pages of every request that has more are the same ones.
    kv_lens is None for page_size 1.
    """
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    used = sum(counts)
    pages = max(used + 9, shared_pages + 1)
    scattered = torch.randperm(pages - 1, generator=generator, device=device)[:used] + 1
    indices = torch.full((first + used + tail,), GARBAGE_PAGE, dtype=torch.int32, device=device)
    indices[first : first + used] = scattered.int()
    indptr = torch.tensor(list(itertools.accumulate(counts, initial=first)), dtype=torch.int32, device=device)
    for begin, count in zip(indptr.tolist(), counts):
        if count > shared_pages:
            indices[begin : begin + shared_pages] = torch.arange(1, shared_pages + 1, dtype=torch.int32, device=device)

    cache = torch.full((pages, page_size, 576), float("nan"), dtype=dtype, device=device)
    for begin, count, length in zip(indptr.tolist(), counts, lengths):
        rows = indices[begin : begin + count].long()[:, None] * page_size + torch.arange(page_size, device=device)
        rows = rows.flatten()[:length]
        cache.view(-1, 576)[rows] = torch.randn(length, 576, generator=generator, device=device).to(dtype)
    query = torch.randn(len(lengths), heads, 576, generator=generator, device=device).to(dtype)
    split = (query[..., :512], query[..., 512:], cache[..., :512], cache[..., 512:])
    if not fused:
        split = tuple(part.contiguous() for part in split)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device) if page_size > 1 else None
    return (*split, indptr, indices, 0.1352337747812271), kv_lens
