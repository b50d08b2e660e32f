"""Builds a run from its settings and takes it to its end."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrl._utils import timeit
from torchrl.checkpoint import Checkpoint, CheckpointError, CheckpointRotation
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement
from torchrl.envs.transforms import Compose
from torchrl.record.loggers import Logger
from torchrl.trainers.trainers import LRSchedulerHook
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..losses import DAPO, CISPOLoss, GRPOLoss
from ..mc_advantage import MCAdvantage
from ..trainer import GRPOTrainer
from . import tasks
from .collector import (
    GROUP,
    GroupBuffer,
    RolloutCollector,
    TrainerScores,
    TrimAndWeigh,
    encode_prompt,
)
from .errors import InputError
from .policy import PaddedPolicy
from .report import Report
from .rollout import Rollout, TransformersRollout
from .settings import LoggerName, LossName, RolloutName, Settings
from .tiny_model import build_model, build_tokenizer
from .warm_up import warm_up

LOSSES = {LossName.grpo: GRPOLoss, LossName.dapo: DAPO, LossName.cispo: CISPOLoss}
WARM_UP_ROWS = 64
WARM_UP_LEARNING_RATE = 2e-3
BUILT_IN_WARM_UP_STEPS = 40
# Adam's first steps are as long as its learning rate, whatever the gradient.
RISING_STEPS = 20
# Draws of an endless task from which the longest prompt is judged.
TRIAL_DRAWS = 512


def run(settings: Settings, *, resume: bool) -> None:
    """The whole run. Raises InputError for what the user can put right."""
    check(settings)
    torch.set_num_threads(settings.threads)
    with ranks() as (rank, world):
        seed = settings.seed + 10_007 * rank
        torch.manual_seed(settings.seed)
        tokenizer, model = load_model(settings)
        problems = None
        if settings.data is not None:
            problems = tasks.read_problems(settings.data, settings.reward)
            task = tasks.drawn_from(problems)
        else:
            task = tasks.BUILT_IN.get(settings.task) or tasks.load_function(settings.task)
        prompt_length = fit_prompts(settings, tokenizer, model, task, problems)
        settings.output.mkdir(parents=True, exist_ok=True)
        report = Report(
            settings.output, settings.iterations, also=make_logger(settings, rank), quiet=rank > 0
        )
        with report.messages():
            model.train()
            if not resume:
                if rank == 0:
                    settings.save(settings.output / "settings.json")
                report.start()
                with timeit("warm-up"):
                    warm_up_model(settings, tokenizer, model, task, report)
            torch.manual_seed(seed)
            trainer = build_trainer(
                settings, tokenizer, model, task, prompt_length, report, rank, world, seed
            )
            if resume:
                load_checkpoint(trainer, settings)
                report.start()
            train(trainer, report)


def train(trainer: GRPOTrainer, report: Report) -> None:
    """To the last iteration, a stop or an error; the report is written in any case."""
    try:
        if len(report.rows) < report.iterations:  # a finished run may be resumed
            with report.live():
                trainer.train()
    except InputError:
        raise
    except Exception as error:
        if not is_lost_contact(error):
            raise
        raise InputError(
            f"{type(error).__name__}: {str(error).splitlines()[0]} -- the run stopped after "
            f"iteration {len(report.rows)}; go on with --resume {report.directory}"
        ) from error
    finally:
        report.finish()


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
    if settings.importance_cap is not None and settings.importance_cap <= 0:
        raise InputError(f"--importance-cap {settings.importance_cap}: must be above 0")
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {settings.device}: {str(error).splitlines()[0]}") from None
    if settings.data is not None and not settings.data.exists():
        raise InputError(f"--data {settings.data}: no such file")
    if settings.logger is not LoggerName.csv and find_spec(settings.logger.value) is None:
        package = settings.logger.value
        raise InputError(f"--logger {package}: the package is missing; pip install {package}")


@contextlib.contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """This process's number and their count, as torchrun sets them."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield 0, 1
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank(), world
    finally:
        with contextlib.suppress(RuntimeError):  # another rank may be gone
            dist.destroy_process_group()


def load_model(settings: Settings) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The tokenizer and the model, in fp32 on the device."""
    if settings.model is None:
        tokenizer = build_tokenizer()
        return tokenizer, build_model(len(tokenizer)).to(settings.device)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {settings.model}: {str(error).splitlines()[0]}") from None
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise InputError(
            f"--model {settings.model}: the tokenizer has {len(tokenizer)} tokens and the model "
            f"embeds {rows}: they do not belong together"
        )
    if tokenizer.eos_token_id is None:
        raise InputError(f"--model {settings.model}: its tokenizer has no end-of-text token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks go by lengths, not by this token
    return tokenizer, model.to(settings.device)


def fit_prompts(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    task: tasks.Task,
    problems: list[tasks.Problem] | None,
) -> int:
    """The longest prompt that is taken, in tokens; what does not fit is left out and counted."""
    context = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    room = context - settings.max_new_tokens
    if room < 1:
        raise InputError(
            f"--max-new-tokens {settings.max_new_tokens}: the model's context is {context} tokens"
        )
    rng = random.Random(0)
    trial = problems or [task(rng) for _ in range(TRIAL_DRAWS)]
    lengths = []
    for problem in trial:
        tokens = encode_prompt(tokenizer, problem.prompt)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
            raise InputError(
                f"{problem.source}: the model's vocabulary lacks parts of the prompt "
                f"{problem.prompt!r}"
            )
        lengths.append(len(tokens))
        check_answer(settings, tokenizer, problem)
    fitting = [length for length in lengths if length <= room]
    if not fitting:
        raise InputError(
            f"all prompts are longer than {room} tokens: the model's context is {context}, of "
            f"which --max-new-tokens takes {settings.max_new_tokens}"
        )
    return max(fitting)


def check_answer(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, problem: tasks.Problem
) -> None:
    """Whether some response can be the answer."""
    if problem.answer is None:
        return
    tokens = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
        raise InputError(
            f"{problem.source}: the model's vocabulary lacks parts of the answer "
            f"{problem.answer!r}: no response can match it"
        )
    if len(tokens) > settings.max_new_tokens:
        raise InputError(
            f"{problem.source}: the answer {problem.answer!r} is {len(tokens)} tokens long: no "
            f"response of --max-new-tokens {settings.max_new_tokens} can match it"
        )


def warm_up_model(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    task: tasks.Task,
    report: Report,
) -> None:
    """The supervised steps. All ranks take the same."""
    steps = settings.warm_up_steps
    if steps is None:
        steps = BUILT_IN_WARM_UP_STEPS if settings.model is None else 0
    if not steps:
        return
    losses: list[float] = []
    warm_up(
        model,
        tokenizer,
        task,
        steps=steps,
        rows=WARM_UP_ROWS,
        learning_rate=WARM_UP_LEARNING_RATE,
        seed=settings.seed,
        after_step=losses.append,
    )
    report.line(f"warm-up: {steps} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")


def build_loss(settings: Settings, actor: nn.Module) -> GRPOLoss:
    """The loss that the settings ask for."""
    options = {}
    if settings.fused_lm_head:
        options["fused_lm_head"] = True
    try:
        return LOSSES[settings.loss](
            actor,
            clip_epsilon=(settings.clip_low, settings.clip_high),
            kl_mask_threshold=settings.kl_mask_threshold,
            aggregation=settings.aggregation.value,
            entropy_bonus=settings.entropy_coeff is not None,
            entropy_coeff=settings.entropy_coeff or 0.0,
            kl_to_ref_coeff=settings.kl_to_ref,
            kl_to_inference_coeff=settings.kl_to_inference,
            semantics=settings.semantics.value,
            masking_strategy="sft",
            **options,
        )
    except (ValueError, TypeError) as error:
        raise InputError(str(error).splitlines()[0]) from None


def make_advantages(settings: Settings) -> MCAdvantage:
    """Selects from all responses to a prompt at once, when the last of them arrives."""
    return MCAdvantage(
        grpo_size=settings.group_size,
        prompt_key=GROUP,
        trajectory_return=None if settings.keep_return_bounds is None else "sum",
        keep_return_bounds=settings.keep_return_bounds,
        candidate_group_size=settings.candidates,
        candidate_selection_min_size=settings.candidates,
    )


def make_transforms(settings: Settings) -> Compose:
    """Of the replay buffer: groups go in and get their advantages, micro-batches come out."""
    return Compose(make_advantages(settings), TrimAndWeigh())


def build_trainer(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    task: tasks.Task,
    prompt_length: int,
    report: Report,
    rank: int,
    world: int,
    seed: int,
) -> GRPOTrainer:
    """The trainer with its collector, loss, buffer, report and checkpoints."""
    if settings.prompts % world:
        raise InputError(f"--prompts {settings.prompts}: not a multiple of the {world} ranks")
    prompts, samples = settings.prompts // world, settings.candidates or settings.group_size
    dtype = getattr(torch, settings.dtype.value)
    sizes = {
        "prompts": prompts,
        "samples": samples,
        "prompt_length": prompt_length,
        "max_new_tokens": settings.max_new_tokens,
    }
    if settings.ray:
        with timeit("engine start"):
            collector, buffer = start_ray(settings, tokenizer, model, task, sizes, seed)
        sender = collector
    else:
        with timeit("engine start"):
            rollout, sender = make_rollout(settings, tokenizer, model, seed)
        collector = RolloutCollector(
            task=task,
            tokenizer=tokenizer,
            rollout=rollout,
            policy=model,
            importance_cap=settings.importance_cap,
            dtype=dtype,
            seed=seed,
            **sizes,
        )
        buffer = GroupBuffer(
            storage=LazyTensorStorage(prompts * samples),
            sampler=SamplerWithoutReplacement(),
            batch_size=settings.mini_batch,
            transform=make_transforms(settings),
        )
    actor = PaddedPolicy(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    loss: nn.Module = build_loss(settings, actor)
    if world > 1:
        loss = DistributedDataParallel(loss)
    directory = settings.output if rank == 0 else settings.output / f"rank{rank}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GRPOTrainer is an experimental")
        trainer = GRPOTrainer(
            collector=collector,
            total_frames=sys.maxsize,  # the iterations end the run
            loss_module=loss,
            optimizer=torch.optim.AdamW(
                model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95)
            ),
            replay_buffer=buffer,
            empty_replay_buffer_on_weight_update=True,
            weight_sync_sender=sender,
            device=torch.device(settings.device),
            mixed_precision=dtype != torch.float32,
            autocast_dtype=dtype if dtype != torch.float32 else torch.bfloat16,
            gradient_accumulation_steps=settings.gradient_accumulation,
            num_epochs=settings.epochs,
            clip_norm=settings.clip_norm,
            logger=report,
            log_interval=0,
            progress_bar=False,
            checkpoint=Checkpoint(),
            checkpoint_rotation=CheckpointRotation(directory / "checkpoints", keep_last=2),
            # Saved where more frames than this have passed since the last time.
            save_trainer_interval=settings.save_every * prompts * samples - 1,
        )
    reference = None
    if settings.kl_to_ref:
        reference = copy.deepcopy(model).eval().requires_grad_(False)
    scores = TrainerScores(model, reference, dtype)
    trainer.register_op("process_optim_batch", scores)

    def end_iteration() -> None:
        report.end_iteration(
            collector.metrics | buffer.end_iteration() | scores.end_iteration(settings.epochs)
        )
        if len(report.rows) == settings.iterations:
            trainer.request_stop("all iterations are done")

    trainer.register_op("post_steps", end_iteration)
    steps = settings.iterations * settings.epochs * optimiser_steps(settings, prompts * samples)
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, rise_and_fall(steps))
    LRSchedulerHook(schedule, interval="optim").register(trainer)
    return trainer


def optimiser_steps(settings: Settings, rows: int) -> int:
    """Optimiser steps in one epoch over `rows` responses."""
    micro_batches = math.ceil(rows / settings.mini_batch)
    return math.ceil(micro_batches / settings.gradient_accumulation)


def rise_and_fall(steps: int) -> Callable[[int], float]:
    """Learning rate at a step, as a share of the highest."""
    return lambda step: min(1.0, (step + 1) / RISING_STEPS) * max(0.05, 1 - step / steps)


def make_rollout(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, seed: int
) -> tuple[Rollout, Any]:
    """What samples responses, and what sends it new weights (None: it shares the policy's)."""
    if settings.rollout is RolloutName.vllm:
        from .vllm_rollout import VLLMRollout

        rollout = VLLMRollout(
            model,
            tokenizer,
            max_new_tokens=settings.max_new_tokens,
            dtype=settings.dtype.value,
            seed=seed,
        )
        return rollout, rollout
    rollout = TransformersRollout(
        model,
        max_new_tokens=settings.max_new_tokens,
        end_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        dtype=getattr(torch, settings.dtype.value),
    )
    return rollout, None


def start_ray(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    task: tasks.Task,
    sizes: dict[str, int],
    seed: int,
) -> tuple[Any, Any]:
    """The collector and the replay buffer, in actors."""
    try:
        from .ray_rollout import ProblemEnv, start_actors
    except ImportError as error:
        raise InputError(f"--ray: {error}; pip install ray") from None
    return start_actors(
        model=model,
        make_rollout=partial(make_rollout, settings, tokenizer, seed=seed),
        make_env=partial(ProblemEnv, task, tokenizer, **sizes),
        make_transforms=partial(make_transforms, settings),
        rows=sizes["prompts"] * sizes["samples"],
        mini_batch=settings.mini_batch,
        seed=seed,
        threads=settings.threads,
        samples=sizes["samples"],
        max_new_tokens=settings.max_new_tokens,
        pad_id=tokenizer.pad_token_id,
        importance_cap=settings.importance_cap,
        dtype=getattr(torch, settings.dtype.value),
    )


def make_logger(settings: Settings, rank: int) -> Logger | None:
    """The torchrl logger that was asked for."""
    if rank > 0 or settings.logger is LoggerName.csv:
        return None
    name, directory = settings.output.resolve().name, str(settings.output)
    if settings.logger is LoggerName.tensorboard:
        from torchrl.record.loggers.tensorboard import TensorboardLogger

        return TensorboardLogger(name, log_dir=directory)
    import wandb
    from torchrl.record.loggers.wandb import WandbLogger

    try:
        return WandbLogger(name, save_dir=directory)
    except wandb.Error as error:
        raise InputError(f"--logger wandb: {str(error).splitlines()[0]}") from None


def load_checkpoint(trainer: GRPOTrainer, settings: Settings) -> None:
    """The latest checkpoint that every rank has."""
    rotation = trainer.checkpoint_rotation
    paths = {int(path.name.split("-")[-1]): path for path in rotation.checkpoints()}
    steps = sorted(paths)
    if trainer.world_size > 1:
        everyones: list[list[int]] = [[] for _ in range(trainer.world_size)]
        dist.all_gather_object(everyones, steps)
        steps = sorted(set.intersection(*map(set, everyones)))
    if not steps:
        raise InputError(f"--resume {settings.output}: no checkpoint in {rotation.directory}")
    try:
        trainer.load_from_file(paths[steps[-1]])
    except CheckpointError as error:
        raise InputError(f"--resume {settings.output}: {str(error).splitlines()[0]}") from None


def is_lost_contact(error: Exception) -> bool:
    """Whether an actor, engine or rank is gone, rather than something being wrong here."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"RayError", "DistError", "EngineDeadError"}:
        return True
    return "Connection closed by peer" in str(error) or "Connection reset" in str(error)
