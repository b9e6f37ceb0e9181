"""Four processes that check a sequence in parts against the whole, in meshes of 1, 2 and 4; one line of JSON a case.

Started once by the tests: importing torch takes longer than all cases. Every process has the whole problem as well, and
computes it alone.
"""

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fork_support import codes_of, forked
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import klformer
from klformer.attention import AttentionSpec
from klformer.distributed import average_gradients, own_part, sequence_parallel, whole_sequences
from klformer.errors import ArgumentError
from klformer.models import InputShape, ModelConfig, build_classifier, build_masked
from klformer.testing.problems import HEAD_DIM, HEADS, VALUE_DIM, small_options
from klformer.testing.subjects import KERNELS

RANKS = 4
#: Where parts end, by their number: uneven ones, and one that is empty.
CUTS = {1: [], 2: [5], 4: [6, 6, 9]}
BATCH, LENGTH, MODEL = 2, 19, 12


def case_names():
    names = []
    for count in CUTS:
        ways = [f"{way} {count}" for way in ("all", "causal")]
        names += [f"encoder {attention} {way}" for attention in KERNELS for way in ways]
        names += [f"float32 {attention} {way}" for attention in KERNELS for way in ways]
        if count > 1:
            names += [f"weights {kind} {way}" for kind in WEIGHTS for way in ways]
            names += [f"model {kind} {count}" for kind in MODELS]
    return [*names, "decoder", "averaged gradients", "equal parts", "checkpointed layers", "refusals", "traffic"]


class Ranks:
    """This process, and how to compare."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.meshes = {
            count: init_device_mesh("cpu", (RANKS // count, count), mesh_dim_names=("data", "sequence"))
            for count in CUTS
        }

    def part(self, x, count, dim=1):
        return x.tensor_split(CUTS[count], dim)[self.rank % count]

    def compare(self, name, actual, expected, tolerance, smallest=1e-6):
        if tolerance > 1e-8:  # single precision: relative to the size of the whole, or to the smallest that counts
            error = (actual - expected).norm() / expected.norm().clamp(min=smallest)
            assert error < tolerance, f"{name}: relative error {error}"
        else:
            torch.testing.assert_close(
                actual, expected, atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}"
            )

    def check(self, model, count, inputs, call, *, tolerance=1e-10, whole_outputs=False, ddp=False):
        """Outputs and gradients of parts are those of the whole; `call(model, cut)` with `cut` giving the inputs.

        Args:
            inputs: Tensors whose gradients are compared as well, if they have any.
            whole_outputs: Outputs are of the whole sequence, the same on all processes.
        """
        generator = torch.Generator().manual_seed(3)
        expected = call(model, lambda x: x)
        weights = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
        (expected * weights).sum().backward()
        of_inputs = [x.grad for x in inputs]
        wanted = {name: p.grad for name, p in model.named_parameters()}
        for x in [*inputs, *model.parameters()]:
            x.grad = None
        leaves = [self.part(x, count).detach().requires_grad_(x.requires_grad) for x in inputs]
        cut = {id(x): leaf for x, leaf in zip(inputs, leaves, strict=True)}
        sequence_parallel(model, self.meshes[count])
        wrapped = DistributedDataParallel(model) if ddp else model
        actual = call(wrapped, lambda x: cut[id(x)] if id(x) in cut else self.part(x, count))
        mine = weights if whole_outputs else self.part(weights, count)
        # The loss is the mean over the processes: of equal ones, or of sums over parts of it, times their number.
        (actual * mine).sum().mul(1 if whole_outputs else count).backward()
        whole_sequences(model)
        self.compare("outputs", actual, expected if whole_outputs else self.part(expected, count), tolerance)
        for leaf, x in zip(leaves, of_inputs, strict=True):
            if x is not None:
                # Gradients of what is not a parameter are those of the sum over all processes.
                self.compare("inputs", leaf.grad / count, self.part(x, count), tolerance)
        if not ddp:
            average_gradients(model, self.meshes[count])
        for name, p in model.named_parameters():
            if wanted[name] is None:
                assert p.grad is None or not p.grad.any(), name
            else:
                self.compare(name, p.grad, wanted[name], tolerance, smallest_that_counts(model, name, wanted))


def smallest_that_counts(model, name, gradients):
    """The norm of a gradient below which there is only rounding. A bias before a batch norm changes nothing: what is
    left of its gradient are terms as large as those of its weight's, which cancel."""
    *path, kind = name.split(".")
    before = path[:-1] and path[-1].isdigit() and model.get_submodule(".".join(path[:-1]))
    following = before[int(path[-1]) + 1] if before and int(path[-1]) + 1 < len(before) else None
    if kind == "bias" and isinstance(following, torch.nn.BatchNorm1d):
        return float(gradients[".".join([*path, "weight"])].norm())
    return 1e-6


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def masks(length=LENGTH):
    mask = torch.rand(BATCH, length) > 0.3
    mask[:, 0] = True
    return mask


def encoder(ranks, attention, direction, count, *, dtype=torch.float64, tolerance=1e-10, **config):
    config = {"rotary": attention == "gmm-rks", "dropout": 0.0} | config
    spec = AttentionSpec(name=attention, options=small_options(attention))
    encoder_config = klformer.EncoderConfig(
        num_layers=2, model_dim=MODEL, num_heads=2, ffn_dim=8, attention=spec, **config
    )
    model = klformer.TransformerEncoder(encoder_config, causal=direction == "causal").to(dtype)
    x, mask = random(BATCH, LENGTH, MODEL, dtype=dtype).requires_grad_(), masks()
    ranks.check(model, int(count), [x], lambda m, cut: m(cut(x), key_mask=cut(mask)), tolerance=tolerance)


#: Attentions with everything that a kernel can have.
WEIGHTS = {
    "prf-gaussian": ("gmm-prf", {"learn_temperature": True}),
    "prf-simplex": ("atoms-prf", {"envelope": "simplex"}),
    "prf-matched": ("performer", {"envelope": "matched"}),
    "rks-smoothing": ("gmm-rks", {"learn_smoothing": True, "smoothing": 1.0}),
    "rks-weighted": ("atoms-rks", {"smoothing": 1.0}),
    "elu": ("linear-elu", {}),
    "hedgehog": ("hedgehog", {}),
}


class Heads(torch.nn.Module):
    """A mechanism with keys that have log-weights."""

    def __init__(self, mechanism, causal):
        super().__init__()
        self.mechanism, self.causal = mechanism, causal

    def forward(self, q, k, v, mask, bias):
        heads = [x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v)]
        out = self.mechanism(*heads, key_mask=mask, key_bias=bias.transpose(1, 2), causal=self.causal)
        return out.transpose(1, 2).flatten(2)


def weights(ranks, kind, direction, count):
    name, options = WEIGHTS[kind]
    mechanism = klformer.build_attention(
        name, num_heads=HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, **(small_options(name) | options)
    ).double()
    for parameter in mechanism.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    q, k, v = (random(BATCH, LENGTH, HEADS * size).requires_grad_() for size in (HEAD_DIM, HEAD_DIM, VALUE_DIM))
    # Later parts are far above earlier ones, and some keys are not there by their log-weight.
    bias = 3 * random(BATCH, LENGTH, HEADS) + torch.linspace(0, 60, LENGTH, dtype=torch.float64)[:, None]
    bias[0, 3] = -torch.inf
    bias.requires_grad_()
    mask = masks()
    mask[1, 1:12] = False
    model = Heads(mechanism, direction == "causal")
    ranks.check(model, int(count), [q, k, v, bias], lambda m, c: m(c(q), c(k), c(v), c(mask), c(bias)))


#: What is read off a sequence, and the positions.
MODELS = {
    "cls sinusoidal": {"pooling": "cls"},
    "mean learned": {"pooling": "mean", "positions": "learned"},
    "cls neighbours": {"pooling": "cls", "convolution_width": 3},
    "mean neighbours beyond a part": {"pooling": "mean", "convolution_width": 11},
    "cls rotary separator": {"pooling": "cls", "positions": "rotary"},
    "positions": {"of_positions": True},
    "causal positions": {"of_positions": True, "causal": True},
    "pair": {"is_pair": True, "convolution_width": 3},
    "masked": {"convolution_width": 5},
}


def model(ranks, *words):
    kind, count = " ".join(words[:-1]), int(words[-1])
    settings = MODELS[kind]
    sizes = {name: settings[name] for name in ("pooling", "positions", "convolution_width") if name in settings}
    config = ModelConfig(num_layers=2, num_heads=2, model_dim=MODEL, head_dim=4, ffn_dim=8, dropout=0.0, **sizes)
    spec = AttentionSpec(name="gmm-prf", options=small_options("gmm-prf"))
    tokens, mask = torch.randint(0, 9, (BATCH, LENGTH)), masks()
    if kind == "masked":
        built = build_masked(config, spec, InputShape(max_len=LENGTH), counts=torch.arange(9)).double()
        asked = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        asked[:, 2::4] = True
        # Row by row, as the model gives them: compared through a sum over rows that weighs tokens.
        ranks.check(built, count, [], lambda m, c: spread(m(c(tokens), c(mask), c(asked)), c(asked)), ddp=True)
        return
    given = {name: settings[name] for name in ("of_positions", "causal") if name in settings}
    separator = 8 if "separator" in kind else None
    shape = InputShape(LENGTH + 2, vocab_size=9, is_pair=settings.get("is_pair", False), separator=separator)
    built = build_classifier(config, spec, shape, num_outputs=3, **given).double()
    for name, parameter in built.named_parameters():
        if name.endswith(("cls_token", "types")):  # zero at first
            parameter.data.normal_()
    if kind == "pair":
        second, second_mask = torch.randint(0, 9, (BATCH, LENGTH + 2)), masks(LENGTH + 2)
        ranks.check(
            built, count, [], lambda m, c: m(c(tokens), c(second), c(mask), c(second_mask)),
            whole_outputs=True, ddp=True,
        )  # fmt: skip
        return
    whole = not settings.get("of_positions", False)
    ranks.check(built, count, [], lambda m, c: m(c(tokens), c(mask)), whole_outputs=whole, ddp=True)


def spread(rows, asked):
    """Rows (M, .) at their places, (B, L, .)."""
    places = rows.new_zeros(*asked.shape, rows.shape[-1])
    return places.masked_scatter(asked.unsqueeze(-1), rows)


def decoder(ranks):
    spec = AttentionSpec(name="gmm-prf", options=small_options("gmm-prf"))
    config = klformer.EncoderConfig(
        num_layers=2, model_dim=MODEL, num_heads=2, ffn_dim=8, dropout=0.0, attention=spec, rotary=True
    )
    built = klformer.TransformerDecoder(config, cross_attention=True).double()
    x, memory = (random(BATCH, length, MODEL).requires_grad_() for length in (LENGTH, 23))
    mask = masks(23)
    for count in (2, 4):
        ranks.check(built, count, [x, memory], lambda m, c: m(c(x), c(memory), memory_mask=c(mask)))
        built.zero_grad()
        x.grad = memory.grad = None


def averaged_gradients(ranks):
    linear = torch.nn.Linear(2, 1)
    linear.weight.grad = torch.full((1, 2), float(ranks.rank))
    average_gradients(linear, ranks.meshes[2])
    assert torch.equal(linear.weight.grad, torch.full((1, 2), (RANKS - 1) / 2))
    assert linear.bias.grad is None


def equal_parts(ranks):
    x = torch.arange(10).unsqueeze(0)
    mine = own_part(x, ranks.meshes[4])
    assert mine.shape[1] == (3, 3, 2, 2)[ranks.rank]
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, mine.tolist()[0])
    assert [token for part in gathered for token in part] == list(range(10))


def checkpointed_layers(ranks):
    encoder(ranks, "gmm-rks", "all", 4, checkpoint_layers=True)
    encoder(ranks, "gmm-prf", "causal", 2, checkpoint_layers=True)


def refusals(ranks):
    def refused(model, *words, mesh=ranks.meshes[4]):
        with pytest.raises(ArgumentError) as found:
            sequence_parallel(model, mesh)
        assert all(word in str(found.value) for word in words), found.value

    for name in ("softmax", "local", "linformer", "reformer"):
        config = klformer.EncoderConfig(model_dim=MODEL, num_heads=2, max_len=8, attention=name)
        found = klformer.TransformerEncoder(config)
        refused(found, "layers.0.self_attention.mechanism", type(found.layers[0].self_attention.mechanism).__name__)
    refused(torch.nn.Sequential(torch.nn.Conv1d(1, 1, 3)), "0 is a Conv1d, which needs whole sequences")
    refused(torch.nn.LSTM(2, 2), "LSTM")
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    refused(torch.nn.Linear(1, 1), "must have one dimension", "('data', 'tensor')", mesh=other)


def traffic(ranks):
    """What is said does not depend on the length."""
    counted = []
    for length in (64, 256):
        for causal in (False, True):
            config = klformer.EncoderConfig(
                model_dim=MODEL, num_heads=2, dropout=0.0, attention="gmm-prf:num_frequencies=8"
            )
            built = sequence_parallel(klformer.TransformerEncoder(config, causal=causal), ranks.meshes[4])
            built(torch.randn(1, length // RANKS, MODEL)).sum().backward()
            counted.append(dict(built.layers[0].self_attention.mechanism.parts.traffic.bytes))
    assert counted[0] == counted[2]
    assert counted[1] == counted[3]
    # Two layers of two heads: 8 frequencies by 6 values and a one, in 4 bytes.
    sums, shifts = 2 * 2 * 8 * 7 * 4, 2 * 2 * 8 * 4
    assert counted[0] == {"largest": shifts, "sum": sums, "sum of gradients": sums}, counted[0]
    assert counted[1] == {"gather": shifts, "gather of sums": sums, "gather of gradients": sums}, counted[1]


def float32(ranks, attention, direction, count):
    encoder(ranks, attention, direction, count, dtype=torch.float32, tolerance=1e-5)


FUNCTIONS = {
    "encoder": encoder, "weights": weights, "model": model, "float32": float32, "decoder": decoder,
    "averaged": averaged_gradients, "equal": equal_parts, "checkpointed": checkpointed_layers, "refusals": refusals,
    "traffic": traffic,
}  # fmt: skip
NO_WORDS = {"averaged gradients", "equal parts", "checkpointed layers"}


def run_all(rank, folder):
    # A rank that fails in the middle of a case leaves the others waiting: they fail as well, and say so.
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=patience)
    ranks, results = Ranks(), {}
    for name in sys.argv[2:] or case_names():
        first, *words = name.split()
        torch.manual_seed(0)
        try:
            FUNCTIONS[first](ranks, *([] if name in NO_WORDS else words))
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        # A case that failed on one may have left others waiting, were it not for this.
        failed = torch.tensor(float(bool(results[name])))
        dist.all_reduce(failed)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with torch.no_grad():  # what torch imports when it is first used, it imports here once
        klformer.build_attention("gmm-rks", num_heads=1, head_dim=2)(*torch.ones(3, 1, 1, 2, 2))
    codes = codes_of(forked(lambda rank: run_all(rank, folder), RANKS))
    sys.exit(max(codes, key=abs))


if __name__ == "__main__":
    main()
