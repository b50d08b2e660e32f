"""MCAdvantage with several writer processes."""

import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from grpo import MCAdvantage
from grpo.by_value import from_bytes, to_bytes

WRITERS = 4
GROUPS = 40
GROUP_SIZE = 4


def trajectory(group: int, rewards: list[float], identity: int = 0) -> TensorDict:
    steps = len(rewards)
    return TensorDict(
        {
            "query": torch.full((steps,), group),
            "identity": torch.full((steps,), identity),
            "next": TensorDict(
                {
                    "reward": torch.tensor(rewards).reshape(steps, 1),
                    "done": torch.tensor([False] * (steps - 1) + [True]).reshape(steps, 1),
                },
                [steps],
            ),
        },
        [steps],
    )


def in_process(target, *args):
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def assert_consistent(stats: dict) -> None:
    assert stats["completed_groups"] == stats["written_groups"] + stats["dropped_groups"]
    gone = stats["completed_trajectories"] - stats["queued_trajectories"]
    assert gone == stats["completed_groups"] * GROUP_SIZE


@pytest.fixture(scope="module")
def shared_once():
    return MCAdvantage(GROUP_SIZE, trajectory_return="sum").share_memory_()


@pytest.fixture
def shared(shared_once):
    """Starting the process takes seconds, so that the tests have one in common."""
    shared_once.clear_queues()
    shared_once.reset_stats()
    return shared_once


def write_share(transform, writer, results):
    """One trajectory of every group from every writer; reports the identities that it writes."""
    torch.set_num_threads(1)
    written = []
    for group in range(GROUPS):
        out = transform.inv(trajectory(group, [float(writer)], writer * GROUPS + group))
        if out is not None:
            written.append(out["identity"].tolist())
    results.put(written)


def test_four_writers_complete_every_group_once(shared):
    results = multiprocessing.get_context("fork").SimpleQueue()
    writers = [in_process(write_share, shared, writer, results) for writer in range(WRITERS)]
    groups = [group for _ in writers for group in results.get()]
    for writer in writers:
        writer.join()
    identities = [identity for group in groups for identity in group]
    assert sorted(identities) == list(range(WRITERS * GROUPS))
    assert all(len({identity % GROUPS for identity in group}) == 1 for group in groups)
    stats = shared.get_stats()
    assert stats["completed_trajectories"] == WRITERS * GROUPS
    assert stats["written_groups"] == GROUPS
    assert stats["queued_groups"] == 0
    assert_consistent(stats)


@pytest.mark.slow
def test_spawned_writers_share_groups_as_forked_ones_do(shared):
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    writers = [
        context.Process(target=write_share, args=(shared, writer, results)) for writer in range(2)
    ]
    for writer in writers:
        writer.start()
    assert [results.get() for _ in writers] == [[], []]
    for writer in writers:
        writer.join()
    assert shared.queued_trajectories == 2 * GROUPS
    assert shared.max_queued_trajectories_per_group == 2


def extend_buffer(buffer, writer):
    torch.set_num_threads(1)
    for group in range(GROUPS):
        buffer.extend(trajectory(group, [float(writer)], writer * GROUPS + group))


def test_four_writers_of_a_shared_buffer_store_every_trajectory_once(tmp_path):
    transform = MCAdvantage(GROUP_SIZE, trajectory_return="sum")
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(WRITERS * GROUPS, scratch_dir=tmp_path),
        transform=transform,
        batch_size=4,
        shared=True,
    )
    example = trajectory(-1, [0.0] * GROUP_SIZE)
    example["advantage"] = torch.zeros(GROUP_SIZE, 1)
    buffer._storage._init(example[0])  # before the fork, so that all writers map the same files
    assert transform.is_shared
    writers = [in_process(extend_buffer, buffer, writer) for writer in range(WRITERS)]
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(buffer) == WRITERS * GROUPS
    assert sorted(buffer[:]["identity"].tolist()) == list(range(WRITERS * GROUPS))
    torch.testing.assert_close(buffer[:]["advantage"].sum(), torch.tensor(0.0), atol=1e-4, rtol=0)


def write_forever(transform, counter):
    torch.set_num_threads(1)
    index = os.getpid() * 1_000_000
    while True:
        transform.inv(trajectory(index, [0.0, 1.0]))
        counter.value += 1
        index += 1


def test_a_killed_writer_leaves_the_others_working_and_the_counters_consistent(shared):
    for _ in range(5):
        counter = multiprocessing.get_context("fork").Value("q", 0, lock=False)
        victim = in_process(write_forever, shared, counter)
        while counter.value < 20:
            time.sleep(0.001)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        results = multiprocessing.get_context("fork").SimpleQueue()
        before = shared.get_stats()
        writers = [in_process(write_share, shared, writer, results) for writer in range(WRITERS)]
        groups = [group for _ in writers for group in results.get()]
        for writer in writers:
            writer.join()
        assert len(groups) == GROUPS
        after = shared.get_stats()
        assert after["written_groups"] - before["written_groups"] == GROUPS
        assert_consistent(after)


def die_before_settling(transform):
    # The last trajectory of group 0: the ledger hands the group over, and nobody takes it.
    arrivals = [transform._arrival(trajectory(0, [1.0], GROUP_SIZE - 1))]
    transform._ledger._callmethod("add", (arrivals, 0))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_group_whose_writer_was_killed_on_receipt_goes_to_the_next(shared):
    for identity in range(GROUP_SIZE - 1):
        assert shared.inv(trajectory(0, [0.0], identity)) is None
    victim = in_process(die_before_settling, shared)
    victim.join()
    deadline = time.monotonic() + 10
    out = None
    while out is None and time.monotonic() < deadline:
        out = shared.inv(trajectory(1000 + int(time.monotonic() * 1e6) % 10**9, [0.0]))
    assert out["identity"].tolist() == list(range(GROUP_SIZE))
    assert shared.get_stats()["written_groups"] == 1
    assert_consistent(shared.get_stats())


def test_a_group_that_cannot_be_written_costs_only_itself(shared):
    groups = range(2000, 2002)
    for member in range(GROUP_SIZE - 1):
        for group in groups:
            given = trajectory(group, [0.0], member)
            shared.inv(given.set("extra", torch.zeros(1)) if group == 2001 else given)
    with pytest.raises(RuntimeError, match="could not write group 2001, which is dropped"):
        shared.inv(torch.cat([trajectory(group, [1.0], GROUP_SIZE - 1) for group in groups]))
    stats = shared.get_stats()
    assert (stats["written_groups"], stats["failed_groups"]) == (0, 1)
    out = shared.inv(trajectory(0, [0.0])[:0])
    assert out["query"].tolist() == [2000] * GROUP_SIZE
    assert_consistent(shared.get_stats())


def half_a_request(transform):
    # A kill in the middle of sending: the length of a message and half of its bytes.
    transform.get_stats()
    connection = transform._ledger._tls.connection
    message = pickle.dumps((transform._ledger._id, "add", ([], 0), {}))
    os.write(connection.fileno(), len(message).to_bytes(4, "big") + message[: len(message) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_killed_in_the_middle_of_sending_changes_nothing(shared):
    shared.inv(trajectory(0, [0.0]))
    before = shared.get_stats()
    in_process(half_a_request, shared).join()
    assert shared.get_stats() == before


def test_sharing_keeps_queues_and_counters():
    transform = MCAdvantage(2, trajectory_return="sum")
    transform.inv(trajectory(3, [0.0, 1.0], 7))
    before = transform.get_stats()
    assert not transform.is_shared
    assert transform.share_memory_() is transform
    assert transform.is_shared
    assert transform.share_memory_() is transform
    assert transform.get_stats() == before
    assert transform.queues[3][0]["identity"].tolist() == [7, 7]
    out = transform.inv(trajectory(3, [0.0], 8))
    assert out["identity"].tolist() == [7, 7, 8]
    assert len(transform.queues) == 0


def test_a_shared_transform_pickles_to_one_with_the_same_state(shared):
    shared.inv(trajectory(3, [0.0]))
    other = pickle.loads(pickle.dumps(shared))
    assert other.is_shared
    other.inv(trajectory(3, [0.0]))
    assert shared.queued_trajectories == 2


def test_an_unshared_transform_pickles_to_one_with_a_state_of_its_own():
    transform = MCAdvantage(2, trajectory_return="sum")
    transform.inv(trajectory(3, [0.0]))
    other = pickle.loads(pickle.dumps(transform))
    assert other.inv(trajectory(3, [1.0])) is not None
    assert transform.queued_trajectories == 1


def test_local_queues_variable_keeps_the_state_in_the_process(monkeypatch):
    monkeypatch.setenv("TORCHRL_MC_ADVANTAGE_LOCAL_QUEUES", "1")
    transform = MCAdvantage(2, trajectory_return="sum")
    assert transform.share_memory_() is transform
    assert not transform.is_shared


def test_counters_of_a_shared_transform_can_be_set_and_reset(shared):
    shared.inv(trajectory(0, [1.0]))
    shared.completed_trajectories += 10
    assert shared.completed_trajectories == 11
    shared.reset_stats()
    assert shared.completed_trajectories == 0
    assert shared.queued_groups == 1
    shared.clear_queues()
    assert shared.queued_groups == 0


def test_bytes_hold_what_a_view_shows_and_no_more():
    big = torch.arange(1_000_000.0)
    data = to_bytes(
        TensorDict({"a": big[10:12], "b": torch.zeros(2, 0, dtype=torch.bfloat16)}, [2])
    )
    assert len(data) < 2000
    back = from_bytes(data)
    assert back["a"].tolist() == [10.0, 11.0]
    assert back["b"].shape == (2, 0)
    back["a"].fill_(0)
    assert big[10] == 10
