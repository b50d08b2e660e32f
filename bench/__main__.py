"""Run the benchmarks and keep their figures: python -m bench [--quick] [suite ...]

Suites run one after the other in processes of their own, on one thread. Figures go to
bench/results/<machine>.json; `python -m bench.report` puts them into the README.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from bench.figures import save
from bench.suites import SUITES, run_suite


def main() -> None:
    """Run what the command line asks for; all of it by default."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is kept")
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - set(SUITES)
    if unknown:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    torch.set_num_threads(1)  # as every suite does; `save` records it
    context = multiprocessing.get_context("spawn")
    for suite in arguments.suites or SUITES:
        print(f"\n== {suite}", flush=True)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            figures = pool.submit(run_suite, suite, arguments.quick).result()
        if not arguments.quick:
            print(f"kept in {save({suite: figures})}")


if __name__ == "__main__":
    main()
