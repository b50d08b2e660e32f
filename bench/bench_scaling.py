"""What the operations cost over tokens and over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench import bench_policy_loss, bench_token_log_probs
from bench.conftest import Bench

ROWS = 64  # of logits


def test_tokens(bench: Bench) -> None:
    """policy_loss with everything, forward and backward: one row of 32 tokens to 512 of 1024."""

    def call_of(contender: str, tokens: int) -> Callable[[], object]:
        rows = max(1, tokens // 1024)
        return bench_policy_loss.prepare(contender, rows, tokens // rows, everything=True)

    contenders = ("ours", "torch.compile", "eager")
    calls = {name: partial(call_of, name) for name in contenders}
    bench.curves("tokens", [2**power for power in range(5, 20, 2)], calls)


def test_vocabulary(bench: Bench) -> None:
    """token_log_probs with entropy, forward and backward, 64 rows in fp32."""
    calls = {
        name: partial(bench_token_log_probs.prepare, name, ROWS)
        for name in bench_token_log_probs.contenders()
    }
    bench.curves("vocabulary", [1000, 4000, 16000, 32000, 64000, 128_256, 151_936], calls)
