"""GRPOTrainer: TorchRL 0.14.1's trainer of the same name on `torchrl.trainers.Trainer`.

An optimisation loop is cut into windows of `gradient_accumulation_steps` micro-batches. A window is
one optimiser step, with the gradient of its micro-batches taken as one batch, over all ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torchrl._utils import logger as torchrl_logger
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState
from torchrl.collectors import BaseCollector
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import ReplayBuffer
from torchrl.data.utils import DEVICE_TYPING
from torchrl.objectives.common import LossModule
from torchrl.record.loggers import Logger
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import (
    REWARD_KEY,
    OptimizationStepper,
    UpdateWeights,
)

from .buffer_feed import BufferCheckpoint, BufferFeed, set_batch_size
from .losses import GRPOLoss
from .normalisation import StepScales, count_tokens, metric_weight, step_scales
from .window_stepper import WeightedMeans, WindowStepper

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class RewardLog:
    """Mean, deviation and maximum of an entry over all micro-batches of an optimisation loop."""

    def __init__(self, key: NestedKey, trainer: GRPOTrainer) -> None:
        self.key = key
        self.trainer = trainer
        self._parts: list[Tensor] = []

    def add(self, batch: TensorDictBase) -> None:
        """Keep what is needed of a batch, on its device."""
        reward = batch[self.key].detach()
        if ("collector", "mask") in batch.keys(True):
            reward = reward[batch.get(("collector", "mask"))]
        self._parts.append(reward.flatten().to(torch.float64))

    def collected(self, batch: TensorDictBase) -> dict[str, float]:
        """The statistics of one collected batch."""
        self.add(batch)
        return self._statistics()

    def optimised(self, optim_steps: int, average_losses: TensorDictBase | None) -> dict | None:
        """The statistics of all batches added since the last call."""
        del optim_steps, average_losses
        return self._statistics()

    def _statistics(self) -> dict[str, float] | None:
        if not self._parts:
            return None
        reward = torch.cat(self._parts)
        self._parts = []
        largest = reward.max() if len(reward) else reward.new_tensor(-math.inf)
        sums = torch.stack([reward.new_tensor(len(reward)), reward.sum(), reward.square().sum()])
        group = self.trainer.process_group
        if group is not None:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        count, total, squares, largest = torch.cat([sums, largest[None]]).tolist()
        if not count:
            return None
        mean = total / count
        statistics = {"reward_mean": mean, "reward_max": largest, "log_pbar": True}
        if count > 1:
            variance = max(squares - count * mean * mean, 0.0) / (count - 1)
            statistics["reward_mean_std"] = math.sqrt(variance)
        return statistics


class GRPOTrainer(Trainer):
    """Trains a language model with GRPO or a like loss.

    A drop-in for `torchrl.trainers.algorithms.GRPOTrainer`, experimental as that is.

    * A window of `gradient_accumulation_steps` micro-batches is one optimiser step, with the
      gradient of the whole window over all ranks (whose gradients must be averaged: wrap the loss
      module or its model in DistributedDataParallel). Exact for the losses of this package; other
      losses are averaged over micro-batches.
    * A non-finite loss or gradient skips its own optimiser step, on all ranks, is counted and
      reported.
    * Logged means cover the whole optimisation loop and all ranks.
    * SIGINT (Ctrl-C), SIGTERM and SIGHUP end the run after the running iteration, with a
      checkpoint; a second one ends it at once. An error also leaves a checkpoint: of the state
      before the batch if the collector raised it, as far as the iteration came if not.
    * A checkpoint holds all that the next step depends on, random number generators included; of a
      RayLLMCollector only what is in this process. Restoring one pushes the weights.

    Keyword Args:
        collector: yields batches, or writes to its own replay buffer and yields None.
        total_frames: dialog turns to collect in all.
        frame_skip: 1 for language models.
        optim_steps_per_batch: micro-batches drawn per collected batch and epoch; None: one pass
            over the replay buffer.
        loss_module: its outputs that start with "loss" are summed and minimised.
        optimizer: needed unless an `optimization_stepper` is given.
        optimization_stepper: replaces the stepper that is built from `optimizer`,
            `mixed_precision`, `autocast_dtype`, `gradient_accumulation_steps` and `clip_norm`; it
            is then called with one micro-batch at a time.
        weight_sync_sender: its `update_weights()` pushes weights to the inference engine.
        weight_update_frequency: optimiser steps between pushes with `async_collection`; without,
            they are pushed once per collected batch.
        empty_replay_buffer_on_weight_update: empty the buffer once its batch has been trained on.
        replay_buffer: where micro-batches are drawn from; None: the collected batch is one.
        batch_size: of the micro-batches, instead of the replay buffer's.
        device: micro-batches are moved there.
        mixed_precision, autocast_dtype: autocast for the forward pass; with float16, loss scaling.
        gradient_accumulation_steps: micro-batches to an optimiser step.
        logger, log_interval: where and every how many frames metrics are logged.
        clip_norm: the gradient's norm is clipped to it; None: not clipped.
        progress_bar: show a tqdm bar.
        seed: for the collector, torch and numpy.
        save_trainer_interval: frames between saves, to `save_trainer_file`.
        checkpoint, checkpoint_rotation, checkpoint_metadata: see `torchrl.checkpoint`. With several
            ranks keep at least the last three: a rank that dies can be one save behind the others,
            which save once more as they stop.
        num_epochs: passes over each collected batch.
        async_collection: the collector runs by itself and fills the replay buffer.
        log_timings, auto_log_optim_steps, log_rewards, log_kl: what is logged.
    """

    def __init__(
        self,
        *,
        collector: BaseCollector,
        total_frames: int,
        frame_skip: int = 1,
        optim_steps_per_batch: int | None = None,
        loss_module: LossModule | Callable[[TensorDictBase], TensorDictBase],
        optimizer: optim.Optimizer | None = None,
        optimization_stepper: OptimizationStepper | None = None,
        weight_sync_sender: Any | None = None,
        weight_update_frequency: int = 1,
        empty_replay_buffer_on_weight_update: bool = False,
        replay_buffer: ReplayBuffer | None = None,
        batch_size: int | None = None,
        device: DEVICE_TYPING | None = None,
        mixed_precision: bool = False,
        autocast_dtype: torch.dtype = torch.bfloat16,
        gradient_accumulation_steps: int = 1,
        logger: Logger | None = None,
        clip_norm: float | None = 1.0,
        progress_bar: bool = True,
        seed: int | None = None,
        save_trainer_interval: int = 10000,
        log_interval: int = 10000,
        save_trainer_file: str | Path | None = None,
        checkpoint: Checkpoint | None = None,
        checkpoint_rotation: CheckpointRotation | None = None,
        checkpoint_metadata: Callable[[Trainer], Mapping[str, Any]] | None = None,
        num_epochs: int = 1,
        async_collection: bool = False,
        log_timings: bool = False,
        auto_log_optim_steps: bool = True,
        log_rewards: bool = True,
        log_kl: bool = True,
    ) -> None:
        warnings.warn(
            "GRPOTrainer is an experimental/prototype feature: its interface follows TorchRL's and "
            "may change with it.",
            UserWarning,
            stacklevel=2,
        )
        _check_counts(
            total_frames=total_frames,
            frame_skip=frame_skip,
            optim_steps_per_batch=optim_steps_per_batch,
            weight_update_frequency=weight_update_frequency,
            batch_size=batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            num_epochs=num_epochs,
        )
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be a number > 0 or None, got {clip_norm!r}")
        if async_collection and not hasattr(collector, "start"):
            raise ValueError(
                "async_collection needs a collector that runs by itself, with `start()`; "
                f"{type(collector).__name__} has none"
            )
        if optimization_stepper is None:
            if optimizer is None:
                raise ValueError(
                    "GRPOTrainer needs an `optimizer` or an `optimization_stepper`, got neither."
                )
            optimization_stepper = WindowStepper(
                optimizer,
                mixed_precision=mixed_precision,
                autocast_dtype=autocast_dtype,
                gradient_accumulation_steps=gradient_accumulation_steps,
                clip_norm=clip_norm,
            )
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=frame_skip,
            optim_steps_per_batch=optim_steps_per_batch,
            loss_module=loss_module,
            optimizer=optimizer,
            optimization_stepper=optimization_stepper,
            replay_buffer=replay_buffer,
            batch_size=batch_size,
            logger=logger,
            progress_bar=progress_bar,
            seed=seed,
            save_trainer_interval=save_trainer_interval,
            log_interval=log_interval,
            save_trainer_file=save_trainer_file,
            checkpoint=checkpoint,
            checkpoint_rotation=checkpoint_rotation,
            checkpoint_metadata=checkpoint_metadata,
            num_epochs=num_epochs,
            async_collection=async_collection,
            log_timings=log_timings,
            auto_log_optim_steps=auto_log_optim_steps,
        )
        # The base class keeps these on the class, where trainers would share them.
        self.collected_frames = self._optim_count = self._last_save = 0
        self._last_log = {}
        self._saved_at: int | None = None
        self._left_out_micro_batches = 0
        self._weight_sync_sender = weight_sync_sender
        if isinstance(collector, RayLLMCollector):
            _mend_ray_collector(collector)
        self._collector_is_shut_down = False

        modules = list(loss_module.modules()) if isinstance(loss_module, nn.Module) else []
        self._data_parallel = [m for m in modules if isinstance(m, DistributedDataParallel)]
        loss = loss_module
        if isinstance(loss, DistributedDataParallel):
            loss = loss.module
        takes_normaliser = isinstance(loss, GRPOLoss) and (
            "normaliser" in inspect.signature(loss.forward).parameters
        )
        self._exact_loss = loss if takes_normaliser else None
        self._feed = None
        if replay_buffer is not None:
            self._wire_replay_buffer(device)
        if weight_sync_sender is not None:
            self._wire_weight_sync(weight_sync_sender, weight_update_frequency)
        if empty_replay_buffer_on_weight_update and replay_buffer is not None:
            self.register_op("post_steps", self._empty_replay_buffer)
        if log_rewards:
            self._wire_reward_log()
        if log_kl:
            self.register_op("post_optim_complete_log", self._log_kl_metrics)

    # Hooks

    def _wire_replay_buffer(self, device: DEVICE_TYPING | None) -> None:
        if self.batch_size is not None:
            set_batch_size(self.replay_buffer, self.batch_size)
        if self.replay_buffer.batch_size is None:
            raise ValueError(
                "replay_buffer has no batch size; construct it with batch_size=, or pass "
                "batch_size= to GRPOTrainer"
            )
        self._feed = BufferFeed(
            self.replay_buffer,
            iterate=not self.async_collection,
            endless=self.optim_steps_per_batch is not None,
            device=device,
        )
        # A collector with a buffer of its own writes there and yields None.
        if not self.async_collection and getattr(self.collector, "replay_buffer", None) is None:
            self.register_op("pre_epoch", self._feed.extend)
        self.register_op("process_optim_batch", self._feed.sample)

    def _wire_weight_sync(self, sender: Any, frequency: int) -> None:
        if self.async_collection:
            update = UpdateWeights(
                update_weights_interval=frequency,
                trainer=self,
                sender=sender,
                interval_unit="optim_steps",
            )
        else:
            update = UpdateWeights(trainer=self, sender=sender)
        update.register(self)  # times itself as "hook/update_weights"

    def _wire_reward_log(self) -> None:
        log = RewardLog(REWARD_KEY, self)
        if self.async_collection or self.replay_buffer is not None:
            self.register_op("post_optim_log", log.add)
            self.register_op("post_optim_complete_log", log.optimised)
        else:
            self.register_op("pre_steps_log", log.collected)

    def _empty_replay_buffer(self) -> None:
        self.replay_buffer.empty(empty_write_count=False)

    def _log_kl_metrics(
        self, optim_steps: int, average_losses: TensorDictBase | None
    ) -> dict[str, float]:
        del optim_steps
        if average_losses is None or self.auto_log_optim_steps:  # it logs them itself
            return {}
        names = [name for name in ("kl_to_ref", "kl_to_inference") if name in average_losses]
        return {name: average_losses[name].item() for name in names}

    # Ranks

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share each optimiser step; None if this process is alone."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = self._data_parallel[0].process_group if self._data_parallel else dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    @property
    def world_size(self) -> int:
        """How many ranks share each optimiser step."""
        group = self.process_group
        return 1 if group is None else dist.get_world_size(group)

    @contextlib.contextmanager
    def _gradient_sync(self, last_of_window: bool) -> Iterator[None]:
        """Gradients are exchanged once a window, in its last backward pass."""
        with contextlib.ExitStack() as stack:
            if not last_of_window:
                for module in self._data_parallel:
                    stack.enter_context(module.no_sync())
            yield

    def _agreed(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        """`value` reduced over the ranks."""
        group = self.process_group
        if group is None:
            return value
        device = next(self.loss_module.parameters()).device
        reduced = torch.tensor(value, device=device)
        dist.all_reduce(reduced, operation, group=group)
        return int(reduced)

    # One optimisation loop

    def compute_loss(
        self,
        sub_batch: TensorDictBase,
        method: str | None = None,
        *,
        normaliser: Tensor | None = None,
    ) -> TensorDictBase | tuple[Any, ...]:
        """The loss module's output for one micro-batch."""
        if method is not None:
            return getattr(self.loss_module, method)(sub_batch)
        if normaliser is None:
            return self.loss_module(sub_batch)
        return self.loss_module(sub_batch, normaliser=normaliser)

    def _scales_and_weights(
        self, micro_batches: Sequence[TensorDictBase]
    ) -> tuple[list[StepScales], list[Tensor | float]]:
        """How each micro-batch's loss enters the step's, and how much its metrics weigh."""
        loss, group = self._exact_loss, self.process_group
        if loss is None:
            return (
                [StepScales(None, None)] * len(micro_batches),
                [float(batch.numel()) for batch in micro_batches],
            )
        divided = self.optimization_stepper.gradient_accumulation_steps > 1 or group is not None
        counts = [count_tokens(loss, batch, may_score=divided) for batch in micro_batches]
        weights = [
            metric_weight(loss, batch, count)
            for batch, count in zip(micro_batches, counts, strict=True)
        ]
        if not divided:
            return [StepScales(None, None)], weights
        return step_scales(loss, counts, group), weights

    def _micro_batches(self, batch: TensorDictBase | None) -> Iterator[TensorDictBase]:
        """The micro-batches of one epoch."""
        draws = 1
        if self._feed is not None:
            draws = self._feed.start_epoch()
        if draws and self.optim_steps_per_batch is not None:
            draws = self.optim_steps_per_batch
        for _ in range(draws):
            try:
                sub_batch = self._process_optim_batch_hook(batch)
            except StopIteration:
                return
            if sub_batch is None:
                return
            yield sub_batch

    def _windows(self, batch: TensorDictBase | None) -> Iterator[list[TensorDictBase]]:
        """The micro-batches of one epoch, one optimiser step at a time; the last may be shorter."""
        micro_batches = self._micro_batches(batch)
        if self.process_group is not None:
            mine = list(micro_batches)
            agreed = self._agreed(len(mine), dist.ReduceOp.MIN)
            if agreed < len(mine):
                self._left_out_micro_batches += len(mine) - agreed
                torchrl_logger.warning(
                    f"{len(mine) - agreed} of {len(mine)} micro-batches are left out: another rank "
                    "has fewer."
                )
            micro_batches = iter(mine[:agreed])
        size = 1
        if isinstance(self.optimization_stepper, WindowStepper):
            size = self.optimization_stepper.gradient_accumulation_steps
        while window := list(islice(micro_batches, size)):
            yield window

    def _step(self, window: list[TensorDictBase]) -> WeightedMeans:
        stepper = self.optimization_stepper
        if isinstance(stepper, WindowStepper):
            means = stepper.step_window(self, window)
        else:
            means = WeightedMeans()
            for name, value in stepper.step(self, window[0]).items():
                means.add(name, value)
        self._optim_count = getattr(stepper, "optimizer_step_count", self._optim_count + 1)
        return means

    def optim_steps(self, batch: TensorDictBase | None) -> None:
        """All epochs over what has been collected, and the logging of their means."""
        means = WeightedMeans()
        windows = 0
        if self._feed is not None:
            self._feed.new_batch()
        self._pre_optim_hook()
        for _ in range(self.num_epochs):
            self._pre_epoch_log_hook(batch)
            processed = self._pre_epoch_hook(batch)
            for window in self._windows(processed):
                means.update(self._step(window))
                windows += 1
                self._post_optim_hook()
                for sub_batch in window:
                    self._post_optim_log(sub_batch)
            self._post_epoch_log_hook(batch)
            self._post_epoch_hook()
        if not windows:
            torchrl_logger.warning("Nothing to train on in this batch: the replay buffer is empty.")
            return
        self._post_optim_complete_log_hook(self._optim_count, means.means(self.process_group))
        skipped = getattr(self.optimization_stepper, "_skipped_nonfinite_steps", 0)
        self._log(skipped_nonfinite_steps=skipped)
        if self.process_group is not None:
            self._log(left_out_micro_batches=self._left_out_micro_batches)

    # The run

    def train(self) -> None:
        """Collect and train until `total_frames`, a requested stop, or the collector's end."""
        if self.progress_bar:
            from tqdm import tqdm  # the base class has seen that it is there

            self._pbar = tqdm(total=self.total_frames, initial=self.collected_frames)
            self._pbar_str = {}
        with self._stop_on_signals():
            try:
                self._iterations()
            except BaseException as error:
                if isinstance(error, Exception):
                    self._save_what_is_left()
                with contextlib.suppress(Exception):  # the first error is the one to show
                    self.shutdown()
                raise
            self._shutdown_hook()
            self.shutdown()

    def _iterations(self) -> None:
        batches = self._batches()
        self._setup_hook()
        rng = GlobalRNGState()
        while self.collected_frames < self.total_frames:
            before = rng.state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                break
            except Exception:
                rng.load_state_dict(before)  # the next run draws this batch again
                raise
            self._iteration(batch)
            if self._agreed(int(self._stop_training), dist.ReduceOp.MAX):
                torchrl_logger.info(f"Stopped: {self._stop_reason or 'asked to'}.")
                break
            if self.collected_frames < self.total_frames:
                self.save_trainer()
        if self._saved_at != self.collected_frames:
            self.save_trainer(force_save=True)

    def _iteration(self, batch: TensorDictBase | None) -> None:
        before = self.collected_frames
        if batch is not None:
            batch = self._process_batch_hook(batch)
            mask = batch.get(("collector", "mask"), None)
            turns = batch.numel() if mask is None else int(mask.sum())
            self.collected_frames += turns * self.frame_skip
        elif self.replay_buffer is not None:
            self.collected_frames = self._replay_write_count()
        else:
            self.collected_frames = self.collector.getattr_rb("write_count")
        self._pre_steps_log_hook(batch)
        if self.collected_frames >= getattr(self.collector, "init_random_frames", 0):
            self.optim_steps(batch)
        self._post_steps_hook()
        self._post_steps_log_hook(batch)
        if self.progress_bar:
            self._pbar.update(self.collected_frames - before)
            self._pbar_description()

    def _batches(self) -> Iterator[TensorDictBase | None]:
        if not self.async_collection:
            return iter(self.collector)
        self.collector.start()
        while self.collector.getattr_rb("write_count") == 0:
            self._check_collector_runs()
            time.sleep(0.1)
        return self._async_iterator()

    def _async_iterator(self) -> Iterator[None]:
        while self.collector.getattr_rb("write_count") < self.total_frames:
            self._check_collector_runs()
            yield None

    def _check_collector_runs(self) -> None:
        is_running = getattr(self.collector, "is_running", None)
        if is_running is not None and not is_running():
            raise RuntimeError(
                f"The collector stopped by itself after {self.collected_frames} of "
                f"{self.total_frames} frames."
            )

    @contextlib.contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread only
            return

        def stop(number: int, frame: Any) -> None:
            signal.signal(number, previous[number])  # the next one acts as it did before
            name = signal.Signals(number).name
            self.request_stop(name)
            torchrl_logger.warning(
                f"{name}: the run ends after this iteration, and saves. Again ends it at once."
            )

        previous = {
            number: signal.signal(number, stop)
            for number in STOP_SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def shutdown(self) -> None:
        """Shut the collector down, once."""
        if self._collector_is_shut_down:
            return
        self._collector_is_shut_down = True
        self.collector.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # also when __init__ raised, or at interpreter exit
            self.shutdown()

    # Checkpoints

    def _sync_checkpoint_components(self, checkpoint: Checkpoint | None = None) -> Checkpoint:
        checkpoint = checkpoint or self.checkpoint or Checkpoint()
        if self.replay_buffer is not None and "replay_buffer" not in checkpoint:
            checkpoint.register("replay_buffer", BufferCheckpoint(self.replay_buffer))
        checkpoint = super()._sync_checkpoint_components(checkpoint)
        if "rng" not in checkpoint:
            checkpoint.register("rng", GlobalRNGState())
        return checkpoint

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on."""
        state = super().state_dict()
        state["rng"] = GlobalRNGState().state_dict()
        if self.replay_buffer is not None:
            state["replay_buffer"] = self.replay_buffer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state_dict)
        if self.replay_buffer is not None and "replay_buffer" in state_dict:
            self.replay_buffer.load_state_dict(state_dict["replay_buffer"])
        if "rng" in state_dict:
            GlobalRNGState().load_state_dict(state_dict["rng"])

    def save_trainer(self, force_save: bool = False) -> None:
        """Save if `save_trainer_interval` frames have passed since the last time, or if forced."""
        due = self.collected_frames - self._last_save > self.save_trainer_interval
        if self._has_checkpoint_destination() and (due or force_save):
            self._last_save = self._saved_at = self.collected_frames
            if self.save_trainer_file is not None:
                Path(self.save_trainer_file).parent.mkdir(parents=True, exist_ok=True)
            self._save_trainer()

    def _save_what_is_left(self) -> None:
        """A checkpoint for a run that ends by an error."""
        if self._saved_at == self.collected_frames:
            return
        if isinstance(self.loss_module, nn.Module) and not all(
            bool(p.isfinite().all()) for p in self.loss_module.parameters()
        ):
            torchrl_logger.warning("Parameters are not finite: no checkpoint is saved of them.")
            return
        try:
            self.save_trainer(force_save=True)
        except Exception as error:  # the first error is the one to show
            torchrl_logger.warning(f"No checkpoint could be saved: {error}")

    def load_from_file(self, file: str | Path, **kwargs) -> GRPOTrainer:
        """Restore a checkpoint; also one that was killed between its two renames."""
        _restore_backup(Path(file))
        super().load_from_file(file, **kwargs)
        self._saved_at = self.collected_frames
        if self._weight_sync_sender is not None:
            self._weight_sync_sender.update_weights()
        return self


def _check_counts(**counts: int | None) -> None:
    """Raise ValueError naming the first that is neither a whole number above 0 nor None."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} must be a whole number above 0, got {count!r}")


def _mend_ray_collector(collector: RayLLMCollector) -> None:
    """Methods that it inherits and that cannot work, or do harm, on this side of the actor."""
    import ray

    actor = collector._collector

    def shutdown() -> None:
        # Also called when the collector is collected: any call after ray.shutdown() starts Ray.
        if ray.is_initialized():
            ray.get(actor.shutdown.remote())

    # Only the actor has the environment that the inherited ones of the state look for.
    mended = {"shutdown": shutdown, "state_dict": dict, "load_state_dict": lambda state: None}
    for name, method in mended.items():
        if getattr(type(collector), name) is getattr(RayLLMCollector, name):  # not a subclass's own
            setattr(collector, name, method)


def _restore_backup(path: Path) -> None:
    """torchrl moves the old checkpoint aside before it moves the new one in; bring it back."""
    if path.exists():
        return
    backups = [p for p in path.parent.glob(f".{path.name}.backup-*") if Checkpoint.is_checkpoint(p)]
    if backups:
        max(backups, key=lambda p: p.stat().st_mtime).rename(path)
