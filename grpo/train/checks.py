"""What is looked at before a run begins: its options, and whether prompts and answers fit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from importlib.util import find_spec
from itertools import takewhile

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import tasks
from .collector import decode_responses, prompt_tokens
from .errors import InputError, first_line, quoted
from .rollout import context_length
from .settings import LoggerName, Settings

# Draws of an endless task that are looked at before anything is trained.
TRIAL_DRAWS = 512
LARGEST = torch.finfo(torch.float32).max
# What numbers the options accept; NaN is none of them.
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "clip_low": ("at least 0 and below 1", lambda x: 0 <= x < 1),
    "clip_high": ("a finite number of at least 0", lambda x: 0 <= x <= LARGEST),
    "kl_to_ref": ("a finite number of at least 0", lambda x: 0 <= x <= LARGEST),
    "kl_to_inference": ("a finite number of at least 0", lambda x: 0 <= x <= LARGEST),
    "kl_mask_threshold": ("above 0", lambda x: x > 0),
    "entropy_coeff": ("a finite number", lambda x: abs(x) <= LARGEST),
    "importance_cap": ("a finite number above 0", lambda x: 0 < x <= LARGEST),
    "learning_rate": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "clip_norm": ("above 0; inf does not clip", lambda x: x > 0),
}


def check(settings: Settings) -> None:
    """What can be seen before anything is built."""
    if settings.group_size < 2:
        raise InputError(
            f"--group-size {settings.group_size}: a response is compared with the others of its "
            "group, so it must be at least 2"
        )
    if settings.candidates is not None and settings.candidates < settings.group_size:
        raise InputError(
            f"--candidates {settings.candidates}: fewer than --group-size {settings.group_size}"
        )
    bounds = settings.keep_return_bounds
    if bounds is not None and not bounds[0] < bounds[1]:
        raise InputError(f"--keep-return-bounds {bounds[0]} {bounds[1]}: LOW must be below HIGH")
    if settings.candidates not in (None, settings.group_size) and bounds is None:
        raise InputError(
            "--candidates does nothing without --keep-return-bounds: any group would be accepted"
        )
    for name, (accepted, is_accepted) in NUMBERS.items():
        value = getattr(settings, name)
        if value is not None and not is_accepted(value):
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} {value}: must be {accepted}")
    cores = os.cpu_count() or 1
    if settings.threads > cores:
        raise InputError(f"--threads {settings.threads}: the machine has {cores} cores")
    try:
        device = torch.device(settings.device)
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device {settings.device}: {first_line(error)}") from None
    if settings.data is not None and not settings.data.exists():
        raise InputError(f"--data {settings.data}: no such file")
    if settings.logger is not LoggerName.csv and find_spec(settings.logger.value) is None:
        package = settings.logger.value
        raise InputError(f"--logger {package}: the package is missing; pip install {package}")


def check_ranks(settings: Settings, world: int, resume: bool) -> None:
    """Whether the ranks can share the run."""
    if resume and settings.ranks != world:
        raise InputError(
            f"--resume {settings.output}: the run had {settings.ranks} ranks, and this one has "
            f"{world}; start as many with torchrun"
        )
    if settings.prompts % world:
        raise InputError(f"--prompts {settings.prompts}: not a multiple of the {world} ranks")


def fit_prompts(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    task: tasks.Task,
    problems: list[tasks.Problem] | None,
) -> int:
    """The longest prompt that is taken, in tokens; what does not fit is left out and counted."""
    room, context = prompt_room(settings, model)
    rng = random.Random(0)
    trial = problems or [task(rng) for _ in range(TRIAL_DRAWS)]
    lengths = []
    for problem in trial:
        tokens = prompt_tokens(tokenizer, problem)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
            raise InputError(
                f"{problem.source}: the model's vocabulary lacks parts of the prompt "
                f"{quoted(problem.prompt)}{other_model(settings)}"
            )
        lengths.append(len(tokens))
        check_answer(settings, tokenizer, problem)
    if min(lengths) > room:
        which = "prompts" if problems else f"of {TRIAL_DRAWS} prompts drawn"
        raise InputError(
            f"all {which} are longer than {room} tokens: the model's context is {context}, of "
            f"which --max-new-tokens takes {settings.max_new_tokens}"
        )
    return room


def other_model(settings: Settings) -> str:
    """The way out where the built-in model's few words do not do."""
    return "; --model takes another one" if settings.model is None else ""


def prompt_room(settings: Settings, model: PreTrainedModel) -> tuple[int, int]:
    """What a response leaves of the model's context, and the context, in tokens."""
    context = context_length(model) or 1 << 30
    room = context - settings.max_new_tokens
    if room < 1:
        raise InputError(
            f"--max-new-tokens {settings.max_new_tokens}: the model's context is {context} tokens"
        )
    return room, context


def check_answer(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, problem: tasks.Problem
) -> None:
    """Whether some response can be the answer."""
    if problem.answer is None:
        return
    what = f"{problem.source}: the answer {quoted(problem.answer)}"
    tokens = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
        raise InputError(
            f"{what} has parts that the model's vocabulary lacks: no response can match it"
            f"{other_model(settings)}"
        )
    if len(tokens) > settings.max_new_tokens:
        raise InputError(
            f"{what} is {len(tokens)} tokens long: no response of --max-new-tokens "
            f"{settings.max_new_tokens} can match it"
        )
    response = list(takewhile(lambda token: token != tokenizer.eos_token_id, tokens))
    (text,) = decode_responses(tokenizer, [response])
    if text == problem.answer:
        return
    reached, full = tasks.reward_of(problem, text), tasks.reward_of(problem, problem.answer)
    if reached < full:
        raise InputError(
            f"{what} has reward {full:g}, but the model's tokenizer makes it {quoted(text)}, of "
            f"reward {reached:g}: no response can match it"
        )
