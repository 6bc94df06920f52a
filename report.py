"""The tables and figures of reproduce.py, from the results that are there. It trains and scores nothing.

A result is a JSON in results/<config>/, made by reproduce.py. In the tables a row is a variant of a method, read in one way; its
figures are those of its seeds.
"""

import collections
import csv
import json
import math
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from checkpoint import MACHINE
from conditioning import MODES, draw_cond
from config import METHOD_NAMES, Config, UserError, whole_file

VARIANTS = [f"{name}{q}" for name in METHOD_NAMES for q in ("", "_query")[: 1 + name.startswith("sigma")]]
VARY = ("method", "sigma_positions", "r_max", "seed")  # keys in which the runs of one comparison differ
ELSEWHERE = (*MACHINE, "out_dir", "data_dir", "init_from", "log_interval")  # where and how, not what

# ---------------------------------------------------------------- which results there are


def name_of(config):
    return f"{config.variant}-r{config.r_max:g}-s{config.seed}"


def difference(config, saved, apart=()):
    """The first key in which a saved config asks for something else, as "key = value, not value"; else None."""
    for name, value in asdict(config).items():
        then = saved.get(name, getattr(Config, name))
        if name not in (*ELSEWHERE, *apart) and then != value:
            return f"{name} = {then}, not {value}"
    return None


def unfit(path, config, apart=()):
    """Why a file is no result of this config (apart from some keys), in a few words; None if it is one."""
    try:
        found = json.loads(path.read_text())
        saved = found["config"]
        name = name_of(Config(**{key: saved[key] for key in VARY}))
        complete = {"minutes", "machine", "consistency"} <= set(found) and all(
            {"evaluation_set", "split", "modes", "first", "reading", "bound"} <= set(result)
            for result in found["results"]
        )
    except (OSError, ValueError, KeyError, TypeError, UserError) as e:
        return f"is no whole result ({type(e).__name__})"
    if not complete:
        return "is no whole result (parts are missing)"
    if path.stem != name:
        return f"is the result of {name} by its content"
    if other := difference(config, saved, apart):
        return f"was made with {other}"
    return None


def read_results(folder, config, split):
    """{r_max: [result]} of all runs that differ from `config` in VARY only; a result is one of evaluate.py's, with its file's
    other entries.

    What does not belong is named and left out: broken files, other settings, other questions than most results answer.
    """
    found, left_out = collections.defaultdict(list), []
    for path in sorted(folder.glob("*.json")):
        if path.name == "floors.json":
            continue
        if wrong := unfit(path, config, VARY):
            left_out.append(f"{path} {wrong}")
            continue
        file = json.loads(path.read_text())
        variant = Config(**{key: file["config"][key] for key in VARY}).variant
        results = [result for result in file["results"] if result["split"] == split]
        found[file["config"]["r_max"]] += [{**file, **result, "path": path, "variant": variant} for result in results]
    for r_max, results in found.items():
        usual = collections.Counter(r["evaluation_set"] for r in results).most_common(1)[0][0]
        for path in dict.fromkeys(r["path"] for r in results if r["evaluation_set"] != usual):
            left_out.append(f"{path} answers other questions than the evaluation set {usual}")
        found[r_max] = [r for r in results if r["evaluation_set"] == usual]
    if not found:
        why = left_out[0] if left_out else "train first"
        raise UserError(f"{folder} holds no result of these settings ({why}): without --table they are made")
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    return dict(sorted(found.items()))


def paper_figures(config_name):
    """{(r_max, method, mode): perplexity} and the table's name, of Tables B.1 to B.4; B.1 (Small) for a config of ours."""
    with open(Path(__file__).parent / "results" / "paper.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    model = config_name if config_name in {row["model"] for row in rows} else "small"
    rows = [row for row in rows if row["model"] == model]
    return {(float(r["r_max"]), r["method"], r["mode"]): float(r["mean"]) for r in rows}, rows[0]["table"]


# ---------------------------------------------------------------- the figures of a row

AC = ("ac_gpt", "")


class Rows:
    """The results at one r_max, {(variant, reading): [result of each seed]}, and the paper's figures."""

    def __init__(self, results, r_max, paper):
        self.r_max, self.paper, self.of = r_max, paper, collections.defaultdict(list)
        for result in sorted(results, key=lambda r: (VARIANTS.index(r["variant"]), r["reading"], r["config"]["seed"])):
            self.of[result["variant"], result["reading"]].append(result)

    def bits(self, row, mode, part="modes"):
        """Bits per token, of each seed; [] where the method has no value."""
        return [math.log2(r[part][mode]["perplexity"]) for r in self.of.get(row, []) if mode in r[part]]

    def in_paper(self, row, mode):
        """The paper's perplexity or None. It scores sigma-random from left to right, but not in the training distribution."""
        variant, reading = row
        if variant == "sigma_random" and (reading == "random order") != (mode == "training"):
            return None
        return self.paper.get((self.r_max, variant, mode))


def mean_and_std(values, digits, sign=""):
    text = f"{statistics.fmean(values):{sign}.{digits}f}"
    return text + (f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def resolved(a, b):
    """Do the means of two lists differ by two standard errors or more? None where one seed tells nothing of them."""
    if min(len(a), len(b)) < 2:
        return None
    error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    return abs(statistics.fmean(a) - statistics.fmean(b)) >= 2 * error


# ---------------------------------------------------------------- tables


def label(row):
    return row[0] + f", {row[1]}" * bool(row[1])


def title(mode):
    return {"training": "training distribution"}.get(mode, mode.replace("_no_future", ", no future"))


def lines_of(head, titles, rows, width):
    """A table as text: rows are (name, cells)."""
    rows = [(head, titles), *rows]
    return "\n".join((f"{name:33}" + "".join(f"{cell:>{width}}" for cell in cells)).rstrip() for name, cells in rows)


def perplexity_table(rows, part):
    """Perplexities; below each how many more bits than ac_gpt's it means. part: "modes" (all sequences) or "first"."""
    lines = []
    asked = {
        mode: {r[part][mode]["tokens"] for of in rows.of.values() for r in of if mode in r[part]} for mode in MODES
    }
    for mode, tokens in asked.items():
        assert len(tokens) <= 1, f"{mode}: the runs are scored on {sorted(tokens)} tokens"
    lines.append(("tokens", [next(iter(tokens), "-") for tokens in asked.values()]))
    for row, found in rows.of.items():
        upper, lower = [], []
        for mode in MODES:
            bits, theirs = rows.bits(row, mode, part), rows.in_paper(row, mode)
            text = "<= " * found[0]["bound"] + mean_and_std([2**x for x in bits], 3) if bits else "-"
            upper.append(text + (f" ({theirs:g})" if theirs else ""))
            lower.append(more_bits(rows, row, mode, part) if bits and row != AC else "")
        lines += [(label(row) + f" ({len(found)})" * (len(found) > 1), upper)] + [("", lower)] * any(lower)
    return lines_of("", map(title, MODES), lines, 26)


def more_bits(rows, row, mode, part):
    """ "+1.2% (+0.9%)": more bits than ac_gpt, here and in the paper. Unlike perplexity's, this ratio knows no unit."""
    ours, base, paper = (
        rows.bits(row, mode, part),
        rows.bits(AC, mode, part),
        [rows.in_paper(r, mode) for r in (row, AC)],
    )
    if not base:
        return ""
    text = f"{statistics.fmean(ours) / statistics.fmean(base) - 1:+.1%}" + " n.r." * (resolved(ours, base) is False)
    return text + (f" ({math.log(paper[0]) / math.log(paper[1]) - 1:+.1%})" if all(paper) else "")


def future_table(rows):
    """What the later tokens of x_c save: bits per token, the share that this is, the paper's share."""
    lines = []
    for row in rows.of:
        cells = []
        for law in ("infilling", "training"):
            seeing, blind = rows.bits(row, law), rows.bits(row, f"{law}_no_future")
            paper = [rows.in_paper(row, mode) for mode in (law, f"{law}_no_future")]
            if not (seeing and blind):
                continue
            saved = [b - a for a, b in zip(seeing, blind)]
            text = f"{mean_and_std(saved, 4)} = {statistics.fmean(saved) / statistics.fmean(blind):.1%}"
            cells.append(text + (f" ({1 - math.log(paper[0]) / math.log(paper[1]):.1%})" if all(paper) else ""))
        lines += [(label(row), cells)] * bool(cells)
    return lines_of("saved by the future", map(title, ("infilling", "training")), lines, 34)


def consistency_table(rows):
    """Mean of the absolute violations of the chain rule, and of the signed ones."""
    modes, lines = ("unconditional", "infilling", "training"), []
    for variant in dict.fromkeys(variant for variant, _ in rows.of):
        seeds = next(found for row, found in rows.of.items() if row[0] == variant)
        for reading in seeds[0]["consistency"]:
            found = [r["consistency"][reading] for r in seeds]
            cells = [
                mean_and_std([f[mode]["absolute"] for f in found], 4) + "; " + mean_and_std([f[mode]["signed"] for f in found], 4, "+")
                for mode in modes if mode in found[0]
            ]  # fmt: skip
            lines.append((label((variant, reading)), cells))
    return lines_of("violations of the chain rule", map(title, modes), lines, 40)


def print_table(path, config, split, folder):
    paper, paper_table = paper_figures(Path(path).stem)
    for r_max, results in read_results(folder, config, split).items():
        minutes = {r["path"]: r["minutes"] for r in results}.values()
        sizes = {r["path"]: r["modes"]["unconditional"]["sequences"] for r in results}
        n, few = max(sizes.values()), min(sizes.values())
        print(
            f"{path}, {split}: {n} sequences of {config.block_size} tokens, r_max {r_max:g}, evaluation set "
            f"{results[0]['evaluation_set']}\n{config.max_iters} steps of {config.sequences_per_step} sequences, "
            f"{len(minutes)} runs of {min(minutes):.1f} to {max(minutes):.1f} minutes, "
            f"{', '.join(sorted({r['machine'] for r in results}))}\n"
        )
        all_of = Rows([r for r in results if sizes[r["path"]] == n], r_max, paper)
        print(perplexity_table(all_of, "modes"), "\n")
        if few < n:
            print(f"on the first {few} sequences:\n\n{perplexity_table(Rows(results, r_max, paper), 'first')}\n")
        print(future_table(all_of), "\n")
        if split == "val":
            print(consistency_table(Rows(results, r_max, paper)), "\n")
    print(LEGEND.format(table=paper_table))
    if (folder / "floors.json").exists():
        bits = json.loads((folder / "floors.json").read_text())["bits_per_byte"]
        print("Floors, bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in bits.items()))


LEGEND = """\
Perplexity per token, mean +- standard deviation over seeds (their number behind the name; none: one), in brackets that of the paper's Table {table};
below it how many more bits than ac_gpt that is, in brackets in the paper. n.r.: not resolved, less than two standard errors over seeds.
<=: a bound. "random order": mean over four orders. Saved by the future: bits per token = share of the bits (in the paper).
Violations: mean of the absolute ones; of the signed ones: bits per token, positive where a token helps more in x_c than as left context."""


# ---------------------------------------------------------------- figures

SHOWN = {  # rows of Figure 2: colours are the methods'
    ("gpt", ""): ("GPT", "tab:gray"),
    ("ac_gpt", ""): ("AC-GPT", "tab:green"),
    ("sigma_temporal", ""): ("sigma-GPT temporal", "tab:blue"),
    ("sigma_random", "left to right"): ("sigma-GPT random, left to right", "tab:red"),
    ("sigma_random", "random order"): ("sigma-GPT random, random order", "tab:orange"),
    ("mlm", ""): ("MLM", "tab:purple"),
}


def plot(path, config, split, folder):
    """Figure 2 into results/<config>/figure2.png; Figures D.1 and D.2 beside that folder."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    paper, table = paper_figures(Path(path).stem)
    found = {r_max: Rows(results, r_max, paper) for r_max, results in read_results(folder, config, split).items()}
    few = min(
        r["modes"]["unconditional"]["sequences"] for rows in found.values() for of in rows.of.values() for r in of
    )

    def ours(r_max, row, mode):
        """Mean and standard deviation of the perplexity, on the sequences that all methods answer."""
        values = [2**x for x in found[r_max].bits(row, mode, "first")] if r_max in found else []
        return (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0) if values else None

    def theirs(r_max, row, mode):
        value = Rows([], r_max, paper).in_paper(row, mode)
        return (value, 0.0) if value else None

    sources = {f"here, first {few} sequences": ours, f"paper, Table {table}": theirs}
    save(figure_2(sources, sorted(found)), folder / "figure2.png")
    save(figure_d1(), folder.parent / "conditioning_sets.png")
    save(figure_d2(), folder.parent / "modes.png")


def save(figure, path):
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=100, bbox_inches="tight")
    print(path)


def figure_2(sources, r_maxes):
    """Sources, {title: function (r_max, row, mode) -> (mean, std) or None}, one below the other: (a) all modes, (b) with and
    without the future, both at r_max 0.6 or the nearest to it, (c) against r_max.
    """
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(sources), 3, figsize=(17, 4.2 * len(sources)), width_ratios=[2.2, 1, 1.3])
    middle = min(r_maxes, key=lambda r: abs(r - 0.6))
    for (name, value), (a, b, c) in zip(sources.items(), panels):
        for i, (row, (text, color)) in enumerate(SHOWN.items()):
            bars = [(j, *v) for j, mode in enumerate(MODES) if (v := value(middle, row, mode))]
            x, y, error = zip(*bars) if bars else ((), (), ())
            a.bar([j + 0.14 * (i - 2.5) for j in x], y, 0.14, yerr=error, color=color, label=text)
        a.set(yscale="log", title=f"(a) {name}, r_max {middle:g}", ylabel="perplexity")
        a.set_xticks(range(len(MODES)), [title(mode).replace(", ", ",\n") for mode in MODES])
        a.legend(fontsize=7)
        for i, row in enumerate(list(SHOWN)[1:3]):
            for j, mode in enumerate(("training_no_future", "training")):
                mean, error = value(middle, row, mode) or (math.nan, 0)
                b.bar(i + 0.4 * j - 0.2, mean, 0.38, yerr=error, color=SHOWN[row][1], alpha=1 if j else 0.5)
                b.text(i + 0.4 * j - 0.2, mean, f"{mean:.2f}", ha="center", va="bottom", fontsize=8)
            for mode, style in (("unconditional", "o:"), ("infilling", "s--"), ("training", "^-")):
                points = [(r, v[0]) for r in r_maxes if (v := value(r, row, mode))]
                c.plot(
                    *zip(*points) if points else ((), ()),
                    style,
                    color=SHOWN[row][1],
                    label=f"{SHOWN[row][0]}, {title(mode)}",
                )
        b.set_xticks(range(2), [SHOWN[row][0] for row in list(SHOWN)[1:3]])
        b.set(title="(b) training distribution,\nwithout (pale) and with the future", ylabel="perplexity")
        c.set(title="(c) against r_max", xlabel="r_max")
        c.legend(fontsize=7)
    figure.tight_layout()
    return figure


def figure_d1():
    """Sets x_c drawn by the training law, half of the tokens, in three regimes of the number of blocks."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    T = 48
    regimes = {
        "fully arbitrary: b_min = b_max = T, so every known token is a block": {"b_min": T, "b_max": T},
        "interpolated: b_min = 1, b_max = |x_c|, the default": {},
        "structured: b_max = 2": {"b_max": 2},
    }
    figure, panels = plt.subplots(3, 1, figsize=(10, 5))
    for axes, (name, keys) in zip(panels, regimes.items()):
        config = Config(block_size=T, r_min=0.5, r_max=0.5, **keys)
        cond = draw_cond(config, 5, torch.Generator().manual_seed(1))
        axes.pcolormesh(cond.flip(0), cmap=ListedColormap(["#f3e6c8", "#4c9f70"]), edgecolors="white", linewidth=1)
        axes.set_title(name + " (green: x_c, known; beige: x_e)", fontsize=9)
        axes.axis("off")
    figure.tight_layout()
    return figure


def figure_d2():
    """The five modes on one sentence: what is known, what is scored, and what is seen only by the tokens behind it."""
    import matplotlib.pyplot as plt

    words = ["The", "cat", "sat", "on", "the", "mat", "."]
    known = {None: (), "infilling": (0, 5, 6), "training": (1, 4, 5)}
    figure, axes = plt.subplots(figsize=(10, 4))
    for y, (name, mode) in enumerate(MODES.items()):
        axes.text(-0.2, -y, title(name), ha="right", va="center")
        for x, word in enumerate(words):
            given = x in known[mode.law]
            color = "#f3e6c8" if not given else "#4c9f70" if mode.future else "#d9d9d9"
            axes.add_patch(plt.Rectangle((x, -y - 0.4), 0.95, 0.8, facecolor=color))
            axes.text(x + 0.47, -y, word, ha="center", va="center")
    axes.set(xlim=(-3, len(words)), ylim=(-len(MODES) + 0.4, 0.6))
    axes.set_title(
        "green: x_c, seen by all   beige: scored   grey: not scored, seen by what comes after it", fontsize=10
    )
    axes.axis("off")
    return figure
