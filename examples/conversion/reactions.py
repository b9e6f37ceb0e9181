"""A BERT of chemical reactions becomes linear.

Results: research/pages/conversion-results.md.

python examples/conversion/reactions.py DATA --attention atoms-prf:num_frequencies=256 --steps 300

DATA holds two folders: `rxnfp_bert_fp16`, the weights of rxnfp 0.1.0 (PyPI) with vocab.txt, and `uspto50k_rxn`,
reactions of USPTO-50k in valid.tsv and test.tsv. Kernels learn from 4,500 reactions of valid.tsv. 144 others of that
file stop the fit, the certificate is of 144 more, and settings were chosen by these and what is left of the file. What
is reported is of 1,000 reactions of test.tsv, from the 513th on: the first 512 served to compare starts and learning
rates.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

import klformer
from klformer.conversion.hf.inputs import make_batches

TOKEN = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
TRAINED, HELD_OUT, FIRST_TESTED, TESTED = 4500, 144, 512, 1000


def load_model(folder: Path) -> BertForMaskedLM:
    """The BERT, in float32 and evaluation mode."""
    model = BertForMaskedLM(BertConfig.from_pretrained(folder))
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model.eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One token for each atom, bond, ring or bracket."""
    numbers = {word: i for i, word in enumerate((folder / "vocab.txt").read_text().split())}
    words = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), "isolated")
    ends = [(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def reactions(file: Path) -> list[str]:
    return [line.split("\t")[1] for line in file.read_text().splitlines()]


@torch.no_grad()
def masked_accuracy(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    right = asked = 0
    for batch in batches:
        labels = batch["labels"]
        predicted = model(**{name: value for name, value in batch.items() if name != "labels"}).logits.argmax(-1)
        right += int((predicted == labels)[labels >= 0].sum())
        asked += int((labels >= 0).sum())
    return right / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--attention", default="atoms-prf:num_frequencies=128")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--error-budget", type=float, default=0.1)
    parser.add_argument("--align-steps", type=int, default=0, help="of all kernels together, on hidden states")
    parser.add_argument("--finetune-steps", type=int, default=0)
    parser.add_argument("--finetune", choices=["kernels", "all"], default="all")
    parser.add_argument("--finetune-learning-rate", type=float, default=1e-4)
    parser.add_argument("--label-weight", type=float, default=0.0, help="of what is right, beside the teacher")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="reactions of valid.tsv that stop the fit")
    parser.add_argument("--tested", type=int, default=TESTED, help="reactions of test.tsv to report on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the converted model")
    given = parser.parse_args()
    source = given.data / "rxnfp_bert_fp16"
    model, tokenizer = load_model(source), load_tokenizer(source)
    valid, test = (reactions(given.data / "uspto50k_rxn" / f"{name}.tsv") for name in ("valid", "test"))

    def batches(texts: list[str], *, seed: int = 0, count: int = 1) -> list[dict[str, torch.Tensor]]:
        size = given.batch_size
        made = make_batches(texts, model, tokenizer, batch_size=size, max_length=512, seed=seed, count=count)
        return [dict(batch) for batch in made]

    began = time.perf_counter(), time.process_time()
    conversion = klformer.convert(
        model,
        batches(valid[:TRAINED], seed=given.seed, count=given.steps + given.align_steps + given.finetune_steps),
        choosing=batches(valid[TRAINED : TRAINED + given.held_out]),
        evaluation=batches(valid[TRAINED + given.held_out : TRAINED + 2 * given.held_out]),
        attention=given.attention,
        config=klformer.ConversionConfig(
            **{name: value for name, value in vars(given).items() if name in klformer.ConversionConfig.model_fields}
        ),
        state_file=None if given.out is None else given.out / "fit.safetensors",
        progress=lambda stage, step, steps, error: print(f"{stage} {step}/{steps} {error:.4f}", flush=True),
    )
    seconds, processor_seconds = time.perf_counter() - began[0], time.process_time() - began[1]
    print(conversion.certificate.table())
    if given.out is not None:
        conversion.save(given.out, tokenizer=tokenizer)
    row = {"attention": given.attention, "steps": given.steps, "finetune_steps": given.finetune_steps}
    row |= {"seed": given.seed, "valid": conversion.certificate.linear["accuracy"]}
    reported = batches(test[FIRST_TESTED : FIRST_TESTED + given.tested])
    row |= {"test": masked_accuracy(conversion.model, reported), "teacher": masked_accuracy(model, reported)}
    row |= {"seconds": round(seconds), "processor_seconds": round(processor_seconds)}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
