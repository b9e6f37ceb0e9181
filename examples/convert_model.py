"""A trained BERT becomes linear: its softmax attention is replaced by a kernel learned from its queries and keys.

The model is a small one that learns to copy. The script needs no network. With a model of yours the lines after the
training are the same. Needs the extra `hf`.
"""

import tempfile

import torch
import transformers

import klformer

MASK, WORDS = 1, 40


def batch(size: int = 32, half: int = 8) -> dict[str, torch.Tensor]:
    """Texts whose halves are equal, 15% of their words masked: the other half has to be looked up."""
    words = torch.randint(2, WORDS, (size, half)).repeat(1, 2)
    masked = torch.rand(words.shape) < 0.15
    labels = words.masked_fill(~masked, -100)
    return {"input_ids": words.masked_fill(masked, MASK), "attention_mask": torch.ones_like(words), "labels": labels}


torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=WORDS,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    max_position_embeddings=32,
    initializer_range=0.1,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = transformers.BertForMaskedLM(config)
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(250):
    model(**batch()).loss.backward()
    optimiser.step()
    optimiser.zero_grad()

batches = [batch() for _ in range(50)]
conversion = klformer.convert(model, batches, attention="atoms-prf", options={"num_frequencies": 32}, steps=50)
print(conversion.certificate.table())

with tempfile.TemporaryDirectory() as folder:
    conversion.save(folder)
    again = klformer.load_converted(folder)
    inputs = batch()
    print("loaded again, bit for bit:", torch.equal(again(**inputs).logits, conversion.model(**inputs).logits))
