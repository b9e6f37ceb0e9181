"""`klformer compare`: several runs on one task, and one table."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.lab.cli.command import Command
from klformer.lab.cli.settings import Settings, read_settings
from klformer.lab.runs.compare import compare, compare_at_best_rates, comparison_name, comparison_table
from klformer.lab.runs.rates import FIELD
from klformer.lab.runs.sweep import Variant, variants
from klformer.lab.terminal import make_console
from klformer.lab.training.processes import is_main_process
from klformer.lab.training.progress import labelled_reporters, make_reporter
from klformer.models import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Compare(Settings):
    """Train several attentions over several seeds on one task, and print one table.

    Runs that are done are not done again, and interrupted ones go on. Examples:

      klformer compare --task sparsity --attentions gmm-rks gmm-rks:frozen=true performer softmax
      klformer compare --task text --attentions gmm-prf softmax --seeds 0 1 2 --training.max-steps 500
      klformer compare --task recall --attentions gmm-prf gmm-prf:frozen=true --seeds 0 1 2 --jobs 2
      klformer compare --task text --attentions gmm-prf softmax --seeds 0 1 2 --learning-rates 1e-3 2e-3 4e-3
      klformer compare --attentions gmm-rks softmax --sweep model.dropout=0,0.1,0.3 training.batch_size=16,32
    """

    attentions: tuple[str, ...] = ("gmm-rks", "gmm-rks:frozen=true", "performer", "softmax")
    """Attentions, each with options after a colon."""
    seeds: tuple[int, ...] = (0,)
    """One run of every attention for each."""
    sweep: tuple[str, ...] = ()
    """Fields with several values, like model.dropout=0,0.1,0.3 or attention.num_frequencies=32,64: one run of every
    attention and seed for each combination."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates, of which every attention takes the one that is best on validation. The first seed is run with
    every one of them, the others with the one it chose."""
    jobs: int = 1
    """Trainings side by side, each in a process of its own with one thread."""


def compare_attentions(options: Compare) -> None:
    """Do the runs that are not done, and print the table."""
    if not options.attentions or not options.seeds:
        raise ArgumentError("give at least one attention and one seed")
    check_count("jobs", options.jobs)
    if options.sweep and options.learning_rates:
        raise ArgumentError(f"--learning-rates chooses and --sweep does not; give one, or --sweep {FIELD}=A,B")
    attentions = [AttentionSpec.parse(text) for text in options.attentions]
    configs = [options.resolve(attention, seed) for seed in options.seeds for attention in attentions]
    out = options.out.expanduser()
    how: dict[str, Any] = {
        "reporter": make_reporter(quiet=options.quiet),
        "jobs": options.jobs,
        "labelled": labelled_reporters(quiet=options.quiet),
    }
    if options.learning_rates:
        name = comparison_name(Variant(configs[0]))
        results = compare_at_best_rates(configs, options.learning_rates, out, **how)
    else:
        chosen = [variant for config in configs for variant in variants(config, options.sweep)]
        name = comparison_name(chosen[0])
        results = compare(chosen, out, **how)
    if not is_main_process():
        return
    console = make_console(120)
    comparison_table(results).print(console)
    console.print(f"runs and {name} are in {out}", highlight=False)


COMMAND = Command(partial(read_settings, Compare), compare_attentions)
