"""One run: data, model and training put together, and the result written down."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from klformer.errors import ArgumentError, FileError, RunError
from klformer.lab.data import BucketSampler, Examples, padding_report
from klformer.lab.environment import describe_environment
from klformer.lab.runs.changes import LENGTH, changes
from klformer.lab.runs.config import ExperimentConfig, build_model
from klformer.lab.runs.encoder import EncoderFolder, check_settings
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.init_from import PretrainedRun
from klformer.lab.runs.naming import attention_label, describe_score, selecting_metric
from klformer.lab.runs.watch import watching
from klformer.lab.tasks import Split, Task
from klformer.lab.training.callbacks import Callback, KernelMovement, Milestones
from klformer.lab.training.metrics import MOST_CLASSES, largest_share
from klformer.lab.training.objective import Objective
from klformer.lab.training.objectives import Classification
from klformer.lab.training.processes import Layout, make_accelerator, make_layout, on_main_process
from klformer.lab.training.progress import Reporter, SilentReporter
from klformer.lab.training.seeds import derived_seed
from klformer.lab.training.sharding import whole_weights
from klformer.lab.training.trainer import Trainer
from klformer.memory import peak_memory, reset_peak_memory

#: A test set of fewer examples is noted.
FEW_TESTS = 100
#: A model with so high an accuracy in training has learned its examples by heart, if it fails on others.
FITTED = 0.9


def train_run(config: ExperimentConfig, folder: Path, *, resume: bool, reporter: Reporter) -> dict[str, Any]:
    """Train, evaluate and write everything down; returns what is in result.json.

    Args:
        resume: Go on with what is in the folder, if anything is; otherwise the folder must be new.
    """
    if config.encoder is not None:
        check_settings(config.encoder, config.attention, config.parallel, config.objective, config.init_from)
    accelerator = make_accelerator(config.training)
    layout = make_layout(accelerator, config.parallel)
    reset_peak_memory(accelerator.device.type)
    if not accelerator.is_main_process:
        reporter = SilentReporter()
    run = RunFolder(folder)
    with watching(patience=config.parallel.patience), run.claims() as claim:

        def enter() -> ExperimentConfig | None:
            if run.path.exists():
                claim()
            else:
                run.check_place()
            return run.config_so_far(config, resume=resume)

        before = on_main_process(enter)
        task = config.make_task(quiet=isinstance(reporter, SilentReporter))
        trainer, splits = _prepare(config, before, task, run, claim, accelerator, layout, reporter, resume=resume)
        trainer.run()
        evaluated = _evaluate(config, task, trainer, splits)
        result = _result(config, task, trainer, run) | evaluated
        if accelerator.is_main_process:
            run.write_result(result)
    reporter.say(f"test {describe_score(selecting_metric(result), result['test'])} ({result['protocol']})")
    if "confusion" in result["test"]:
        reporter.say(f"the most frequent class of the test set alone gives {100 * largest_share(result['test']):.2f}%")
        if is_no_better(result["test"]):
            reporter.say(
                f"note: that is not significantly better than the most frequent class. {_next_step(config, run)}"
            )
    reporter.say(f"results in {folder}")
    return result


def is_no_better(test: Mapping[str, Any]) -> bool:
    """Return whether an accuracy is within two standard errors of the most frequent class's, or below."""
    share = largest_share(test)
    return bool(test["accuracy"] <= share + 2 * (share * (1 - share) / test["num_examples"]) ** 0.5)


def _next_step(config: ExperimentConfig, run: RunFolder) -> str:
    """Return what to try when nothing was learned that holds for other examples."""
    steps = run.metrics("train")
    reached = sum(line["accuracy"] for line in steps[-5:]) / max(1, len(steps[-5:]))
    best = f"In training it was right in {100 * reached:.0f}% at the end"
    if reached > FITTED:
        return f"{best}: more examples help, a run to start from (--init-from), or --model.dropout 0.3"
    width = "" if config.model.convolution_width else ", --model.convolution-width 3"
    tokens = getattr(config.data, "tokens", None)
    pieces = ", --data.tokens.kind wordpiece" if tokens is not None and tokens.kind == "bytes" else ""
    return f"{best}: try more --training.max-steps, another --optimiser.learning-rate{width}{pieces}"


def _prepare(
    config: ExperimentConfig,
    before: ExperimentConfig | None,
    task: Task,
    run: RunFolder,
    claim: Callable[[], None],
    accelerator: Accelerator,
    layout: Layout,
    reporter: Reporter,
    *,
    resume: bool,
) -> tuple[Trainer, Mapping[Split, Examples]]:
    """Make data and model, write the beginning of the run, and say what is going to happen.

    `before` is the configuration of a run that goes on. The folder is made, by `claim`, when data and model are there:
    what fails before leaves nothing behind.
    """
    source = encoder = None
    if before is None and config.init_from is not None:
        source = PretrainedRun(config.init_from, reporter.say)
        source.check_fits(config)
        task.adopt(source.knowledge)
    elif before is None and config.encoder is not None:
        encoder = EncoderFolder(config.encoder)
        task.adopt(encoder.knowledge)
    _warn_of_length(config, accelerator, reporter)
    on_main_process(task.prepare)
    # One process learns, so that all know the same; a run that goes on knows what it knew.
    knowledge = on_main_process(task.learn if before is None else run.knowledge)
    task.know(knowledge)
    if encoder is not None:
        encoder.check_reads(config.task, knowledge)
    # Test as well: what is wrong with it is to be seen before training, not after.
    splits: dict[Split, Examples] = {split: task.load(split) for split in get_args(Split)}
    set_seed(derived_seed(config.seed, "weights") % 2**32)
    model = build_model(config, task)
    if source is not None:
        reporter.say(source.give(model))
    if encoder is not None:
        reporter.say(encoder.give(model, task.max_len))
    objective = task.objective()
    trainer = Trainer(
        model,
        splits["train"],
        splits["validation"],
        objective=objective,
        optimiser=config.optimiser,
        schedule=config.schedule,
        training=config.training,
        store=run.checkpoints(reporter.say),
        open_log=run.open_log,
        accelerator=accelerator,
        reporter=reporter,
        seed=config.seed,
        callbacks=_callbacks(config, model, objective),
        layout=layout,
    )
    on_main_process(claim)
    initial = whole_weights(model)
    on_main_process(lambda: run.write_initial(initial, before))
    going_on = resume and trainer.resume()
    _check_end(config, before, trainer, run)
    on_main_process(lambda: run.write_beginning(config, before, task, knowledge, splits))
    _introduce(config, task, model, splits, run, reporter)
    if going_on:
        reporter.say(f"going on after step {trainer.progress.step}")
        _note_other_schedule(config, before, reporter)
    return trainer, splits


def _evaluate(
    config: ExperimentConfig, task: Task, trainer: Trainer, splits: Mapping[Split, Examples]
) -> dict[str, dict[str, Any]]:
    """Evaluate the best model on validation, test and whatever else the task is tested on."""
    with trainer.final_evaluation():
        trainer.load_best()
        tests = {"validation": splits["validation"], "test": splits["test"], **task.further_tests()}
        draws = config.training.evaluation_draws
        return {name: trainer.evaluate(examples, draws=draws).as_dict() for name, examples in tests.items()}


def _callbacks(config: ExperimentConfig, model: nn.Module, objective: Objective) -> list[Callback]:
    """Make callbacks that measure how far kernels move, and note milestones where the selecting metric has some."""
    metric, keep = objective.selecting, config.training.keep_milestones
    # Where weights are shared out, no process has a whole kernel to look at.
    callbacks: list[Callback] = [KernelMovement(nn.Identity() if config.parallel.shard else model)]
    if metric.percent and metric.higher_is_better:
        return [*callbacks, Milestones(metric, keep_weights=keep)]
    if keep:
        raise ArgumentError(f"training.keep_milestones is for accuracies and the like, {metric.name} has no milestones")
    return callbacks


def finished_result(config: ExperimentConfig, folder: Path) -> dict[str, Any] | None:
    """Return what is in the result.json of a run with exactly this configuration; None if it is not done, or
    another."""
    run = RunFolder(folder)
    if not run.is_run() or run.config() != config:
        return None
    try:
        return run.result()
    except FileError:  # cut: the run is evaluated again
        return None


def _check_end(config: ExperimentConfig, before: ExperimentConfig | None, trainer: Trainer, run: RunFolder) -> None:
    """Refuse to go on with a run that is past the end that it is given now: it would be called another than it is."""
    progress, target = trainer.progress, config.training.target
    if trainer.total_steps < progress.step:
        raise RunError(
            f"{run} has done {progress.step} steps, which can't become {trainer.total_steps}; "
            "ask for as many or more, or make another run"
        )
    new_target = before is not None and before.training.target != target
    if new_target and trainer.has_reached(target):
        raise RunError(
            f"{run} has a validation {trainer.metric.name} of {progress.best_metric:.4f} already, as good as the new "
            f"training.target of {target}; ask for more, or make another run"
        )


def _note_other_schedule(config: ExperimentConfig, before: ExperimentConfig | None, reporter: Reporter) -> None:
    """Say so if the learning rates of a run that goes on are others than those of one of that length."""
    changed = [] if before is None else [text for key, text in changes(before, config).items() if key in LENGTH]
    if changed and config.schedule.kind in ("cosine", "linear"):
        reporter.say(
            f"note: {'; '.join(changed)}. The {config.schedule.kind} schedule depends on the last step and changes "
            "from here on: this is not the run that so many steps from the start would give"
        )


def _warn_of_length(config: ExperimentConfig, accelerator: Accelerator, reporter: Reporter) -> None:
    """Say so before the data is made, if a run is meant for another machine."""
    if config.preset == "paper" and accelerator.device.type == "cpu":
        reporter.say(
            f"note: the preset paper is meant for a GPU, and this is a CPU: {_describe_length(config)}, and all of the "
            "data. `--preset laptop` takes minutes; `klformer profile` says what a step takes"
        )


def _describe_length(config: ExperimentConfig) -> str:
    training = config.training
    lengths = {"steps": training.max_steps, "epochs": training.max_epochs}
    length = " or ".join(f"{number:,} {unit}" for unit, number in lengths.items() if number is not None)
    return f"{length} of {training.batch_size} examples"


def _introduce(
    config: ExperimentConfig,
    task: Task,
    model: nn.Module,
    splits: Mapping[Split, Examples],
    run: RunFolder,
    reporter: Reporter,
) -> None:
    """Say what is going to happen."""
    train = splits["train"]
    parameters = sum(p.numel() for p in model.parameters())
    reporter.say(f"{config.task} with {attention_label(config)}, preset {config.preset}, seed {config.seed} -> {run}")
    reporter.say(f"{len(train):,} training examples from {task.location()}; {parameters:,} parameters")
    reporter.say(
        f"{_describe_length(config)}, evaluated every {config.training.evaluate_every:,} steps; "
        "Ctrl-C saves and stops, --resume goes on"
    )
    for sentence in [*task.notes(), *notes_of_splits(task, splits)]:
        reporter.say(f"note: {sentence}")
    sampler = BucketSampler(train.lengths, batch_size=config.training.batch_size, seed=config.seed)
    padding = padding_report(train.lengths, sampler.batches(0))
    padded, real = padding.padded / len(train), padding.real / len(train)
    reporter.say(
        f"length buckets: {padded:,.0f} tokens an example with padding, {real:,.0f} real ones; "
        f"padding all to the longest would take {padding.longest / padding.padded:.2f}x"
    )


def notes_of_splits(task: Task, splits: Mapping[Split, Examples]) -> Iterator[str]:
    """Yield what makes a result say little: a small test set, and classes that a split lacks."""
    if (size := len(splits["test"])) < FEW_TESTS:
        yield f"the test set has only {size} examples: each that is right or wrong counts {100 / size:.1f} points"
    objective = task.objective()
    if isinstance(objective, Classification) and objective.num_outputs <= MOST_CLASSES:
        names = task.class_names() or [str(number) for number in range(objective.num_outputs)]
        for split, examples in splits.items():
            if absent := [name for number, name in enumerate(names) if number not in examples.targets]:
                yield f"{split} has no example of {len(absent)} of {len(names)} classes, such as {absent[0]}"


def _result(config: ExperimentConfig, task: Task, trainer: Trainer, run: RunFolder) -> dict[str, Any]:
    progress, metric = trainer.progress, trainer.metric
    from_callbacks = [item for callback in trainer.callbacks for item in callback.result().items()]
    return {
        "name": run.name,
        "task": config.task,
        "attention": attention_label(config),
        "preset": config.preset,
        "seed": config.seed,
        "metric": metric.name,
        "metric_higher_is_better": metric.higher_is_better,
        "metric_percent": metric.percent,
        "protocol": task.describe_protocol(),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "steps": progress.step,
        "best_step": progress.best_step,
        **dict(from_callbacks),
        **task.facts(),
        "train_seconds": progress.seconds,
        "train_processor_seconds": progress.processor_seconds,
        "train_tokens": progress.tokens,
        "tokens_per_second": progress.tokens / max(progress.seconds, 1e-9),
        "peak_memory_bytes": peak_memory(trainer.accelerator.device.type),
        "environment": describe_environment()
        | {"device": str(trainer.accelerator.device), "processes": trainer.accelerator.num_processes}
        | {"sequence_parts": trainer.layout.num_parts},
    }
