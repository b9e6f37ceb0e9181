"""As few atoms as an error budget allows: `num_frequencies="auto"`."""

import pytest
import torch
from conversion_support import FAMILIES, answer, batch, batches, convert
from torch.testing import assert_close

import klformer
from klformer.conversion import prune
from klformer.conversion.hosts import Call
from klformer.conversion.record import SiteRecord
from klformer.errors import ArgumentError

HEADS, DIM, ATOMS = 3, 5, 16


@pytest.fixture
def record():
    spec = klformer.AttentionSpec(name="atoms-prf", options={"num_frequencies": ATOMS, "learn_temperature": True})
    return SiteRecord(attention=spec.complete(), num_heads=HEADS, head_dim=DIM, value_dim=DIM)


def make_call(seed=0, *, causal=False):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, HEADS, 11, DIM, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(11).expand(2, 11) < torch.tensor([[11], [7]])
    return Call(q, k, v, mask, causal)


def test_shares_are_what_attention_sums_up(record):
    """Against explicit features: what the atoms add to the denominators, as shares."""
    mechanism, call = record.build().double(), make_call()
    torch.nn.init.normal_(mechanism.kernel.spectrum.omega)
    torch.nn.init.normal_(mechanism.kernel.spectrum.log_weight)
    torch.nn.init.constant_(mechanism.kernel.log_temperature, 0.3)
    queries, keys = (mechanism.features(x, role) for x, role in ((call.q, "query"), (call.k, "key")))
    parts = queries * (keys * call.key_mask[:, None, :, None]).sum(2, keepdim=True)
    shares = parts / parts.sum(-1, keepdim=True) * call.key_mask[:, None, :, None]
    assert_close(prune.shares_in_call(mechanism, call).double(), shares.sum((0, 2)), rtol=1e-4, atol=1e-5)


def test_what_weighs_nothing_can_go(record):
    mechanism, call = record.build().double(), make_call()
    atoms = mechanism.kernel.spectrum
    torch.nn.init.constant_(mechanism.kernel.log_temperature, 0.3)
    least = torch.tensor([[1, 4], [0, 15], [7, 8]])  # of each head others
    with torch.no_grad():
        atoms.log_weight.normal_().scatter_(1, least, -80.0)
        # Keys must not be seen by them either: their features sum to one over all atoms.
        call.k[..., 0], atoms.omega[..., 0] = 50.0, 0.0
        atoms.omega.scatter_(1, least.unsqueeze(-1).expand(-1, -1, DIM), 0.0)
        atoms.omega[torch.arange(HEADS).unsqueeze(-1), least, 0] = -50.0
    fewer = prune.without_least(
        mechanism, record.having("num_frequencies", ATOMS - 2), prune.shares_in_call(mechanism, call)
    ).double()
    assert fewer.kernel.spectrum.num_frequencies == ATOMS - 2
    assert_close(call.attend(fewer), call.attend(mechanism))


@pytest.mark.parametrize(("budget", "expected"), [(1e-9, 32), (5.0, 8)])
def test_budgets(budget, expected):
    """D = 8: 32 atoms at the start, which a budget that nothing meets leaves, and 8 at the end."""
    conversion = convert(
        FAMILIES["bert"](), batches("bert"), options={"num_frequencies": "auto"}, error_budget=budget, steps=2
    )
    assert [layer.num_frequencies for layer in conversion.certificate.layers] == [expected] * 2


def test_layers_get_what_they_need(tmp_path):
    """The budget lies between the errors of the layers: both keep it who can, and as they are they come back."""
    model, data = FAMILIES["bert"]().eval(), batches("bert", 20)
    # The same to choose and to measure by: what is chosen is seen then.
    held_out = {"choosing": data[:2], "evaluation": data[:2]}
    whole = convert(model, data[2:], options={"num_frequencies": 32}, steps=30, **held_out)
    budget = 1.1 * min(layer.mean() for layer in whole.certificate.layers)
    seen = []
    conversion = convert(
        model,
        data[2:],
        **held_out,
        attention="atoms-prf:num_frequencies=auto",
        steps=30,
        error_budget=budget,
        progress=lambda *said: seen.append(said),
    )
    for before, after in zip(whole.certificate.layers, conversion.certificate.layers, strict=True):
        if before.mean() > budget:
            assert after.num_frequencies == 32
            assert after.fitted == before.fitted
        else:
            assert after.mean() <= budget
    rounds = [(step, steps) for stage, step, steps, _ in seen if stage == "prune"]
    assert len({steps for _, steps in rounds}) == 1
    assert rounds[-1][0] == rounds[-1][1]
    assert [step for step, _ in rounds] == sorted(step for step, _ in rounds)
    conversion.save(tmp_path)
    loaded = klformer.load_converted(tmp_path)
    assert torch.equal(answer(loaded, batch("bert")), answer(conversion.model, batch("bert")))


@pytest.mark.parametrize("attention", ["gmm-prf", "hedgehog", "atoms-rks", "atoms-prf:envelope=gaussian"])
def test_refused_where_there_are_no_atoms_to_drop(attention):
    with pytest.raises(ArgumentError, match=r"num_frequencies='auto' needs .* 'atoms-prf'"):
        convert(FAMILIES["bert"](), batches("bert"), attention=attention, options={"num_frequencies": "auto"})
