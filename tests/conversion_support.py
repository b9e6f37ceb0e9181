"""Shared by the tests of conversions: tiny models of every family with random weights, and batches for them."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import klformer

VOCABULARY, PADDING = 50, 0
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    # Large weights, so that attention is far from a mean over all tokens.
    "initializer_range": 0.4,
}
SPECIAL = {"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2}
GPT2_SIZES = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4}


def _build(kind, config, **options):
    return getattr(transformers, kind)(getattr(transformers, config)(**options))


#: Families that are converted whole. Name of a family: a function that builds a model.
ENCODERS = {
    "bert": lambda: _build("BertForMaskedLM", "BertConfig", **SIZES),
    "bert-embeddings": lambda: _build("BertModel", "BertConfig", **SIZES),
    "bert-classes": lambda: _build("BertForSequenceClassification", "BertConfig", **SIZES),
    "roberta": lambda: _build("RobertaForMaskedLM", "RobertaConfig", **SIZES, **SPECIAL),
    "electra": lambda: _build("ElectraForMaskedLM", "ElectraConfig", **SIZES, embedding_size=32),
    "distilbert": lambda: _build(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        initializer_range=0.4,
    ),
    "esm": lambda: _build("EsmForMaskedLM", "EsmConfig", **SIZES, pad_token_id=PADDING, mask_token_id=3),
    "modernbert": lambda: _build(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        **SIZES,
        **SPECIAL,
        cls_token_id=1,
        sep_token_id=2,
        global_attn_every_n_layers=1,
    ),
}
CAUSAL = {
    "gpt2": lambda: _build("GPT2LMHeadModel", "GPT2Config", **GPT2_SIZES, **SPECIAL),
    "llama": lambda: _build("LlamaForCausalLM", "LlamaConfig", **SIZES, **SPECIAL, num_key_value_heads=2),
    "qwen3": lambda: _build("Qwen3ForCausalLM", "Qwen3Config", **SIZES, num_key_value_heads=2, head_dim=8),
}
IMAGES = {
    "vit": lambda: _build(
        "ViTForImageClassification",
        "ViTConfig",
        **{name: value for name, value in SIZES.items() if name != "vocab_size"},
        image_size=16,
        patch_size=4,
    ),
}
FAMILIES = ENCODERS | CAUSAL | IMAGES


def batch(family, *, rows=3, length=9, padded=True, seed=0):
    """Inputs of a family; of the second row the last four tokens are padding."""
    generator = torch.Generator().manual_seed(seed)
    if family in IMAGES:
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    tokens = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.long)
    if padded:
        mask[1, -4:] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, PADDING), "attention_mask": mask}


def batches(family, count=6):
    return [batch(family, seed=seed) for seed in range(count)]


def answer(model, inputs):
    """What a model gives: scores or hidden states."""
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *(f"w{i}" for i in range(5, VOCABULARY))]


def make_folder(path, model):
    model.save_pretrained(str(path))
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", **special).save_pretrained(str(path))
    return path


def texts(count=60):
    numbers = torch.randint(4, VOCABULARY, (count, 12), generator=torch.Generator().manual_seed(0))
    lengths = torch.randint(3, 13, (count,), generator=torch.Generator().manual_seed(1))
    return [" ".join(f"w{i}" for i in row[:n].tolist()) for row, n in zip(numbers, lengths, strict=True)]


def convert(model, data, **given):
    """Call `klformer.convert` with settings of its config among the arguments."""
    settings = {name: given.pop(name) for name in klformer.ConversionConfig.model_fields if name in given}
    return klformer.convert(model, data, config=klformer.ConversionConfig(**settings), **given)
