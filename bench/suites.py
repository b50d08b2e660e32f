"""The benchmark suites, and how one is run."""

from __future__ import annotations

import importlib
import warnings

from bench.figures import Figure, show

SUITES = (
    "policy_loss",
    "losses",
    "token_log_probs",
    "linear_log_probs",
    "training_step",
    "group_subset",
)


def run_suite(suite: str, quick: bool) -> list[Figure]:
    """All figures of one suite, printed as they come."""
    warnings.filterwarnings("ignore")
    return show(importlib.import_module(f"bench.{suite}").figures(quick), quick)
