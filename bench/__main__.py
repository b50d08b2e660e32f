"""Run the benchmarks and keep what they find: python -m bench [--quick] [suite ...]

A suite is a file bench/bench_<suite>.py of pytest-benchmark cases; each runs in a process of its
own, on one thread, and keeps its findings in bench/results/<machine>.json. `python -m bench.report`
then draws the plots and puts the tables into the README. One case alone:

  pytest bench/bench_policy_loss.py -k 16x8192
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SUITES = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def main() -> int:
    """Run what the command line asks for, all of it by default; 0 if every case ran."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is kept")
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - set(SUITES)
    if unknown:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    failed = []
    for suite in arguments.suites or SUITES:
        print(f"\n== {suite}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "--timeout=0"]
        command += ["--benchmark-columns=median,iqr,rounds", str(FOLDER / f"bench_{suite}.py")]
        command += ["--quick" if arguments.quick else "--keep"]
        if subprocess.run(command, cwd=FOLDER.parent).returncode:
            failed.append(suite)
    if failed:
        print(f"FAILED, nothing kept: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
