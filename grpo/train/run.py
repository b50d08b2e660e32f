"""Builds a run from its settings and takes it to its end."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import math
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrl._utils import timeit
from torchrl.data import SamplerWithoutReplacement
from torchrl.envs.transforms import Compose
from torchrl.record.loggers import Logger
from torchrl.trainers.trainers import LRSchedulerHook
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..losses import DAPO, CISPOLoss, GRPOLoss
from ..mc_advantage import MCAdvantage
from ..trainer import GRPOTrainer
from . import tasks
from .checkpoints import SealedCheckpoint, load_latest, make_rotation
from .checks import check, check_ranks, fit_prompts, prompt_room
from .collector import (
    GROUP,
    BatchStorage,
    GroupBuffer,
    RolloutCollector,
    TrainerScores,
    TrimAndWeigh,
    encode_prompt,
)
from .errors import InputError, blamed_on, first_line
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


def run(settings: Settings, *, resume: bool, overwrite: bool) -> None:
    """The whole run. Raises InputError for whatever ends it before its end."""
    check(settings)
    torch.set_num_threads(settings.threads)
    with ranks() as (rank, world), contextlib.ExitStack() as stack:
        check_ranks(settings, world, resume)
        settings.ranks = world
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
        actor = PaddedPolicy(
            model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
        )
        loss = build_loss(settings, actor)
        stack.enter_context(alone_in(settings.output, rank))
        if not resume and rank == 0:
            prepare_output(settings, overwrite)
        report = Report(
            settings.output, settings.iterations, also=make_logger(settings, rank), quiet=rank > 0
        )
        with report.messages():
            model.eval()  # without dropout: the policy that is trained is the one that samples
            if not resume:
                report.start()
                with timeit("warm-up"):
                    warm_up_model(settings, tokenizer, model, task, report)
            torch.manual_seed(seed)
            reference = reference_model(settings, model, resume=resume, save=rank == 0)
            trainer = build_trainer(
                settings,
                tokenizer,
                model,
                reference,
                loss,
                task,
                prompt_length,
                report,
                rank,
                world,
                seed,
            )
            if resume:
                load_latest(trainer, settings.output, report.line)
                report.start()
            train(trainer, report)


def train(trainer: GRPOTrainer, report: Report) -> None:
    """To the last iteration, a stop or an error; the report is written in any case."""
    try:
        if len(report.rows) < report.iterations:  # a finished run may be resumed
            with report.live():
                trainer.train()
    except Exception as error:
        what = str(error)
        if not isinstance(error, InputError):
            what = f"{type(error).__name__}: {first_line(error)}"
            details = report.directory / "error.txt"
            with contextlib.suppress(OSError):
                details.write_text(traceback.format_exc())
                what += f" (more in {details})"
        way_on = "no checkpoint could be saved"
        if trainer.checkpoint_rotation.latest() is not None:
            way_on = f"go on with --resume {report.directory}"
            if trainer.process_group is not None:
                way_on += ", from the last checkpoint that all ranks have"
        raise InputError(
            f"{what} -- the run stopped after iteration {len(report.rows)}; {way_on}"
        ) from error
    finally:
        report.finish()


# What a run leaves in its directory.
REFERENCE = "reference.pt"
LEFT_BY_A_RUN = (
    "settings.json",
    "metrics.csv",
    "curves.png",
    "summary.txt",
    "error.txt",
    "checkpoints",
    "rank*",
    REFERENCE,
)


@contextlib.contextmanager
def alone_in(directory: Path, rank: int) -> Iterator[None]:
    """Raises InputError where another process of this rank is at work in the directory."""
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((directory / f".lock-{rank}").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{directory}: another run is at work there, as a run may be whose launcher was "
                "killed; end it first, or take another --output"
            ) from None
        except OSError as error:
            raise InputError(f"--output {directory}: {error.strerror or error}") from None
        yield


def prepare_output(settings: Settings, overwrite: bool) -> None:
    """Leave nothing of another run in the output directory, and this one's settings."""
    directory = settings.output
    try:
        left = [path for pattern in LEFT_BY_A_RUN for path in directory.glob(pattern)]
        if left and not overwrite:
            raise InputError(
                f"--output {directory}: there is a run already; --resume {directory} goes on with "
                "it, --overwrite takes its place"
            )
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        settings.save(directory / "settings.json")
    except OSError as error:
        raise InputError(f"--output {directory}: {error.strerror or error}") from None


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

    what = f"--model {settings.model}"
    with blamed_on(f"{what}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
    with blamed_on(f"{what}: its weights"):
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(f"{what}: its weights are not finite: {name}")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise InputError(
            f"{what}: the tokenizer has {len(tokenizer)} tokens and the model "
            f"embeds {rows}: they do not belong together"
        )
    if tokenizer.chat_template is not None:
        with blamed_on(f"{what}: its chat template"):
            encode_prompt(tokenizer, "1")
    if tokenizer.eos_token_id is None:
        raise InputError(f"{what}: its tokenizer has no end-of-text token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks go by lengths, not by this token
    with blamed_on(f"{what}, on --device {settings.device}"):
        return tokenizer, model.to(settings.device)


def warm_up_steps(settings: Settings) -> int:
    """How many supervised steps come first."""
    if settings.warm_up_steps is not None:
        return settings.warm_up_steps
    return BUILT_IN_WARM_UP_STEPS if settings.model is None else 0


def reference_model(
    settings: Settings, model: PreTrainedModel, *, resume: bool, save: bool
) -> PreTrainedModel | None:
    """The model that the KL penalty is to, as training begins; kept in a file for resumed runs."""
    if not settings.kl_to_ref:
        return None
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    if not warm_up_steps(settings):
        return reference
    path = settings.output / REFERENCE
    with blamed_on(f"{path}: the reference model"):
        if resume:
            reference.load_state_dict(torch.load(path, map_location=settings.device))
        elif save:
            torch.save(reference.state_dict(), path)
    return reference


def warm_up_model(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    task: tasks.Task,
    report: Report,
) -> None:
    """The supervised steps. All ranks take the same."""
    steps = warm_up_steps(settings)
    if not steps:
        return
    losses: list[float] = []
    warm_up(
        model,
        tokenizer,
        task,
        steps=steps,
        rows=WARM_UP_ROWS,
        prompt_length=prompt_room(settings, model)[0],
        max_new_tokens=settings.max_new_tokens,
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
        raise InputError(first_line(error)) from None


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
    reference: PreTrainedModel | None,
    loss: nn.Module,
    task: tasks.Task,
    prompt_length: int,
    report: Report,
    rank: int,
    world: int,
    seed: int,
) -> GRPOTrainer:
    """The trainer with its collector, buffer, report and checkpoints."""
    prompts, samples = settings.prompts // world, settings.candidates or settings.group_size
    dtype = getattr(torch, settings.dtype.value)
    sizes = {
        "prompts": prompts,
        "samples": samples,
        "prompt_length": prompt_length,
        "max_new_tokens": settings.max_new_tokens,
    }
    with timeit("engine start"):
        if settings.ray:
            collector, buffer = start_ray(settings, tokenizer, model, task, sizes, seed)
            sender = collector
        else:
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
                storage=BatchStorage(prompts * samples),
                sampler=SamplerWithoutReplacement(),
                batch_size=settings.mini_batch,
                transform=make_transforms(settings),
            )
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
            checkpoint=SealedCheckpoint(),
            checkpoint_rotation=make_rotation(directory / "checkpoints", world),
            # Saved where more frames than this have passed since the last time.
            save_trainer_interval=settings.save_every * prompts * samples - 1,
        )
    scores = TrainerScores(model, reference, dtype)
    trainer.register_op("process_optim_batch", scores)

    def end_iteration() -> None:
        metrics = collector.metrics | buffer.end_iteration() | scores.end_iteration(settings.epochs)
        report.end_iteration(over_ranks(metrics, trainer.process_group), collector.within_rollout)
        if len(report.rows) == settings.iterations:
            trainer.request_stop("all iterations are done")

    trainer.register_op("post_steps", end_iteration)
    steps = settings.iterations * settings.epochs * optimiser_steps(settings, prompts * samples)
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, rise_and_fall(steps))
    LRSchedulerHook(schedule, interval="optim").register(trainer)
    return trainer


def over_ranks(metrics: dict[str, float], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Of all ranks: shares and differences as means, the largest difference, counts as sums."""
    if group is None:
        return metrics
    everyones: list[dict[str, float]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyones, metrics, group=group)
    together = {}
    for name in metrics:
        values = [one[name] for one in everyones]
        if name in ("solved", "rollout_difference"):
            together[name] = sum(values) / len(values)
        else:
            together[name] = max(values) if name == "rollout_difference_max" else sum(values)
    return together


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
        raise InputError(f"--logger wandb: {first_line(error)}") from None
