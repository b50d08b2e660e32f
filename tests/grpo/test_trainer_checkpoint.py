"""Checkpoints: resuming is bitwise exact, saving is atomic, an interrupted run leaves one."""

import multiprocessing
import os
import signal

import pytest
import torch
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from toy_run import ToyCollector, make_buffer, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:GRPOTrainer is an experimental"),
    pytest.mark.filterwarnings("ignore:The default Trainer checkpoint format"),
    pytest.mark.filterwarnings("ignore:The legacy CKPT_BACKEND"),
]


def run(batches, directory, style="rotation", resume=False, seed=0, **options):
    """A run with dropout-like randomness in collector and sampler, and a scheduled clip."""
    torch.manual_seed(seed)
    options.setdefault("replay_buffer", make_buffer(3))
    destination = directory / "trainer"
    if style == "legacy":
        options["save_trainer_file"] = destination
    else:
        options["checkpoint"] = Checkpoint()
        if style == "file":
            options["save_trainer_file"] = destination
        else:
            options["checkpoint_rotation"] = CheckpointRotation(destination, keep_last=2)
    options.setdefault("save_trainer_interval", 0)
    trainer = make_trainer(batches=batches, **options)

    def schedule_clip():
        loss = trainer.loss_module
        loss.clip_epsilon_high = loss.clip_epsilon_high * 1.1

    trainer.register_op("post_steps", schedule_clip)
    if resume:
        latest = destination if style != "rotation" else trainer.checkpoint_rotation.latest()
        trainer.load_from_file(latest)
    trainer.train()
    return trainer


def everything(trainer):
    return {
        "loss": trainer.loss_module.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "stepper": trainer.optimization_stepper.state_dict(),
        "collector": trainer.collector.state_dict(),
        "frames": trainer.collected_frames,
        "steps": trainer._optim_count,
        "rng": torch.get_rng_state(),
        "written": trainer.replay_buffer.write_count,
    }


def assert_same(left, right):
    left, right = (torch.utils._pytree.tree_flatten(everything(t)) for t in (left, right))
    assert left[1] == right[1]
    for a, b in zip(left[0], right[0], strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        else:
            assert a == b


@pytest.mark.parametrize("style", ["rotation", "file", "legacy"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed_precision": True, "autocast_dtype": torch.float16},
        {"num_epochs": 2, "gradient_accumulation_steps": 2},
        {"empty_replay_buffer_on_weight_update": False, "optim_steps_per_batch": 2},
    ],
)
def test_resuming_is_bitwise_the_uninterrupted_run(tmp_path, style, options):
    whole = run(4, tmp_path / "whole", style, **options)
    run(2, tmp_path / "halves", style, **{**options, "replay_buffer": make_buffer(3)})
    second = run(4, tmp_path / "halves", style, resume=True, seed=99, **options)
    assert whole.loss_module.clip_epsilon_high == pytest.approx(0.2 * 1.1**4)
    assert_same(whole, second)


def run_and_die(directory, style, where):
    """In a child process: a run that is killed in the middle of its third save."""
    saves = 0

    def at_third_call(owner, name, die):
        original = getattr(owner, name)

        def call(*arguments, **options):
            nonlocal saves
            saves += 1
            if saves == 3:
                die(*arguments)
                os._exit(9)
            return original(*arguments, **options)

        setattr(owner, name, staticmethod(call) if isinstance(owner, type) else call)

    def between_its_two_renames(_source, destination):
        os.replace(destination, destination.parent / f".{destination.name}.backup-x")

    if where == "publishing":
        at_third_call(Checkpoint, "_publish_path", between_its_two_renames)
    elif where == "staging":
        at_third_call(Checkpoint, "_publish_path", lambda *arguments: None)
    else:
        at_third_call(torch, "save", lambda _state, file: file.write_bytes(b"half a checkpoint"))
    run(4, directory, style)


@pytest.mark.parametrize(
    ("style", "where"), [("file", "publishing"), ("rotation", "staging"), ("legacy", "writing")]
)
def test_a_run_killed_while_saving_resumes_from_the_last_good_checkpoint(tmp_path, style, where):
    whole = run(4, tmp_path / "whole", style)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run_and_die, args=(tmp_path / "killed", style, where))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert_same(whole, run(4, tmp_path / "killed", style, resume=True, seed=7))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_after_the_iteration_and_saves(tmp_path, number):
    whole = run(4, tmp_path / "whole")

    def interrupt(batch_number, batch):
        if batch_number == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    first = run(4, tmp_path / "halves", change=interrupt)
    assert signal.getsignal(number) is before
    assert first.collected_frames == 8
    assert first.collector.shutdowns == 1
    assert_same(whole, run(4, tmp_path / "halves", resume=True))


def test_a_second_interrupt_ends_at_once(tmp_path):
    def interrupt(batch_number, batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(4, tmp_path, change=interrupt)


def test_a_failing_collector_leaves_a_checkpoint(tmp_path):
    def fail(batch_number, batch):
        if batch_number == 3:
            raise ConnectionError("the engine is gone")

    with pytest.raises(ConnectionError, match="the engine is gone"):
        run(4, tmp_path, save_trainer_interval=10**6, change=fail)
    resumed = run(4, tmp_path, resume=True)
    assert resumed.collected_frames == 16
    assert resumed._optim_count == 8


class RandomCollector(ToyCollector):
    """Draws before it can fail; what it counts itself it takes back."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at = fails_at

    def __iter__(self):
        for number, batch in enumerate(super().__iter__(), self.batches + 1):
            if number == self.fails_at:
                self.batches -= 1
                raise ConnectionError("the engine is gone")
            yield batch


def test_what_a_failing_collector_drew_is_drawn_again(tmp_path):
    whole = run(4, tmp_path / "whole", collector=RandomCollector())
    with pytest.raises(ConnectionError):
        run(4, tmp_path / "cut", collector=RandomCollector(fails_at=3), save_trainer_interval=10**6)
    resumed = run(4, tmp_path / "cut", collector=RandomCollector(), resume=True)
    assert_same(resumed, whole)


@pytest.mark.parametrize("where", ["post_steps", "process_optim_batch"])
def test_any_error_leaves_a_checkpoint_and_ends_the_collector(tmp_path, where):
    trainer = make_trainer(
        batches=4,
        checkpoint=Checkpoint(),
        checkpoint_rotation=CheckpointRotation(tmp_path, keep_last=2),
    )
    calls = []

    def fail(*batch):
        calls.append(batch)
        if len(calls) == 4:
            raise MemoryError("no room")
        return batch[0] if batch else None

    trainer.register_op(where, fail)
    with pytest.raises(MemoryError, match="no room"):
        trainer.train()
    assert trainer.collector.shutdowns == 1
    assert trainer.checkpoint_rotation.latest() is not None


def test_the_final_state_is_saved_once(tmp_path):
    trainer = run(3, tmp_path)
    steps = [int(path.name.split("-")[-1]) for path in trainer.checkpoint_rotation.checkpoints()]
    assert steps == [8, 12]


def test_the_optimisers_state_is_saved_once(tmp_path):
    trainer = run(1, tmp_path)
    (checkpoint,) = (tmp_path / "trainer").iterdir()
    saved = [path.stat().st_size for path in checkpoint.glob("components/*optim*/**/*.memmap")]
    state = torch.utils._pytree.tree_leaves(trainer.optimizer.state_dict()["state"])
    assert sorted(saved) == sorted(tensor.numel() * tensor.element_size() for tensor in state)
