"""GRPOTrainer over two gloo ranks: one optimiser step is that of all their micro-batches."""

import math
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from toy_run import BigramActor, Log, ToyCollector, make_buffer, make_trainer

from grpo import GRPOLoss

pytestmark = pytest.mark.slow

LENGTHS = [2, 3, 7, 8]


class MyRows(ToyCollector):
    """The rows of one rank; both ranks of the same batches."""

    def __init__(self, rank, per_rank, change):
        super().__init__(LENGTHS, change)
        self.rows = slice(rank * per_rank, (rank + 1) * per_rank)

    def __iter__(self):
        for batch in super().__iter__():
            yield batch[self.rows]


def gradient(rank, world, *, wrap, options, batch_size, accumulate, batches=1, change=None):
    """The gradient of the last step, the log, and the parameters."""
    torch.manual_seed(0)
    loss = GRPOLoss(BigramActor(), **options)
    if world > 1 and wrap == "actor":
        loss.actor_network = Wrapped(loss.actor_network)
    module = DistributedDataParallel(loss) if world > 1 and wrap == "loss" else loss
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.5)
    kept = []
    optimizer.register_step_pre_hook(
        lambda *_: kept.append(next(loss.parameters()).grad.detach().clone())
    )
    log = Log()
    trainer = make_trainer(
        loss=module,
        optimizer=optimizer,
        replay_buffer=make_buffer(batch_size, shuffle=False),
        gradient_accumulation_steps=accumulate,
        clip_norm=None,
        logger=log,
    )
    trainer.collector = MyRows(rank, 4 // world, change)
    trainer.total_frames = batches * 4 // world
    trainer.train()
    return kept, log.values, trainer


class Wrapped(torch.nn.Module):
    """An actor whose model is data-parallel."""

    def __init__(self, actor):
        super().__init__()
        self.model = DistributedDataParallel(Table(actor.logits))

    def get_dist(self, tensordict, **kwargs):
        actor = BigramActor.__new__(BigramActor)
        torch.nn.Module.__init__(actor)
        object.__setattr__(actor, "logits", self.model())
        return BigramActor.get_dist(actor, tensordict)

    _get_sft_dist = get_dist


class Table(torch.nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits.detach().clone())

    def forward(self):
        return self.logits * 1.0


def in_two_processes(function, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=start, args=(rank, port, queue, function, *arguments))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    results = dict(queue.get() for _ in processes)
    for process in processes:
        process.join()
    return [results[rank] for rank in range(2)]


def start(rank, port, queue, function, *arguments):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        queue.put((rank, function(rank, *arguments)))
    except BaseException as error:
        queue.put((rank, repr(error)))
    finally:
        dist.destroy_process_group()


CASES = [
    {"aggregation": "token_mean"},
    {"aggregation": "prompt_mean", "semantics": "corrected", "kl_to_ref_coeff": 0.3},
    {"aggregation": "token_mean", "kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.2},
    {"kl_mask_threshold": 0.4, "kl_to_ref_coeff": 0.3, "semantics": "corrected"},
    {"reduction": "sum", "semantics": "corrected", "kl_to_ref_coeff": 0.3},
]


def all_cases(rank):
    results = []
    for options in CASES:
        for wrap, batch_size, accumulate in (("loss", 2, 1), ("loss", 1, 2), ("actor", 1, 2)):
            kept, log, _ = gradient(
                rank,
                2,
                wrap=wrap,
                options=options,
                batch_size=batch_size,
                accumulate=accumulate,
            )
            results.append((kept[0].tolist(), log["loss_objective"], log["reward_mean"]))
    return results


def test_two_ranks_give_the_gradient_of_the_whole_batch():
    ranks = in_two_processes(all_cases)
    for case, options in enumerate(CASES):
        whole, log, _ = gradient(0, 1, wrap=None, options=options, batch_size=4, accumulate=1)
        for rank in ranks:
            for kept, objective, reward in rank[3 * case : 3 * case + 3]:
                torch.testing.assert_close(
                    torch.tensor(kept, dtype=torch.float64), whole[0], rtol=1e-8, atol=1e-12
                )
                assert objective == [pytest.approx(log["loss_objective"][0], rel=1e-6)]
                assert reward == [pytest.approx(log["reward_mean"][0], rel=1e-6)]


def spoiled_on_one_rank(rank):
    def spoil(number, batch):
        if number == 2:
            batch["advantage"][3] = math.nan  # of rank 1

    kept, log, trainer = gradient(
        rank,
        2,
        wrap="loss",
        options={},
        batch_size=2,
        accumulate=1,
        batches=3,
        change=spoil,
    )
    parameters = trainer.loss_module.module.actor_network.logits
    return len(kept), log["skipped_nonfinite_steps"], parameters.tolist()


def test_a_non_finite_loss_on_one_rank_skips_the_step_on_both():
    first, second = in_two_processes(spoiled_on_one_rank)
    assert first == second
    assert first[0] == 2
    assert first[1] == [0, 1, 1]
    assert torch.tensor(first[2]).isfinite().all()


def fewer_rows_on_one_rank(rank):
    torch.manual_seed(0)
    module = DistributedDataParallel(GRPOLoss(BigramActor()))
    buffer = make_buffer(1, shuffle=False)
    extend = buffer.extend
    buffer.extend = lambda batch: extend(batch[: 2 - rank])  # a group was dropped on rank 1
    trainer = make_trainer(loss=module, replay_buffer=buffer)
    trainer.collector = MyRows(rank, 2, None)
    trainer.total_frames = 4
    trainer.train()
    return trainer._optim_count


def test_ranks_with_unequal_buffers_take_the_same_steps():
    assert in_two_processes(fewer_rows_on_one_rank) == [2, 2]


def interrupted_on_one_rank(rank):
    def interrupt(number, batch):
        if number == 2 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        elif number == 2:
            time.sleep(0.5)

    _, _, trainer = gradient(
        rank,
        2,
        wrap="loss",
        options={},
        batch_size=2,
        accumulate=1,
        batches=5,
        change=interrupt,
    )
    return trainer.collected_frames


def test_an_interrupt_of_one_rank_ends_both_together():
    assert in_two_processes(interrupted_on_one_rank) == [4, 4]


def killed(rank):
    def kill(number, batch):
        if number == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    gradient(rank, 2, wrap="loss", options={}, batch_size=2, accumulate=1, batches=5, change=kill)


def test_the_death_of_a_rank_is_an_error_on_the_other():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=start, args=(r, port, queue, killed)) for r in range(2)]
    for process in processes:
        process.start()
    rank, error = queue.get()
    for process in processes:
        process.join(60)
    assert rank == 0
    assert "Connection" in error or "closed" in error
    assert processes[1].exitcode == -signal.SIGKILL
