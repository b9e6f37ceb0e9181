"""Every kernel in the place of softmax, all in the same way: which distribution fits real attention best?

python examples/conversion/every_kernel.py DATA --out rows.json

DATA holds what `reactions.py` takes. Every kernel has 128 features: 128 positive ones, or 64 frequencies with a cosine
and a sine each. Every one is fitted to the same reactions, in as many steps, with nothing trained but the kernel. The
learning rates are those, of up to three, that fitted two single layers best, on reactions of valid.tsv. What is
reported is of reactions of test.tsv that nothing was chosen by. An interrupted table goes on with the same command.
"""

import argparse
import json
from pathlib import Path

from reactions import FIRST_TESTED, TRAINED, load_model, load_tokenizer, masked_accuracy, reactions
from torch import Tensor

import klformer
from klformer.conversion.hf.inputs import make_batches

POSITIVE, FOURIER, SIMPLEX, REDRAWN = "num_frequencies=128", "num_frequencies=64", "envelope=simplex", "redraw=true"
MIXTURE = f"gmm-prf:{POSITIVE},{SIMPLEX},tied=false,weights=learned"
#: Attention and learning rate; 0 for a kernel that is fixed.
KERNELS = [
    (f"performer:{POSITIVE}", 0.0),
    (f"atoms-prf:{POSITIVE}", 0.05),
    (f"hedgehog:{POSITIVE}", 0.02),
    (f"gmm-prf:{POSITIVE},{SIMPLEX}", 0.05),
    (f"fastfood-prf:{POSITIVE},{SIMPLEX}", 0.05),
    (f"generative-prf:{POSITIVE},{SIMPLEX}", 0.03),
    (f"{MIXTURE},num_components=16", 0.05),
    (f"{MIXTURE},num_components=64", 0.05),
    (f"gmm-prf:{POSITIVE}", 0.05),
    (f"fastfood-prf:{POSITIVE}", 0.05),
    (f"generative-prf:{POSITIVE}", 0.03),
    (f"gmm-prf:{POSITIVE},{SIMPLEX},{REDRAWN}", 0.05),
    (f"fastfood-prf:{POSITIVE},{SIMPLEX},{REDRAWN}", 0.05),
    (f"generative-prf:{POSITIVE},{SIMPLEX},{REDRAWN}", 0.03),
    (f"gmm-rks:{FOURIER}", 0.02),
    (f"fastfood-rks:{FOURIER}", 0.05),
    (f"generative-rks:{FOURIER}", 0.01),
    (f"atoms-rks:{FOURIER}", 0.05),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rows that it has are not made again")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--choosing", type=int, default=48, help="reactions of valid.tsv that stop the fit")
    parser.add_argument("--tested", type=int, default=300, help="reactions of test.tsv to report on")
    parser.add_argument("--only", nargs="*", default=[], help="begin with these words, to make a part of the table")
    given = parser.parse_args()
    source = given.data / "rxnfp_bert_fp16"
    model, tokenizer = load_model(source), load_tokenizer(source)
    valid, test = (reactions(given.data / "uspto50k_rxn" / f"{name}.tsv") for name in ("valid", "test"))

    def batches(texts: list[str]) -> list[dict[str, Tensor]]:
        made = make_batches(texts, model, tokenizer, batch_size=given.batch_size, max_length=512, seed=0)
        return [dict(batch) for batch in made]

    first = TRAINED + given.choosing
    choosing, evaluation = batches(valid[TRAINED:first]), batches(valid[first : first + given.choosing])
    tested = batches(test[FIRST_TESTED : FIRST_TESTED + given.tested])
    table = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    rows = table["rows"]
    if not rows:
        rows.append({"attention": "softmax", "right": masked_accuracy(model, tested)})
    known = {row["attention"] for row in rows}
    for attention, learning_rate in KERNELS:
        if attention in known or (given.only and not attention.startswith(tuple(given.only))):
            continue
        conversion = klformer.convert(
            model,
            batches(valid[:TRAINED])[: given.steps],
            choosing=choosing,
            evaluation=evaluation,
            attention=attention,
            options={"window": 0},
            config=klformer.ConversionConfig(
                steps=given.steps if learning_rate else 0, learning_rate=learning_rate or 1.0
            ),
        )
        figures = conversion.certificate
        errors = [(sum(layer.start) / len(layer.start), layer.mean()) for layer in figures.layers]
        rows.append(
            {
                "attention": attention,
                "learning_rate": learning_rate,
                "steps": given.steps if learning_rate else 0,
                "error_at_the_start": sum(start for start, _ in errors) / len(errors),
                "error": sum(fitted for _, fitted in errors) / len(errors),
                "right": masked_accuracy(conversion.model, tested),
                "processor_seconds": round(figures.processor_seconds),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        given.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
