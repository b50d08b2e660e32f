"""Rewrite the README's measured tables from bench/results: python -m bench.report

Everything between `<!-- bench -->` and `<!-- /bench -->` is replaced.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.figures import RESULTS

README = Path(__file__).parent.parent / "README.md"


def table(results: dict) -> str:
    """One machine's figures as Markdown."""
    threads = "one thread" if results["threads"] == 1 else f"{results['threads']} threads"
    lines = [
        f"{results['processor']}, {threads}, torch {results['torch']}; medians, the compared calls "
        "taking turns in one process:",
        "",
        "| case | figure | measured | asked |",
        "|---|---|---:|---:|",
    ]
    for figures in results["suites"].values():
        for figure in figures:
            asked = "" if figure["asked"] is None else f"{figure['asked']:g}"
            bound = ("≥ " if figure["at_least"] else "≤ ") if asked else ""
            lines.append(
                f"| {figure['case']} | {figure['claim']} | {figure['measured']:.3g} | "
                f"{bound}{asked} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Put every machine's table into the README."""
    tables = [table(json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    body = "\n\n".join(tables)
    pattern = re.compile(r"(<!-- bench -->\n).*(<!-- /bench -->)", re.DOTALL)
    text = README.read_text()
    if not pattern.search(text):
        raise SystemExit(f"{README} has no <!-- bench --> ... <!-- /bench --> part")
    README.write_text(pattern.sub(lambda found: f"{found[1]}\n{body}\n\n{found[2]}", text))


if __name__ == "__main__":
    main()
