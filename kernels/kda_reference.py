"""Kimi Delta Attention, token by token in float64: the definition of a right answer.

Per head, with the state S of shape [V, K]:  S <- S diag(exp(g_t));  S <- S + beta_t (v_t - S k_t) k_t^T;  o_t = S q_t.
q and k are L2-normalized (epsilon 1e-6 inside the root) and q is scaled. Source: Kimi Linear, arXiv 2510.26692, eq. 1.
"""

import torch


def log_decay(
    g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, gate: str, lower_bound: float
) -> torch.Tensor:
    """Natural-log decay, float64, shape of `g` [..., H, K]; `A_log` [H], `dt_bias` [H * K] or [H, K]."""
    heads, dim = g.shape[-2:]
    rate = A_log.double().exp()[:, None]
    x = g.double() + dt_bias.double().reshape(heads, dim)
    if gate == "safe":
        return lower_bound * torch.sigmoid(rate * x)
    if gate == "softplus":
        return -rate * torch.nn.functional.softplus(x, threshold=1e9)
    raise ValueError(f"gate is {gate!r}; it must be 'safe' or 'softplus'")


def kda_reference(
    q, k, v, g, beta, *, A_log, dt_bias, scale=None, gate="safe", lower_bound=-5.0, initial_state=None, cu_seqlens=None
):
    """Arguments as `kda_prefill.kda_prefill`. Returns `o` [B, T, H, V] and the final states [N, H, V, K], both
    float64."""
    batch, tokens, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    q, k = (x.double() * torch.rsqrt(x.double().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    alpha = log_decay(g, A_log, dt_bias, gate, lower_bound).exp()
    beta, v = beta.double().sigmoid(), v.double()
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        ends = cu_seqlens.tolist()
        spans = [(0, start, end) for start, end in zip(ends, ends[1:], strict=False)]
    o = torch.zeros(batch, tokens, heads, v.shape[-1], dtype=torch.float64, device=q.device)
    final = torch.zeros(len(spans), heads, v.shape[-1], dim, dtype=torch.float64, device=q.device)
    if initial_state is not None:
        final += initial_state
    for n, (b, start, end) in enumerate(spans):
        state = final[n]
        for t in range(start, end):
            state = state * alpha[b, t, :, None, :]
            error = v[b, t] - torch.einsum("hvk,hk->hv", state, k[b, t])
            state = state + torch.einsum("hv,hk->hvk", beta[b, t, :, None] * error, k[b, t])
            o[b, t] = torch.einsum("hvk,hk->hv", state, q[b, t]) * scale
        final[n] = state
    return o, final
