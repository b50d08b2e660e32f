"""Every check and timing that needs a GPU, within six minutes: bench/gpu.sh

Needs torch and triton only. Each section runs in a process of its own with a deadline: one that
fails, hangs or poisons the GPU is reported, and the rest goes on. Figures go to
$OUT/<gpu>.json (default bench/results), as bench.results keeps them. Without a GPU, or with
--interpret, everything that can runs at tiny sizes on CPU tensors, where triton interprets the
kernels; nothing is asked of its timings then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from bench.device import GPU, synchronise
from bench.gpu.calls import all_of, small_calls
from bench.gpu.checks import CHECKS
from bench.gpu.timings import BENCHES
from bench.results import RESULTS, Figure, save

TOTAL_SECONDS = 350
# In this order: what matters most first, should time run out.
DEADLINES = {
    "verify": 120,
    "checks": 60,
    "policy_loss": 50,
    "token_log_probs": 60,
    "linear_log_probs": 50,
    "memcheck": 50,
    "racecheck": 50,
}


def section(name: str, keep: Path) -> int:
    """Run one section here; figures go to `keep`, a line each, as they come."""
    if name == "checks":
        failed = 0
        for claim, check in CHECKS.items():
            try:
                reason = check()
                print(f"ok    {claim}" + (f" ({reason})" if reason else ""), flush=True)
            except Exception as error:
                failed += 1
                print(f"FAIL  {claim}: {type(error).__name__}: {error}", flush=True)
                if not isinstance(error, AssertionError):
                    traceback.print_exc()
            if GPU:
                torch.cuda.empty_cache()
        return min(failed, 1)
    if name in ("memcheck", "racecheck"):  # under the sanitizer, or interpreted
        for call in small_calls().values():
            all_of(call)
        synchronise()
        print("all small calls ran")
        return 0
    missed = 0
    with keep.open("a") as lines:
        for figure in BENCHES[name]():
            if not GPU:
                figure.asked = None
            missed += not figure.holds
            print(figure, flush=True)
            lines.write(json.dumps(asdict(figure)) + "\n")
            lines.flush()
    if missed:
        print(f"{missed} of the targets are not met")
    return 0


def command(name: str, keep: Path) -> list[str] | str:
    """The command of a section, or why there is none."""
    if name == "verify":
        verify = [sys.executable, "-m", "grpo_kernels.verify"]
        return [*verify, "--device", "cuda"] if GPU else [*verify, "--backend", "triton"]
    own = [sys.executable, "-m", "bench.gpu", "--section", name, "--keep", str(keep)]
    if name not in ("memcheck", "racecheck") or not GPU:
        return own
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tool = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if tool is None:
        return "compute-sanitizer is not installed"
    return [tool, "--tool", name, "--target-processes", "application-only",
            "--error-exitcode", "9", *own]  # fmt: skip


def run_section(name: str, keep: Path, seconds: float, environment: dict[str, str]) -> str:
    """Run a section and say how it went: "ok", "skipped: ..." or "FAILED: ..."."""
    print(f"\n== {name}", flush=True)
    if seconds < 5:
        return "FAILED: no time was left"
    arguments = command(name, keep)
    if isinstance(arguments, str):
        return f"skipped: {arguments}"
    if name == "memcheck" and GPU:  # so that each tensor has bounds of its own
        environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        output, _ = process.communicate()
        print(output[-6000:], flush=True)
        return f"FAILED: longer than {seconds:.0f} s"
    except BaseException:  # interrupted: leave nothing on the GPU
        os.killpg(process.pid, signal.SIGKILL)
        raise
    print(output[-6000:], flush=True)
    if process.returncode == 0:
        return "ok"
    sanitized = name in ("memcheck", "racecheck") and GPU
    if sanitized and process.returncode != 9 and "all small calls ran" in output:
        return f"skipped: the tool does not work here (exit status {process.returncode})"
    return f"FAILED: exit status {process.returncode}"


def machine() -> str:
    if not GPU:
        return "no GPU: interpreted, at tiny sizes"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def main() -> int:
    """0 if every section that could run did, and passed."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="as without a GPU")
    parser.add_argument("--only", nargs="+", choices=DEADLINES, help="these sections")
    parser.add_argument("--section", choices=DEADLINES, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        return section(arguments.section, arguments.keep)

    environment = dict(os.environ)
    interpret = arguments.interpret or not GPU
    if interpret and "TRITON_INTERPRET" not in environment:
        # Before triton is imported, and for the figures of this process too.
        environment["TRITON_INTERPRET"] = "1"
        os.execve(sys.executable, [sys.executable, "-m", "bench.gpu", *sys.argv[1:]], environment)
    try:
        import triton

        print(f"torch {torch.__version__}, triton {triton.__version__}, {machine()}", flush=True)
    except ImportError as error:
        print(f"triton does not import: {error}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcome: dict[str, str] = {}
    suites: dict[str, list[Figure]] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or DEADLINES:
            keep = Path(folder) / name
            left = TOTAL_SECONDS - (time.monotonic() - start)
            allowed = min(DEADLINES[name], left) if GPU else 600
            began = time.monotonic()
            outcome[name] = run_section(name, keep, allowed, environment)
            outcome[name] += f" ({time.monotonic() - began:.0f} s)"
            if keep.exists():
                lines = keep.read_text().splitlines()
                suites[f"gpu {name}"] = [Figure(**json.loads(line)) for line in lines]
    default = RESULTS if GPU else None  # interpreted timings are no results
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else default
    if out is not None and suites:
        print(f"\nkept in {save(suites, out)}")
    print("\n== summary")
    for figures in suites.values():
        for figure in figures:
            print(str(figure).splitlines()[0])
    for name, how in outcome.items():
        print(f"{name:18} {how}")
    return int(any(how.startswith("FAILED") for how in outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
