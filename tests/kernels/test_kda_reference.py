"""The fp64 reference of KDA against the closed forms of its definition."""

import math

import pytest
import torch

from kernels.kda_reference import kda_reference, log_decay
from kernels.kda_regimes import DIM, kda_inputs


def unit(x):
    return x.double() / x.double().norm(dim=-1, keepdim=True)


def test_one_token_by_hand():
    (q, k, v, g, beta), keywords = kda_inputs([1])
    o, state = kda_reference(q, k, v, g, beta, **keywords)
    gate = -5 * torch.sigmoid(keywords["A_log"].double().exp() * (g.double() + keywords["dt_bias"].double()))
    decayed = keywords["initial_state"][0, 0].double() * gate.flatten().exp()
    key, value = unit(k).flatten(), v.double().flatten()
    wanted = decayed + torch.sigmoid(beta.double()).item() * torch.outer(value - decayed @ key, key)
    torch.testing.assert_close(state[0, 0], wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(o.flatten(), wanted @ unit(q).flatten() / math.sqrt(DIM), rtol=1e-5, atol=1e-6)


def test_orthogonal_keys_without_decay_are_remembered():
    """beta = 1 and gates of 0: the state maps every key to its value."""
    k = torch.eye(DIM)[None, :40, None]
    v = torch.randn(1, 40, 1, DIM)
    o, state = kda_reference(
        k,
        k,
        v,
        torch.full_like(k, -1e9),
        torch.full((1, 40, 1), 1e9),
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(DIM),
        scale=1.0,
    )
    torch.testing.assert_close(o, v.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[0, 0, :, :40], v[0, :, 0].double().T, rtol=1e-5, atol=1e-5)


def test_gates():
    g = torch.tensor([-1e9, 0.0, 1e9])[:, None, None].expand(3, 1, DIM)
    A_log, bias = torch.tensor([math.log(2.0)]), torch.zeros(DIM)
    assert log_decay(g, A_log, bias, "safe", -5.0)[:, 0, 0].tolist() == [0, -2.5, -5]
    softplus = log_decay(torch.tensor([0.0, 50.0])[:, None, None].expand(2, 1, DIM), A_log, bias, "softplus", -5.0)[
        :, 0, 0
    ]
    assert softplus.tolist() == pytest.approx([-2 * math.log(2), -100])
    with pytest.raises(ValueError, match="gate is 'sigmoid'; it must be 'safe' or 'softplus'"):
        log_decay(g, A_log, bias, "sigmoid", -5.0)


def test_sequences_are_independent_and_states_continue():
    arguments, keywords = kda_inputs([6, 0, 9], heads=2)
    o, state = kda_reference(*arguments, **keywords)
    assert torch.equal(state[1], keywords["initial_state"][1].double())
    alone = keywords | {"initial_state": keywords["initial_state"][2:], "cu_seqlens": None}
    o_alone, state_alone = kda_reference(*(x[:, 6:] for x in arguments), **alone)
    torch.testing.assert_close(o[:, 6:], o_alone)
    torch.testing.assert_close(state[2:], state_alone)
