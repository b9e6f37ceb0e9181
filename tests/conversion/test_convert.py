"""What a conversion does: kernels come near softmax, layers are chosen, models of klformer, other attentions."""

import pytest
import torch
from conversion_support import FAMILIES, answer, batch, batches, convert
from torch.testing import assert_close

import klformer
from klformer.conversion import distil, fitting, start
from klformer.conversion.batches import Batches
from klformer.conversion.hf import TransformersHost
from klformer.conversion.hosts import Answer, Call
from klformer.conversion.labels import asked_about
from klformer.conversion.own import OwnHost
from klformer.models import InputShape, ModelConfig, build_classifier


def mean_errors(conversion):
    layers = conversion.certificate.layers
    return [sum(layer.start) / len(layer.start) for layer in layers], [layer.mean() for layer in layers]


def test_three_steps_are_what_convert_does():
    model, data = FAMILIES["bert"]().eval(), batches("bert", 12)
    config = klformer.ConversionConfig(steps=3, finetune_steps=2, keep_softmax=1)
    given = {"options": {"num_frequencies": 8}, "config": config}
    whole = klformer.convert(model, data, **given)
    planned = klformer.conversion.plan(model, data, **given)
    assert [site.name for site in planned.sites] == list(planned.records)
    assert not any(hasattr(module, "klformer") for module in planned.teacher.model.modules())
    fitted = klformer.conversion.fit(planned)
    assert len(fitted.kept) == 1
    apart = klformer.conversion.certify(fitted)
    assert torch.equal(answer(apart.model, data[0]), answer(whole.model, data[0]))
    for part in ("layers", "teacher", "linear", "hybrid", "notes"):
        assert getattr(apart.certificate, part) == getattr(whole.certificate, part)


def test_steps_are_those_of_the_config_or_those_that_are_given():
    config, seen = klformer.ConversionConfig(steps=4), []
    for steps in (None, 2):
        said = []
        klformer.convert(
            FAMILIES["bert"](),
            batches("bert"),
            config=config,
            steps=steps,
            progress=lambda *said_: said.append(said_),  # noqa: B023
        )
        seen.append([step[1:3] for step in said if step[0] == "fit"][-1])
    assert seen == [(4, 4), (2, 2)]


def test_kernels_come_nearer_to_softmax():
    """On batches that they were not fitted to."""
    before, after = mean_errors(
        convert(FAMILIES["bert"](), batches("bert", 40), options={"num_frequencies": 8}, steps=80)
    )
    assert all(b < 0.93 * a for a, b in zip(before, after, strict=True))
    assert sum(after) < 0.8 * sum(before)


def test_the_start_is_near_already():
    """Atoms at the keys are attention to quantised keys: better than random features before anything is learned."""
    model, data = FAMILIES["bert"]().eval(), [batch("bert", seed=0)] * 3
    near, _ = mean_errors(convert(model, data, options={"num_frequencies": 23, "window": 0}, steps=0))
    far, _ = mean_errors(convert(model, data, attention="performer:num_frequencies=23", steps=0))
    assert all(a < 0.5 * b for a, b in zip(near, far, strict=True))


def test_errors_are_what_they_are_called():
    """Against a plain loop over batches, heads and tokens."""
    model = FAMILIES["bert"]().eval()
    host = TransformersHost(model)
    sites = host.sites(batch("bert"))
    mechanism = klformer.build_attention("performer", num_heads=4, head_dim=8, num_frequencies=16)
    name = sites[1].name
    data = [batch("bert", seed=1), batch("bert", seed=2, padded=False)]
    calls = []

    def record(site, call):
        if site == name:
            calls.append(call)
        return call.softmax()

    with host.watching(record), torch.no_grad():
        for each in data:
            host.run(each)
    assert isinstance(calls[0], Call)
    errors = fitting.measure(host, {name: mechanism}, data).by_site[name]
    for head in range(4):
        off = size = 0.0
        for call, inputs in zip(calls, data, strict=True):
            out, right = mechanism(call.q, call.k, call.v, key_mask=call.key_mask), call.softmax()
            for row, column in inputs["attention_mask"].nonzero().tolist():
                off += (out - right)[row, head, column].square().sum().item()
                size += right[row, head, column].square().sum().item()
        assert errors[head].item() == pytest.approx(off / size, rel=1e-4)


def test_watching_softmax_changes_nothing():
    model = FAMILIES["llama"]().eval()
    expected = answer(model, batch("llama"))
    host = TransformersHost(model)
    with host.watching(lambda _, call: call.softmax()):
        watched = answer(model, batch("llama"))
    kept = batch("llama")["attention_mask"].bool()
    assert_close(watched[kept], expected[kept], atol=1e-5, rtol=1e-5)


def test_the_best_is_kept():
    """A learning rate that ruins everything: what remains is the start."""
    model = FAMILIES["bert"]()
    data = batches("bert", 12)
    before, after = mean_errors(convert(model, data, options={"num_frequencies": 8}, steps=30, learning_rate=99.0))
    assert all(b <= a for a, b in zip(before, after, strict=True))


def test_the_same_seed_is_the_same_model():
    model, data = FAMILIES["bert"](), batches("bert", 8)
    make = lambda seed: convert(model, data, options={"num_frequencies": 8}, steps=3, seed=seed).model  # noqa: E731
    first, again, other = (answer(make(seed), data[0]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_layers_that_stay_softmax():
    model, data = FAMILIES["bert"]().eval(), batches("bert")
    options = {"num_frequencies": 4}
    one = convert(model, data, options=options, steps=0, keep_softmax=1)
    worst = max(one.certificate.layers, key=lambda layer: layer.mean())
    assert [layer.stays_softmax for layer in one.certificate.layers] == [
        layer is worst for layer in one.certificate.layers
    ]
    assert one.certificate.hybrid["distance"] < one.certificate.linear["distance"]
    assert len(one.records) == 1
    both = convert(model, data, options=options, steps=0, keep_softmax=2)
    assert_close(answer(both.model, data[0]), answer(model, data[0]))
    budget = (min(e.mean() for e in one.certificate.layers) + worst.mean()) / 2
    within = convert(model, data, options=options, steps=0, keep_softmax=budget)
    assert [e.stays_softmax for e in within.certificate.layers] == [e.stays_softmax for e in one.certificate.layers]
    assert "stays softmax" in within.certificate.table()


@pytest.mark.parametrize("finetune", ["kernels", "all"])
def test_fine_tuning_brings_answers_nearer(finetune):
    model, data = FAMILIES["bert"]().eval(), batches("bert", 12)
    arguments = {"options": {"num_frequencies": 4}, "steps": 10, "finetune": finetune}
    plain = convert(model, data, **arguments)
    tuned = convert(model, data, finetune_steps=30, finetune_learning_rate=1e-3, **arguments)
    assert tuned.certificate.linear["distance"] < 0.95 * plain.certificate.linear["distance"]
    same = torch.equal(tuned.model.bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)
    assert same == (finetune == "kernels")


def test_alignment_brings_layers_nearer_and_trains_kernels_alone():
    model, data = FAMILIES["bert"]().eval(), batches("bert", 30)
    away = []
    for align_steps in (0, 40):
        made = convert(model, data, options={"num_frequencies": 4}, steps=20, align_steps=align_steps, finetune="all")
        host, teacher, errors = TransformersHost(model), model, []
        for each in data[:3]:
            with torch.no_grad():
                ours, right = (m(**each, output_hidden_states=True).hidden_states[1:] for m in (made.model, teacher))
            answers = [Answer(hidden[-1], False, tuple(hidden)) for hidden in (ours, right)]
            errors.append(distil.hidden_distance(host, each, *answers))
        away.append(torch.stack(errors).mean().item())
        changed = {name for name, value in model.state_dict().items() if not made.model.state_dict()[name].equal(value)}
        assert not changed
    assert away[1] < 0.9 * away[0]


def test_labels_can_be_learned_beside_the_answers():
    """Labels that the teacher does not know, the same word everywhere: with a weight for labels it is learned."""
    model = FAMILIES["bert"]().eval()
    data = [each | {"labels": torch.full_like(each["input_ids"], 7)} for each in batches("bert", 12)]
    arguments = {"options": {"num_frequencies": 4}, "steps": 2, "finetune_steps": 20, "finetune_learning_rate": 3e-3}
    right = [
        convert(model, data, **arguments, label_weight=weight).certificate.linear["accuracy"] for weight in (0.0, 10.0)
    ]
    assert right[0] < 0.3 < 0.8 < right[1]


def test_what_is_asked():
    """Classes and masked tokens where labels say, next tokens of a causal model whether they do or not."""
    scores = torch.randn(3, 9, 50)
    inputs = batch("gpt2") | {"labels": batch("gpt2")["input_ids"]}
    host = TransformersHost(FAMILIES["gpt2"]())
    for given in (inputs, batch("gpt2")):
        asked = asked_about(host, given, Answer(scores, True), causal=True)
        assert asked.right.tolist() == [
            int(row[i]) for row, n in zip(inputs["input_ids"], (9, 5, 9), strict=True) for i in range(1, n)
        ]
        assert_close(asked.scores[8:12], scores[1, :4])
    host = TransformersHost(FAMILIES["bert"]())
    labels = torch.full((3, 9), -100)
    labels[1, 2], labels[2, 5] = 11, 12
    asked = asked_about(host, batch("bert") | {"labels": labels}, Answer(scores, True), causal=False)
    assert asked.right.tolist() == [11, 12]
    expected = -scores.log_softmax(-1)[[1, 2], [2, 5], [11, 12]].mean()
    assert_close(asked.loss(), expected)
    assert asked_about(host, batch("bert"), Answer(scores, True), causal=False) is None


@pytest.mark.parametrize("family", ["bert", "bert-embeddings", "gpt2", "vit"])
def test_what_the_layers_give(family):
    """A layer's output for each layer; the last one is what a model without a head gives."""
    host = TransformersHost(FAMILIES[family]().eval())
    with torch.no_grad():
        got = host.run(batch(family), hidden=True)
    assert len(got.hidden) == 2
    assert len({tuple(each.shape) for each in got.hidden}) == 1
    if family == "bert-embeddings":
        assert torch.equal(got.hidden[-1], got.values)
    assert host.run(batch(family)).hidden == ()
    kept = torch.tensor([[True] * 9, [True] * 5 + [False] * 4, [True] * 9])
    if family == "bert":  # against a plain loop; padding does not count
        moved = tuple(each + torch.randn_like(each) * (1 if i else 3) for i, each in enumerate(got.hidden))
        errors = [(a - b)[kept].square().sum() / b[kept].square().sum() for a, b in zip(moved, got.hidden, strict=True)]
        away = distil.hidden_distance(host, batch(family), Answer(got.values, True, moved), got)
        assert_close(away, torch.stack(errors).mean())


@pytest.mark.parametrize("attention", ["gmm-prf", "fastfood-prf", "generative-prf", "gmm-rks", "linear-elu"])
def test_other_attentions(attention, tmp_path):
    options = {} if attention == "linear-elu" else {"num_frequencies": 8, "redraw": False}
    conversion = convert(FAMILIES["bert"](), batches("bert"), attention=attention, options=options, steps=3)
    conversion.save(tmp_path)
    assert torch.equal(
        answer(klformer.load_converted(tmp_path), batch("bert")), answer(conversion.model, batch("bert"))
    )


class TestOwnModels:
    @pytest.fixture
    def model(self):
        config = ModelConfig(model_dim=16, num_heads=2, head_dim=8, ffn_dim=16, dropout=0.0)
        return self.build(config)

    @staticmethod
    def build(config=None):
        config = config or ModelConfig(model_dim=16, num_heads=2, head_dim=8, ffn_dim=16, dropout=0.0)
        shape = InputShape(max_len=12, vocab_size=20)
        return build_classifier(config, klformer.AttentionSpec(name="softmax"), shape, num_outputs=3)

    def data(self, count=8):
        return [
            {
                "inputs": torch.randint(1, 20, (4, 12)),
                "key_mask": torch.arange(12).expand(4, 12) < torch.tensor([12, 7, 12, 3])[:, None],
                "labels": torch.randint(0, 3, (4,)),
            }
            for _ in range(count)
        ]

    def test_converts_saves_and_loads(self, model, tmp_path):
        data = self.data()
        before, after = mean_errors(convert(model, data, options={"num_frequencies": 8, "window": 0}, steps=20))
        assert all(b < a for a, b in zip(before, after, strict=True))
        conversion = convert(model, data, options={"num_frequencies": 8}, steps=20)
        assert all(record.attention.options["window"] == 8 for record in conversion.records.values())
        assert set(conversion.certificate.parts) == {"near alone", "kernel alone"}
        assert {"accuracy", "agreement", "distance"} <= set(conversion.certificate.linear)
        conversion.save(tmp_path)
        inputs = {name: data[0][name] for name in ("inputs", "key_mask")}
        loaded = klformer.load_converted(tmp_path, into=self.build())
        assert torch.equal(loaded(**inputs), conversion.model(**inputs))
        assert not torch.equal(loaded(**inputs), model.eval()(**inputs))

    def test_what_the_layers_give(self, model):
        host, given = OwnHost(model.eval()), self.data(1)[0]
        hidden = host.run(given, hidden=True).hidden
        # There is a token before the others, and the last layer gives nothing but it.
        assert [tuple(each.shape) for each in hidden] == [(4, 13, 16), (4, 1, 16)]
        moved = torch.randn(4, 13, 16)
        padding = torch.nn.functional.pad(~given["key_mask"], (1, 0))
        right = Answer(hidden[0], False, hidden)
        nearby = (hidden[0] + moved.masked_fill(~padding[..., None], 0), hidden[1])
        assert distil.hidden_distance(host, given, Answer(hidden[0], False, nearby), right) == 0
        away = (hidden[0] + moved.masked_fill(padding[..., None], 0), hidden[1])
        assert distil.hidden_distance(host, given, Answer(hidden[0], False, away), right) > 0
        assert host.run(given).hidden == ()
        assert not any(layer._forward_hooks for layer in model.modules())

    def test_fine_tuning_brings_answers_nearer(self, model):
        data, arguments = self.data(12), {"options": {"num_frequencies": 4}, "steps": 5}
        plain = convert(model, data, **arguments)
        tuned = convert(model, data, finetune_steps=30, finetune_learning_rate=1e-3, **arguments)
        assert tuned.certificate.linear["distance"] < plain.certificate.linear["distance"]

    def test_needs_a_model_to_load_into(self, model, tmp_path):
        convert(model, self.data(), options={"num_frequencies": 8}, steps=0).save(tmp_path)
        with pytest.raises(ValueError, match="give into="):
            klformer.load_converted(tmp_path)


def test_batches_come_round_in_another_order():
    data = Batches([{"x": torch.tensor([i])} for i in range(20)], steps=100, seed=0)
    assert [int(each["x"]) for each in data.held_out] == [0, 1]
    assert [int(each["x"]) for each in data.choosing] == [2, 3]
    turns = [[int(data.at(turn * 16 + i)["x"]) for i in range(16)] for turn in range(2)]
    assert sorted(turns[0]) == sorted(turns[1]) == list(range(4, 20))
    assert turns[0] != turns[1]


def test_nothing_is_chosen_by_what_is_measured():
    """Other batches to measure by: the same model, atoms and layers that stay softmax included, and other figures."""
    model, data = FAMILIES["bert"]().eval(), batches("bert", 12)
    arguments = {"options": {"num_frequencies": "auto"}, "error_budget": 0.2, "steps": 4, "keep_softmax": 1}
    some = [
        convert(model, data[4:], **arguments, choosing=data[:2], evaluation=each) for each in (data[2:3], data[3:4])
    ]
    assert some[0].records == some[1].records
    for name, value in some[0].model.state_dict().items():
        assert torch.equal(some[1].model.state_dict()[name], value), name
    assert some[0].certificate.linear != some[1].certificate.linear
    assert some[0].certificate.layers != some[1].certificate.layers


def test_draws_are_kept_unless_another_is_asked_for():
    model, data = FAMILIES["bert"](), batches("bert", 6)
    noise = []
    for options in ({"window": 0}, {"window": 0, "redraw": False}, {"window": 0, "redraw": True}):
        conversion = convert(model, data, attention="gmm-prf", options={"num_frequencies": 8, **options}, steps=3)
        assert all(
            record.attention.options["redraw"] == options.get("redraw", False) for record in conversion.records.values()
        )
        noise.append(next(value for name, value in conversion.model.state_dict().items() if name.endswith("noise")))
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_a_mixture_starts_at_clusters(covariance):
    """Two heads, two clusters each, one of them wider: means and variances are theirs, scaled as kernels scale keys."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[[0.0, 10.0], [10.0, 0.0]], [[5.0, 5.0], [-5.0, 5.0]]])
    widths = torch.tensor([0.1, 0.5])[:, None, None]
    keys = (centres.unsqueeze(2) + widths * torch.randn(2, 2, 500, 2, generator=generator)).flatten(1, 2)
    options = {"num_components": 2, "tied": False, "envelope": "simplex", "covariance": covariance}
    mechanism = klformer.build_attention("gmm-prf", num_heads=2, head_dim=2, num_frequencies=8, **options)
    assert start.can_start_from_keys(mechanism)
    start.start_from_keys(mechanism, keys, generator)
    mixture = mechanism.kernel.spectrum
    order = torch.cdist(mixture.mean, centres * 2**-0.25).argmin(1)  # which component is which cluster
    for head in range(2):
        assert_close(mixture.mean[head, order[head]], centres[head] * 2**-0.25, atol=0.05, rtol=0)
        found = mixture.covariance()[head, order[head]].diagonal(dim1=-2, dim2=-1)
        assert_close(found, (widths.squeeze(-1) ** 2 * 2**-0.5).expand(2, 2), atol=1e-3, rtol=0.2)
    tied = klformer.build_attention("gmm-prf", num_heads=2, head_dim=2, num_frequencies=8, envelope="simplex")
    assert not start.can_start_from_keys(tied)


def test_cluster_means():
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[[0.0, 10.0], [10.0, 0.0]], [[5.0, 5.0], [-5.0, 5.0]]])
    points = (centres.unsqueeze(2) + 0.1 * torch.randn(2, 2, 50, 2, generator=generator)).flatten(1, 2)
    found = start.cluster_means(points, 2, generator)
    assert torch.cdist(found, centres).amin(-1).max() < 0.1
    assert start.cluster_means(points[:, :3], 5, generator).unique(dim=1).shape[1] == 5


class Memory(torch.nn.Module):
    """Attention to another sequence, called by no layer of klformer's."""

    def __init__(self):
        super().__init__()
        self.memory = klformer.MultiheadAttention(model_dim=16, num_heads=2, attention="softmax")

    def forward(self, x, y):
        return self.memory(x, y)


@pytest.mark.parametrize(("queries", "keys"), [(5, 12), (9, 9), (12, 5)])
def test_keys_of_another_sequence_are_no_neighbours(queries, keys):
    data = [{"x": torch.randn(2, queries, 16), "y": torch.randn(2, keys, 16)} for _ in range(6)]
    conversion = convert(Memory(), data, options={"num_frequencies": 8}, steps=2)
    (record,) = conversion.records.values()
    assert record.attention.options["window"] == 0
    assert "window" not in conversion.certificate.layers[0].attention


class TestWindows:
    """window="auto" gives every layer the window that measures best at its start, for what it costs."""

    @staticmethod
    def windows(model, data, **given):
        conversion = convert(model, data, **given)
        return [record.attention.options["window"] for record in conversion.records.values()]

    def test_it_is_that_of_the_least_error_times_cost(self):
        model, data = FAMILIES["bert"]().eval(), [batch("bert", length=70, seed=seed) for seed in range(3)]
        given = {"steps": 0, "evaluation": data[:1], "choosing": data[1:2]}
        options = {"num_frequencies": 8}
        chosen = self.windows(model, data, options={**options, "window": "auto"}, **given)
        scores = []
        for window in (4, 8, 16):  # 32 would leave less than half of a text to the kernel
            # What layers are chosen by is not in the certificate: here it is what they are measured by as well.
            same = {**given, "evaluation": data[1:2]}
            conversion = convert(model, data, options={**options, "window": window}, **same)
            scores.append([layer.mean() * (75 + 8 + 3 * window) for layer in conversion.certificate.layers])
        best = [(4, 8, 16)[row.index(min(row))] for row in zip(*scores, strict=True)]
        assert chosen == best

    def test_short_texts_leave_no_choice(self):
        assert self.windows(FAMILIES["bert"](), batches("bert"), options={"window": "auto"}, steps=0) == [4, 4]

    def test_it_is_saved_and_named(self, tmp_path):
        data = [batch("bert", length=40, seed=seed) for seed in range(3)]
        conversion = convert(FAMILIES["bert"](), data, options={"num_frequencies": 8, "window": "auto"}, steps=1)
        windows = [record.attention.options["window"] for record in conversion.records.values()]
        labels = [layer.attention for layer in conversion.certificate.layers]
        assert labels == [f"atoms-prf:near_gain=0.0,num_frequencies=8,window={window}" for window in windows]
        conversion.save(tmp_path / "linear")
        again = klformer.load_converted(tmp_path / "linear")
        assert torch.equal(answer(again, data[0]), answer(conversion.model, data[0]))
