"""The command line of `python -m grpo.train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from .errors import InputError
from .settings import (
    Aggregation,
    DType,
    LoggerName,
    LossName,
    RolloutName,
    Semantics,
    Settings,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

WHAT, LOSS, SAMPLING, OPTIMISER, RUN = (
    "What is trained",
    "Loss",
    "Sampling",
    "Optimisation",
    "The run",
)


@app.command()
def train(
    context: typer.Context,
    model: Annotated[
        str | None,
        Option(
            help="Hugging Face directory or id; by default a Llama of 0.3 M parameters is built.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    task: Annotated[
        str,
        Option(
            help="sort, add, countdown, or module:function: a function of a random.Random that "
            "returns a grpo.train.tasks.Problem.",
            rich_help_panel=WHAT,
        ),
    ] = "sort",
    data: Annotated[
        Path | None,
        Option(
            help='JSONL file with {"prompt": ..., "answer": ...} on each line, instead of a task.',
            rich_help_panel=WHAT,
        ),
    ] = None,
    reward: Annotated[
        str,
        Option(
            help="How responses to --data are rewarded: exact, numeric (the last number), regex.",
            rich_help_panel=WHAT,
        ),
    ] = "exact",
    warm_up_steps: Annotated[
        int | None,
        Option(
            min=0,
            help="Supervised steps on right answers first. (Default: 40 for the built-in model, "
            "else 0.)",
            rich_help_panel=WHAT,
        ),
    ] = None,
    loss: Annotated[LossName, Option(help="Objective.", rich_help_panel=LOSS)] = LossName.grpo,
    semantics: Annotated[
        Semantics,
        Option(help="Numbers as TorchRL's, or corrected; see the README.", rich_help_panel=LOSS),
    ] = Semantics.corrected,
    aggregation: Annotated[
        Aggregation, Option(help="Mean over tokens, or over responses.", rich_help_panel=LOSS)
    ] = Aggregation.token_mean,
    clip_low: Annotated[
        float, Option(help="The ratio is held above 1 - this.", rich_help_panel=LOSS)
    ] = 0.2,
    clip_high: Annotated[
        float | None,
        Option(
            help="The ratio is held below 1 + this. (Default: 0.2; dapo: 0.28.)",
            rich_help_panel=LOSS,
        ),
    ] = None,
    kl_to_ref: Annotated[
        float | None,
        Option(help="Weight of the KL penalty to the initial model.", rich_help_panel=LOSS),
    ] = None,
    kl_to_inference: Annotated[
        float | None,
        Option(help="Weight of the KL penalty to the sampling policy.", rich_help_panel=LOSS),
    ] = None,
    kl_mask_threshold: Annotated[
        float | None,
        Option(help="Drop tokens with (log ratio)^2 / 2 above this.", rich_help_panel=LOSS),
    ] = None,
    entropy_coeff: Annotated[
        float | None,
        Option(help="Weight of the entropy bonus; 0 only measures it.", rich_help_panel=LOSS),
    ] = 0.0,
    fused_lm_head: Annotated[
        bool,
        Option(
            "--fused-lm-head", help="Score without ever making the logits.", rich_help_panel=LOSS
        ),
    ] = False,
    prompts: Annotated[
        int, Option(min=1, help="Prompts per iteration.", rich_help_panel=SAMPLING)
    ] = 16,
    group_size: Annotated[
        int,
        Option(help="Responses to a prompt that are trained on.", rich_help_panel=SAMPLING),
    ] = 8,
    candidates: Annotated[
        int | None,
        Option(
            help="Responses sampled per prompt, of which the group is selected. "
            "(Default: group size.)",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    keep_return_bounds: Annotated[
        tuple[float, float] | None,
        Option(
            help="Train only on groups whose mean reward lies between LOW and HIGH.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, Option(min=1, help="Longest response.", rich_help_panel=SAMPLING)
    ] = 12,
    rollout: Annotated[
        RolloutName, Option(help="What samples the responses.", rich_help_panel=SAMPLING)
    ] = RolloutName.transformers,
    importance_cap: Annotated[
        float | None,
        Option(
            help="Correct for rollout and trainer log-probs that differ: weigh each token by "
            "their ratio, at most this (truncated importance sampling).",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    mini_batch: Annotated[
        int, Option(min=1, help="Responses to a micro-batch.", rich_help_panel=OPTIMISER)
    ] = 32,
    gradient_accumulation: Annotated[
        int,
        Option(min=1, help="Micro-batches to an optimiser step.", rich_help_panel=OPTIMISER),
    ] = 1,
    epochs: Annotated[
        int, Option(min=1, help="Passes over each iteration's data.", rich_help_panel=OPTIMISER)
    ] = 1,
    learning_rate: Annotated[
        float,
        Option(
            help="Highest of AdamW (betas 0.9, 0.95): it rises for 20 steps, then falls linearly "
            "to 5 %.",
            rich_help_panel=OPTIMISER,
        ),
    ] = 2e-4,
    clip_norm: Annotated[
        float, Option(help="Largest gradient norm; inf: any.", rich_help_panel=OPTIMISER)
    ] = 1.0,
    dtype: Annotated[
        DType, Option(help="Of the forward passes.", rich_help_panel=OPTIMISER)
    ] = DType.float32,
    device: Annotated[
        str, Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=OPTIMISER)
    ] = "cpu",
    iterations: Annotated[
        int, Option(min=1, help="Iterations of sampling and training.", rich_help_panel=RUN)
    ] = 100,
    seed: Annotated[
        int, Option(min=0, max=2**31 - 1, help="Of everything random.", rich_help_panel=RUN)
    ] = 0,
    threads: Annotated[int, Option(min=1, help="CPU threads of PyTorch.", rich_help_panel=RUN)] = 1,
    output: Annotated[
        Path, Option(help="Where metrics, curves and checkpoints go.", rich_help_panel=RUN)
    ] = Path("runs/grpo"),
    overwrite: Annotated[
        bool,
        Option(
            "--overwrite", help="Delete the run that is in --output first.", rich_help_panel=RUN
        ),
    ] = False,
    save_every: Annotated[
        int, Option(min=1, help="Iterations between checkpoints.", rich_help_panel=RUN)
    ] = 25,
    resume: Annotated[
        Path | None,
        Option(
            help="Go on with the run in this directory, with its own options; --iterations may "
            "be given to lengthen it.",
            rich_help_panel=RUN,
        ),
    ] = None,
    logger: Annotated[
        LoggerName, Option(help="Where metrics go besides metrics.csv.", rich_help_panel=RUN)
    ] = LoggerName.csv,
    ray: Annotated[
        bool, Option("--ray", help="Sample in a Ray actor.", rich_help_panel=RUN)
    ] = False,
) -> None:
    """Train a language model with GRPO on a task with verifiable rewards.

    Without options: a tiny model learns to sort digits, in under a minute on a CPU core. Several
    trainers: torchrun --nproc-per-node N -m grpo.train. Ctrl-C ends after the running iteration
    with a checkpoint; --resume DIRECTORY goes on from it. A response whose reward is NaN or
    infinite is left out and counted; the others of its group are trained on.
    """
    given = {
        name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"
    }
    try:
        from .run import run

        if resume is not None:
            settings = load_settings(resume)
            if others := given - {"resume", "iterations"}:
                option = "--" + min(others).replace("_", "-")
                raise InputError(f"{option} cannot be given with --resume: the run keeps its own")
            if "iterations" in given:
                settings.iterations = iterations
        else:
            if data is not None and "task" in given:
                raise InputError("--task and --data: only one of them can be given")
            if data is None and "reward" in given:
                raise InputError("--reward is for --data; a task has a reward of its own")
            if clip_high is None:
                clip_high = 0.28 if loss is LossName.dapo else 0.2
            values = {name: value for name, value in locals().items() if name in FIELDS}
            settings = Settings(**values)
        run(settings, resume=resume is not None, overwrite=overwrite)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(
            "error: interrupted within an iteration, or before the first; --resume goes on from "
            "the last checkpoint, where there is one",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


FIELDS = Settings.__dataclass_fields__


def load_settings(directory: Path) -> Settings:
    """The options of the run in `directory`."""
    path = directory / "settings.json"
    if not path.exists():
        raise InputError(f"--resume {directory}: no run there (settings.json is missing)")
    settings = Settings.load(path)
    settings.output = directory
    return settings


if __name__ == "__main__":
    app()
