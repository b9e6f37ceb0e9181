"""States that merge: equal to reading the concatenation, in any order, through files, for every map and weight."""

import math
import random

import pytest
import torch
from support import build, half_masked, operands

import klformer
from klformer import KernelState
from klformer.errors import ArgumentError, FileError
from klformer.testing.subjects import KERNELS

BATCH, HEADS, DIM, VALUES, FREQUENCIES = 2, 3, 5, 7, 11
#: Maps with what they can have besides.
SETTINGS = {
    "prf": {"frequency_bias": (HEADS, FREQUENCIES)},
    "rks": {"frequency_bias": (1, FREQUENCIES), "smoothing": 0.3},
    "rks paired": {"pair_offset": (HEADS, DIM), "smoothing": 0.3},
    "elu": {},
}


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(params=SETTINGS)
def setting(request):
    """Everything but the sequences: arguments of `KernelState.of` and of `spectral_product`."""
    name, _, _ = request.param.partition(" ")
    given = {key: normal(*x) if isinstance(x, tuple) else x for key, x in SETTINGS[request.param].items()}
    return {"omega": None if name == "elu" else normal(HEADS, FREQUENCIES, DIM), "feature_map": name, **given}


def document(length, *, spread=1.0):
    k, v = spread * normal(BATCH, HEADS, length, DIM), normal(BATCH, HEADS, length, VALUES)
    mask = torch.rand(BATCH, length) > 0.2
    return {"k": k, "v": v, "key_mask": mask, "key_bias": 3 * normal(BATCH, 1, length)}


def together(documents):
    return {
        name: torch.cat([each[name] for each in documents], 1 if name == "key_mask" else 2) for name in documents[0]
    }


def exact(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_merged_states_are_that_of_the_concatenation(setting):
    # The second is far away: exp(omega.k) of one would be nothing beside the other without a logarithm of its own.
    documents = [document(13), document(29, spread=12.0), document(1), document(0)]
    states = [KernelState.of(**each, **setting) for each in documents]
    q = normal(BATCH, HEADS, 6, DIM)
    expected = klformer.spectral_product(q, **together(documents), **setting)
    exact(KernelState.merge(*states).read(q), expected)
    a, b, c, nothing = states
    exact(KernelState.merge(KernelState.merge(nothing, c), KernelState.merge(b, a)).read(q), expected)
    exact(a.absorb(**documents[1]).absorb(**documents[2]).read(q), expected)
    exact(states[3].read(q), torch.zeros_like(expected))


def test_a_thousand_documents_in_random_orders(setting):
    documents = [document(random.Random(i).randint(1, 9)) for i in range(1000)]
    states = [KernelState.of(**each, **setting) for each in documents]
    q = normal(BATCH, HEADS, 6, DIM)
    expected = klformer.spectral_product(q, **together(documents), **setting)
    for seed in range(3):
        pool, generator = list(states), random.Random(seed)
        generator.shuffle(pool)
        if seed == 2:  # as a tree whose shape is random, too
            while len(pool) > 1:
                at = generator.randrange(len(pool) - 1)
                pool[at : at + 2] = [KernelState.merge(*pool[at : at + 2])]
        exact(KernelState.merge(*pool).read(q), expected)


def test_a_shift_changes_nothing_and_sums_of_one_reference_are_merged_by_adding(setting):
    first, second = (KernelState.of(**document(9, spread=3.0), **setting) for _ in range(2))
    q = normal(BATCH, HEADS, 6, DIM)
    common = torch.maximum(first.reference, second.reference)
    moved = [state.shift(common) for state in (first, second)]
    for before, after in zip((first, second), moved, strict=True):
        exact(after.reference, common)
        exact(after.read(q), before.read(q))
    merged = KernelState.merge(first, second)
    exact(merged.sums.values, sum(state.sums.values for state in moved))


def test_a_document_can_weigh_more(setting):
    first, second = document(9), document(7)
    q = normal(BATCH, HEADS, 6, DIM)
    state = KernelState.merge(
        KernelState.of(**first, **setting).weigh(math.log(2)), KernelState.of(**second, **setting)
    )
    exact(state.read(q), klformer.spectral_product(q, **together([first, first, second]), **setting))


def test_files(setting, tmp_path):
    state = KernelState.of(**document(9), **setting)
    state.save(tmp_path / "state.safetensors")
    again = KernelState.load(tmp_path / "state.safetensors")
    q = normal(BATCH, HEADS, 6, DIM)
    assert torch.equal(again.read(q), state.read(q))
    exact(KernelState.merge(again, state).read(q), state.read(q))
    assert list(tmp_path.iterdir()) == [tmp_path / "state.safetensors"]


def test_files_that_are_no_states_are_refused(tmp_path):
    with pytest.raises(FileError, match=r"can't read .*missing"):
        KernelState.load(tmp_path / "missing.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    with pytest.raises(FileError, match="can't read"):
        KernelState.load(tmp_path / "torn.safetensors")
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(FileError, match="holds no state of a kernel"):
        KernelState.load(tmp_path / "weights.safetensors")
    with pytest.raises(FileError, match="can't write"):
        KernelState.of(**document(1), omega=None, feature_map="elu").save(tmp_path / "torn.safetensors" / "x")


def test_damaged_files_are_refused(setting, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    state, path = KernelState.of(**document(9), **setting), tmp_path / "state.safetensors"
    state.save(path)
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def refused(message, *, without="", **changed):
        said = {name: text for name, text in {**about, **changed}.items() if name != without}
        held = {name: x for name, x in tensors.items() if name != without}
        save_file({name: changed.get(name, x) for name, x in held.items()}, path,
                  {name: text for name, text in said.items() if isinstance(text, str)})  # fmt: skip
        with pytest.raises(FileError, match=message):
            KernelState.load(path)

    for name in ("feature_map", "simplex", "norm_coefficient"):
        refused(f"is damaged: it does not say {name}", without=name)
    refused("is damaged: unknown feature map 'cosine'", feature_map="cosine")
    refused("is damaged", norm_coefficient="four")
    if setting["omega"] is not None:
        refused("is damaged: feature_map .* needs frequencies", without="kernel.omega")
        short = {"kernel.omega": tensors["kernel.omega"][:2]}
        refused(r"is damaged: omega must be floating-point of shape \(3 or 1, R", **short)
    for name in ("values", "weights", "log_scale"):
        refused("holds no state of a kernel", without=name)
        refused("is damaged", **{name: tensors[name][..., :0]})
        refused(f"is damaged: {name} is", **{name: tensors[name].long()})


def test_references_and_weights_of_other_shapes_are_refused(setting):
    state = KernelState.of(**document(9), **setting)
    with pytest.raises(ArgumentError, match=r"reference must be broadcastable to \(2, 3, \d+\), got shape \(5, 1, 1\)"):
        state.shift(normal(5, 1, 1))
    for shape in [(BATCH + 1,), (HEADS, BATCH), (BATCH, HEADS, 1)]:
        with pytest.raises(ArgumentError, match=r"log_weight must be broadcastable to \(2, 3\)"):
            state.weigh(normal(*shape))


def test_what_does_not_fit_is_refused(setting):
    state = KernelState.of(**document(9), **setting)
    others = {"elu": {"omega": normal(1, FREQUENCIES, DIM), "feature_map": "prf"}}
    other = KernelState.of(**document(9), **others.get(setting["feature_map"], {"omega": None, "feature_map": "elu"}))
    with pytest.raises(ValueError, match="number 2 has another"):
        KernelState.merge(state, other)
    smaller = {name: x[:1] for name, x in document(9).items()}
    with pytest.raises(ValueError, match="the same number of sequences"):
        KernelState.merge(state, KernelState.of(**smaller, **setting))
    with pytest.raises(ValueError, match="q must be floating-point of shape"):
        state.read(normal(BATCH, HEADS, 6, DIM + 1))
    with pytest.raises(ValueError, match="v must have shape"):
        state.absorb(document(2)["k"], normal(BATCH, HEADS, 2, VALUES + 1))


@pytest.mark.parametrize("name", KERNELS)
def test_states_of_every_kernel_attention_merge(name):
    mechanism, x = build(name).eval(), operands(keys=13)
    mask = half_masked(keys=13)
    parts = [slice(0, 4), slice(4, 13)]
    states = [
        mechanism.absorb(mechanism.initial_state(2), x.k[:, :, p], x.v[:, :, p], key_mask=mask[:, p]) for p in parts
    ]
    exact(mechanism.read(mechanism.merge(*states), x.q), mechanism(*x, key_mask=mask))
    values = [mechanism.kernel_state(x.k[:, :, p], x.v[:, :, p], key_mask=mask[:, p]) for p in parts]
    exact(mechanism.read(mechanism.merge(*values), x.q), mechanism(*x, key_mask=mask))


def test_memories_of_a_layer_merge_and_others_are_refused():
    tokens, x = torch.randn(2, 9, 12), torch.randn(2, 4, 12)
    for attention, rotary, problem in [("gmm-prf", False, None), ("gmm-prf", True, "begin at position 0"),
                                       ("softmax", False, "has no states that can be merged")]:  # fmt: skip
        layer = klformer.MultiheadAttention(model_dim=12, num_heads=2, attention=attention, rotary=rotary)
        states = [layer.absorb(layer.initial_state(2), tokens[:, part]) for part in (slice(0, 5), slice(5, 9))]
        if problem is None:
            torch.testing.assert_close(layer.read(layer.merge(*states), x), layer(x, tokens), atol=1e-5, rtol=1e-5)
        else:
            with pytest.raises(ValueError, match=problem):
                layer.merge(*states)
