"""GRPOTrainer: what a step is, what is counted, what is logged."""

import math
import re

import pytest
import torch
from torchrl.objectives.llm import GRPOLoss as TorchRLLoss
from torchrl.trainers.trainers import MixedPrecisionOptimizationStepper
from toy_run import BigramActor, Log, ToyCollector, make_batch, make_buffer, make_trainer

from grpo import CISPOLoss, GRPOLoss, GRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:GRPOTrainer is an experimental")


class Recorder(torch.optim.SGD):
    """Keeps the gradient of each step, and changes nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.gradients = []

    def step(self, closure=None):
        self.gradients.append(
            torch.cat([p.grad.flatten().clone() for g in self.param_groups for p in g["params"]])
        )


def gradients(batch_size: int, accumulate: int, loss_options: dict, cls=GRPOLoss, **options):
    loss = cls(BigramActor(), **loss_options)
    recorder = Recorder(loss.parameters())
    trainer = make_trainer(
        loss=loss,
        optimizer=recorder,
        lengths=[2, 3, 7, 8],
        replay_buffer=make_buffer(batch_size, shuffle=False),
        gradient_accumulation_steps=accumulate,
        clip_norm=None,
        **options,
    )
    torch.manual_seed(0)
    trainer.train()
    return recorder.gradients


def test_experimental_warning_and_missing_optimizer():
    with pytest.warns(UserWarning, match="experimental/prototype"):
        make_trainer()
    with pytest.raises(ValueError, match="optimizer"):
        GRPOTrainer(collector=ToyCollector(), total_frames=1, loss_module=GRPOLoss(BigramActor()))


@pytest.mark.parametrize("cls", [GRPOLoss, CISPOLoss])
@pytest.mark.parametrize("semantics", ["torchrl", "corrected"])
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.2},
        {"kl_mask_threshold": 0.4, "kl_to_ref_coeff": 0.3},
        {"entropy_bonus": False, "reduction": "sum"},
    ],
)
def test_micro_batches_give_the_gradient_of_the_whole_batch(cls, semantics, aggregation, more):
    options = {"semantics": semantics, "aggregation": aggregation, **more}
    (whole,) = gradients(4, 1, options, cls)
    (cut,) = gradients(2, 2, options, cls)
    assert whole.norm() > 1e-3
    torch.testing.assert_close(cut, whole, rtol=1e-8, atol=1e-12)


def test_a_naive_mean_over_micro_batches_is_far_off():
    """The fault that the normaliser mends: 5 and 15 tokens would weigh the same."""
    options = {"entropy_bonus": False}
    (whole,) = gradients(4, 1, options)
    parts = gradients(2, 1, options)
    assert (sum(parts) / 2 - whole).norm() / whole.norm() > 0.1


def test_a_window_cut_short_by_the_epoch_is_a_step_of_its_own():
    trainer = make_trainer(
        lengths=[4] * 5,
        replay_buffer=make_buffer(1),
        gradient_accumulation_steps=2,
        num_epochs=2,
    )
    trainer.train()
    assert trainer.optimization_stepper.optimizer_step_count == trainer._optim_count == 6


def test_epochs_do_not_write_the_batch_again():
    """Vector 30."""
    trainer = make_trainer(num_epochs=3, empty_replay_buffer_on_weight_update=False)
    trainer.train()
    assert len(trainer.replay_buffer) == 4
    assert trainer._optim_count == trainer.optimization_stepper.optimizer_step_count == 6


def test_batches_after_the_first_are_written_though_the_object_is_the_same():
    batch = make_batch([5, 15, 3, 8])
    trainer = make_trainer(batches=3, empty_replay_buffer_on_weight_update=False)

    class SameObject(ToyCollector):
        def __iter__(self):
            while True:
                yield batch

    trainer.collector = SameObject()
    trainer.train()
    assert len(trainer.replay_buffer) == 12


@pytest.mark.parametrize(("semantics", "accumulate"), [("torchrl", 1), ("corrected", 3)])
def test_logged_means_cover_the_whole_loop(semantics, accumulate):
    """Weighted by tokens; TorchRL's covers the last epoch's share only."""
    log = Log()
    rewards = make_batch([5, 15, 3, 8])["next", "reward"].flatten()
    loss = GRPOLoss(BigramActor(), semantics=semantics)
    trainer = make_trainer(
        loss=loss,
        optimizer=Recorder(loss.parameters()),
        num_epochs=3,
        logger=log,
        replay_buffer=make_buffer(3 // accumulate),
        gradient_accumulation_steps=accumulate,
    )
    torch.manual_seed(3)
    trainer.train()
    torch.manual_seed(3)
    batch = next(iter(ToyCollector()))
    whole = loss(batch)
    for name in ("kl_approx", "entropy", "clip_fraction"):
        assert log.values[name] == [pytest.approx(getattr(whole, name).item(), rel=1e-6)]
    assert log.values["reward_mean"] == [pytest.approx(rewards.mean().item())]
    assert log.values["reward_max"] == [pytest.approx(rewards.max().item())]
    assert log.values["optim_steps"] == [6]
    assert log.values["reward_mean_std"][0] == pytest.approx(rewards.repeat(3).std().item())


def test_the_logged_loss_of_micro_batches_is_that_of_the_whole_batch():
    log, loss = Log(), GRPOLoss(BigramActor())
    torch.manual_seed(3)
    trainer = make_trainer(
        loss=loss,
        optimizer=Recorder(loss.parameters()),
        replay_buffer=make_buffer(1),
        gradient_accumulation_steps=4,
        logger=log,
    )
    trainer.train()
    torch.manual_seed(3)
    whole = loss(next(iter(ToyCollector())))
    for name in ("loss_objective", "loss_entropy"):
        assert log.values[name] == [pytest.approx(getattr(whole, name).item(), rel=1e-6)]


def test_batch_size_overrides_the_buffers():
    trainer = make_trainer(batch_size=1)
    trainer.train()
    assert trainer._optim_count == 4


def test_optim_steps_per_batch_counts_micro_batches():
    trainer = make_trainer(optim_steps_per_batch=5)
    trainer.train()
    assert trainer._optim_count == 5


def test_without_a_buffer_the_batch_is_one_step():
    log = Log()
    trainer = make_trainer(replay_buffer=None, num_epochs=2, logger=log)
    trainer.train()
    assert trainer._optim_count == 2
    assert len(log.values["reward_mean"]) == 1


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_non_finite_step_is_skipped_alone(clip_norm, what, accumulate):
    def spoil(number, batch):
        if number == 2 and what == "loss":
            batch["advantage"][3] = math.nan

    log = Log()
    trainer = make_trainer(
        batches=3,
        change=spoil,
        clip_norm=clip_norm,
        logger=log,
        replay_buffer=make_buffer(4 // accumulate, shuffle=False),
        gradient_accumulation_steps=accumulate,
    )
    actor = trainer.loss_module.actor_network
    if what == "gradient":
        calls = []

        def spoil_gradient(gradient):
            calls.append(1)
            return gradient * math.nan if len(calls) == accumulate + 1 else gradient

        actor.logits.register_hook(spoil_gradient)
    trainer.train()
    assert trainer._optim_count == trainer.optimization_stepper.optimizer_step_count == 2
    assert log.values["skipped_nonfinite_steps"] == [0, 1, 1]
    assert actor.logits.isfinite().all()
    assert all(map(math.isfinite, log.values["loss_objective"]))
    assert len(log.values["loss_objective"]) == 2


def test_an_empty_response_and_an_all_equal_group_do_no_harm():
    def change(number, batch):
        batch["advantage"].zero_()

    trainer = make_trainer(
        lengths=[0, 0, 5, 3], change=change, replay_buffer=make_buffer(2, shuffle=False)
    )
    trainer.train()
    assert trainer._optim_count == 2
    assert trainer.loss_module.actor_network.logits.isfinite().all()


def test_an_empty_buffer_is_no_step():
    buffer = make_buffer(2)
    buffer.extend = lambda batch: None  # every group dropped
    trainer = make_trainer(batches=2, replay_buffer=buffer)
    trainer.train()
    assert trainer._optim_count == 0
    assert trainer.collected_frames == 8


@pytest.mark.parametrize("accumulate", [1, 2])
def test_torchrls_loss_and_stepper_work(accumulate):
    """Vector 29: there a TypeError at the second micro-batch."""
    loss = TorchRLLoss(BigramActor(), masking_strategy="sft")
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    stepper = MixedPrecisionOptimizationStepper(optimizer, gradient_accumulation_steps=accumulate)
    trainer = make_trainer(
        loss=loss,
        optimizer=None,
        optimization_stepper=stepper,
        replay_buffer=make_buffer(1),
        num_epochs=2,
    )
    trainer.train()
    assert stepper.optimizer_step_count == trainer._optim_count == 8 // accumulate


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_trains(dtype):
    trainer = make_trainer(mixed_precision=True, autocast_dtype=dtype)
    before = trainer.loss_module.actor_network.logits.detach().clone()
    trainer.train()
    assert trainer._optim_count == 2
    assert not torch.equal(before, trainer.loss_module.actor_network.logits)


class Sender:
    def __init__(self):
        self.pushes = 0

    def update_weights(self):
        self.pushes += 1


def test_weights_are_pushed_once_per_batch():
    sender = Sender()
    make_trainer(batches=3, num_epochs=2, weight_sync_sender=sender).train()
    assert sender.pushes == 3


class AsyncCollector(ToyCollector):
    """Fills the buffer by itself: a batch at each look at its write count."""

    def __init__(self, buffer, dies_at=None):
        super().__init__()
        self.replay_buffer = buffer
        self.batch = iter(ToyCollector())
        self.dies_at = dies_at

    def start(self):
        self.replay_buffer.extend(next(self.batch))

    def getattr_rb(self, name):
        count = getattr(self.replay_buffer, name)
        if self.is_running():
            self.replay_buffer.extend(next(self.batch))
        return count

    def is_running(self):
        return self.dies_at is None or self.replay_buffer.write_count < self.dies_at


def test_async_collection_pushes_weights_between_steps():
    sender, buffer = Sender(), make_buffer(2)
    trainer = make_trainer(
        batches=5,
        replay_buffer=buffer,
        async_collection=True,
        weight_sync_sender=sender,
        weight_update_frequency=2,
        optim_steps_per_batch=3,
        empty_replay_buffer_on_weight_update=False,
        collector=AsyncCollector(buffer),
    )
    trainer.train()
    assert trainer._optim_count % 3 == 0
    assert sender.pushes == trainer._optim_count // 2


def test_async_collection_says_so_when_the_collector_has_died():
    buffer = make_buffer(2)
    trainer = make_trainer(
        batches=50,
        replay_buffer=buffer,
        async_collection=True,
        optim_steps_per_batch=1,
        collector=AsyncCollector(buffer, dies_at=12),
    )
    with pytest.raises(RuntimeError, match="stopped by itself after"):
        trainer.train()


def test_the_collector_is_shut_down_once():
    trainer = make_trainer()
    trainer.train()
    collector = trainer.collector
    del trainer
    assert collector.shutdowns == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *[
            ({name: value}, f"{name} must be a whole number above 0, got {value!r}")
            for name, value in (
                ("frame_skip", 0),
                ("batch_size", 0),
                ("batch_size", -1),
                ("num_epochs", 0),
                ("optim_steps_per_batch", -1),
                ("gradient_accumulation_steps", 1.5),
                ("weight_update_frequency", 0),
            )
        ],
        ({"clip_norm": -1.0}, "clip_norm must be a number > 0 or None, got -1.0"),
        ({"clip_norm": math.nan}, "clip_norm must be a number > 0 or None, got nan"),
        ({"async_collection": True}, "ToyCollector has none"),
    ],
    ids=str,
)
def test_what_cannot_train_is_refused(options, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        make_trainer(**options)


def test_a_buffer_without_batch_size_is_refused():
    with pytest.raises(ValueError, match="batch_size="):
        make_trainer(replay_buffer=make_buffer(None))
