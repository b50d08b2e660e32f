"""Every benchmark runs, at a tiny size."""

import math

import pytest

from bench.suites import SUITES, run_suite


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_every_case_runs_and_measures_something(suite):
    figures = run_suite(suite, quick=True)
    assert figures
    for figure in figures:
        assert math.isfinite(figure.measured), figure
        assert figure.detail, figure
