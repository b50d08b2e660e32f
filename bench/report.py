"""Draw the plots and rewrite the README's measured part from bench/results: python -m bench.report

Everything between `<!-- bench -->` and `<!-- /bench -->` is replaced; what was asked of each figure
goes to bench/results/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bench.results import RESULTS, Case, Curve, Figure, read

README = Path(__file__).parent.parent / "README.md"
PLOTS = {
    "tokens": ("tokens", "policy_loss with every term, forward and backward"),
    "vocabulary": ("vocabulary", "token_log_probs with entropy, 64 rows, forward and backward"),
    "group_subset": ("candidates n, of which n / 2 are selected", "group_subset, proved optimal"),
}
# The contenders that have a column of the README's table, and what shares it.
PEERS = {
    "TorchRL": ("TorchRL",),
    "torch.compile": ("torch.compile",),
    "eager": ("eager", "our eager backend"),
    "others": ("TRL", "Liger", "F.linear_cross_entropy"),
}


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _peers(case: Case, names: tuple[str, ...]) -> str:
    """How many times faster ours is than each of the contenders of one column."""
    ours = next(iter(case.ms.values()))
    shown = [
        f"{number(case.ms[name] / ours)}" + (f" ({name})" if len(names) > 1 else "")
        for name in names
        if name in case.ms
    ]
    return ", ".join(shown)


def _beside(values: dict[str, float], form: str) -> str:
    """Ours, and the least of the others."""
    if not values:
        return ""
    ours, *others = values.values()
    return form.format(ours) + (f" / {form.format(min(others))}" if others else "")


def case_row(case: Case) -> str:
    """One case as a row of Markdown."""
    ours = next(iter(case.ms))
    percent = f"{100 * case.bandwidth[ours]:.0f}" if ours in case.bandwidth else ""
    cells = [
        case.name,
        number(case.ms[ours]),
        *[_peers(case, names) for names in PEERS.values()],
        _beside(case.error, "{:.0e}"),
        percent,
        _beside(case.peak_mib, "{:.0f}"),
        _beside(case.host_us, "{:.0f}"),
    ]
    return f"| {' | '.join(cells)} |"


def case_table(cases: list[Case]) -> str:
    head = ["case", "ms", *[f"× {peer}" for peer in PEERS]]
    head += ["error, ours / best other", "% of bandwidth", "peak MiB", "host µs"]
    return "\n".join(
        [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1), *map(case_row, cases)]
    )


def figure_table(figures: list[Figure]) -> str:
    """Every figure beside what is asked of it."""
    lines = ["| case | figure | measured | asked | |", "|---|---|---:|---:|---|"]
    for figure in figures:
        bound = ""
        if figure.asked is not None:
            bound = f"{'≥' if figure.at_least else '≤'} {figure.asked:g}"
        verdict = "" if figure.holds else "falls short"
        lines.append(
            f"| {figure.case} | {figure.claim} | {number(figure.measured)} | {bound} | {verdict} |"
        )
    return "\n".join(lines)


def _all(results: dict, kind: str) -> list:
    return [finding for suite in results["suites"].values() for finding in suite[kind]]


def machine(results: dict) -> str:
    threads = "one thread" if results["threads"] == 1 else f"{results['threads']} threads"
    return f"{results['processor']}, {threads}, torch {results['torch']}"


def draw(name: str, results: dict) -> Iterator[Path]:
    """The plots of one machine: bench/results/<machine>-<plot>.png"""
    from matplotlib import pyplot

    curves: list[Curve] = _all(results, "curves")
    for plot, (sizes, title) in PLOTS.items():
        drawn = [curve for curve in curves if curve.plot == plot]
        if not drawn:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for curve in drawn:
            axes.plot(curve.sizes, curve.ms, marker="o", label=curve.contender)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(sizes)
        axes.set_ylabel("ms")
        axes.set_title(f"{title}\n{machine(results)}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()
        path = RESULTS / f"{name}-{plot}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        yield path


def part(name: str, results: dict) -> str:
    """The README's part about one machine."""
    figures = _all(results, "figures")
    asked = [figure for figure in figures if figure.asked is not None]
    missed = [figure for figure in asked if not figure.holds]
    verdict = f"{len(asked) - len(missed)} of {len(asked)} targets are met"
    if missed:
        short = "; ".join(
            f"{figure.case}: {figure.claim}, {number(figure.measured)} for {figure.asked:g}"
            for figure in missed
        )
        verdict += f" ({short})"
    body = [
        f"{machine(results)}; medians of forward and backward, the compared calls taking turns:",
        case_table(_all(results, "cases")),
        f"{verdict}: [bench/results](bench/results/README.md).",
    ]
    images = [
        f"![{PLOTS[path.stem.removeprefix(name + '-')][1]}](bench/results/{path.name})"
        for path in draw(name, results)
    ]
    return "\n\n".join([*body, *images[:2]])


def main() -> None:
    """Draw and write for every machine that has results."""
    parts, targets = [], ["# Figures beside what is asked of them\n\n`python -m bench.report`"]
    for path in sorted(RESULTS.glob("*.json")):
        results = read(path)
        parts.append(part(path.stem, results))
        targets += [f"## {machine(results)}", figure_table(_all(results, "figures"))]
    (RESULTS / "README.md").write_text("\n\n".join(targets) + "\n")
    pattern = re.compile(r"(<!-- bench -->\n).*(<!-- /bench -->)", re.DOTALL)
    text = README.read_text()
    if not pattern.search(text):
        raise SystemExit(f"{README} has no <!-- bench --> ... <!-- /bench --> part")
    body = "\n\n".join(parts)
    README.write_text(pattern.sub(lambda found: f"{found[1]}\n{body}\n\n{found[2]}", text))


if __name__ == "__main__":
    main()
