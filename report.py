"""The tables and figures of reproduce.py, from the results that are there. It trains and scores nothing.

A result is a JSON in results/<config>/, made by reproduce.py. In the tables a row is a variant of a method, read in one way; its
figures are those of its seeds.
"""

import collections
import csv
import itertools
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
FLOORS = "floors.json"
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


def read_result(path, config, apart=()):
    """A result file, and why it is none of this config (apart from some keys), in a few words; None if it is one."""
    try:
        result = json.loads(path.read_text())
        then = {name: result["config"].get(name, getattr(Config, name)) for name in VARY}
        result["variant"], name = Config(**then).variant, name_of(Config(**then))
        each = ("split", "reading", "bound", "evaluation_set", "modes", "first")
        missing = [key for key in ("trained_by", "scored_by", "machine", "minutes", "consistency") if key not in result]
        missing += [key for part in result["results"] for key in each if key not in part]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as e:
        return None, f"is no whole result ({type(e).__name__})"
    if missing or not result["results"]:
        return None, f"is no whole result (without {missing[0] if missing else 'results'})"
    if path.stem != name:
        return None, f"is the result of {name} by its content"
    if other := difference(config, result["config"], apart):
        return None, f"was made with {other}"
    return result, None


def read_results(folder, config, split):
    """{r_max: [result]} of all runs that differ from `config` in VARY only; a result is one of evaluate.py's, with its file's
    other entries.

    What does not belong is named and left out: broken files, other settings, other questions than most runs answer.
    """
    found, left_out = collections.defaultdict(dict), []
    for path in sorted(folder.glob("*.json")):
        if path.name == FLOORS:
            continue
        file, wrong = read_result(path, config, VARY)
        results = file and [{**file, **result, "path": path} for result in file["results"] if result["split"] == split]
        if results:
            found[file["config"]["r_max"]][path] = results
        else:
            left_out.append(f"{path} {wrong or f'has nothing of the split {split}'}")
    if not found:
        why = left_out[0] if left_out else "train first"
        raise UserError(f"{folder} holds no result of these settings ({why}): without --table they are made")
    for r_max, runs in found.items():
        usual = collections.Counter(of[0]["evaluation_set"] for of in runs.values()).most_common(1)[0][0]
        others = [path for path, of in runs.items() if {r["evaluation_set"] for r in of} != {usual}]
        left_out += [f"{path} answers other questions than the evaluation set {usual}" for path in others]
        found[r_max] = [result for path, of in runs.items() if path not in others for result in of]
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    return dict(sorted(found.items()))


def read_floors(folder, r_max, asked):
    """{name: bits per byte} of the floors on this evaluation set; {} where there are none, or only those of another r_max."""
    path = folder / FLOORS
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        if found["config"]["r_max"] != r_max:
            return {}
        if found["evaluation_set"] == asked:
            return found["bits_per_byte"]
    except (ValueError, KeyError, TypeError):
        pass
    print(f"left out: {path} is broken, or of another evaluation set than {asked}", file=sys.stderr)
    return {}


def paper_figures(config_name):
    """{(r_max, method, mode): perplexity} and what they are, from Tables B.1 to B.4; B.1 (Small) for a config of ours."""
    with open(Path(__file__).parent / "results" / "paper.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    model = config_name if config_name in {row["model"] for row in rows} else "small"
    rows = [row for row in rows if row["model"] == model]
    about = f"Table {rows[0]['table']}, {'FineWeb' if model.startswith('fineweb') else f'{model} on WikiText-103'}"
    return {(float(r["r_max"]), r["method"], r["mode"]): float(r["mean"]) for r in rows}, about


# ---------------------------------------------------------------- the figures of a row

AC = ("ac_gpt", "")


class Rows:
    """The results at one r_max, {(variant, reading): [result of each seed]}, and the paper's figures."""

    def __init__(self, results, r_max, paper):
        self.r_max, self.paper, self.of = r_max, paper, collections.defaultdict(list)
        self.size = max((r["modes"]["unconditional"]["sequences"] for r in results), default=0)
        self.few = min((r["first"]["unconditional"]["sequences"] for r in results), default=0)
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
    if len(values) > 1 and math.isfinite(sum(values)):
        text += f" +- {statistics.stdev(values):.{digits}f}"
    return text


def resolved(a, b):
    """Do the means of two lists differ by two standard errors? Not if one seed tells nothing of its error."""
    if min(len(a), len(b)) < 2 or not math.isfinite(sum(a) + sum(b)):
        return False
    error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    return abs(statistics.fmean(a) - statistics.fmean(b)) > 2 * error


# ---------------------------------------------------------------- tables


def label(row):
    return row[0] + f", {row[1]}" * bool(row[1])


def title(mode):
    return {"training": "training distribution"}.get(mode, mode.replace("_no_future", ", no future"))


def lines_of(head, titles, rows):
    """A table as text: rows are (name, cells)."""
    rows = [(head, list(titles)), *rows]
    first, width = max(len(name) for name, _ in rows), 2 + max(len(cell) for _, cells in rows for cell in cells)
    return "\n".join(
        (f"{name:{first}}" + "".join(f"{cell:>{width}}" for cell in cells)).rstrip() for name, cells in rows
    )


def perplexity_table(rows, part):
    """Perplexities; below each how many more bits than ac_gpt's it means. part: "modes" (all sequences) or "first"."""
    asked = {
        mode: {r[part][mode]["tokens"] for of in rows.of.values() for r in of if mode in r[part]} for mode in MODES
    }
    for mode, tokens in asked.items():
        if len(tokens) > 1:
            raise UserError(
                f"{mode}: the runs are scored on different tokens, {sorted(tokens)} of them: make the results anew"
            )
    lines = [("tokens", [str(next(iter(tokens), "-")) for tokens in asked.values()])]
    for row, found in rows.of.items():
        upper, lower, bound = [], [], "<= " * found[0]["bound"]
        for mode in MODES:
            bits, theirs = rows.bits(row, mode, part), rows.in_paper(row, mode)
            text = bound + mean_and_std([2**x for x in bits], 3) if bits else "-"
            upper.append(text + (f" ({theirs:g})" if theirs else ""))
            lower.append(
                bound + more_bits(rows, row, mode, part) if bits and rows.bits(AC, mode, part) and row != AC else ""
            )
        lines += [(label(row) + f" ({len(found)})" * (len(found) > 1), upper)] + [("", lower)] * any(lower)
    return lines_of("", map(title, MODES), lines)


def more_bits(rows, row, mode, part):
    """How many more bits than ac_gpt, here and in the paper: "+1.2% (+0.9%)". Unlike perplexity's, this ratio knows no unit."""
    ours, base = rows.bits(row, mode, part), rows.bits(AC, mode, part)
    paper = [rows.in_paper(r, mode) for r in (row, AC)]
    text = f"{statistics.fmean(ours) / statistics.fmean(base) - 1:+.1%}" + " n.r." * (not resolved(ours, base))
    return text + (f" ({math.log(paper[0]) / math.log(paper[1]) - 1:+.1%})" if all(paper) else "")


def future_table(rows):
    """What the later tokens of x_c save: bits per token, the share that this is, the paper's share."""

    def cell(row, law):
        seeing, blind = rows.bits(row, law), rows.bits(row, f"{law}_no_future")
        if not (seeing and blind):
            return "-"
        saved = [b - a for a, b in zip(seeing, blind)]
        paper = [rows.in_paper(row, mode) for mode in (law, f"{law}_no_future")]
        text = f"{mean_and_std(saved, 4)}, {statistics.fmean(saved) / statistics.fmean(blind):.1%}"
        return text + (f" ({1 - math.log(paper[0]) / math.log(paper[1]):.1%})" if all(paper) else "")

    lines = [(label(row), [cell(row, law) for law in ("infilling", "training")]) for row in rows.of]
    lines = [(name, cells) for name, cells in lines if set(cells) != {"-"}]
    return lines_of("saved by the future", map(title, ("infilling", "training")), lines)


def consistency_table(rows):
    """Mean of the absolute violations of the chain rule, and of the signed ones."""
    modes, lines = ("unconditional", "infilling", "training"), []

    def cell(violations):
        return "; ".join(mean_and_std([v[x] for v in violations], 4, s) for x, s in (("absolute", ""), ("signed", "+")))

    for variant in dict.fromkeys(variant for variant, _ in rows.of):
        seeds = [r["consistency"] for r in next(of for row, of in rows.of.items() if row[0] == variant)]
        for reading in seeds[0]:
            found = [[of[reading][mode] for of in seeds if mode in of.get(reading, {})] for mode in modes]
            n = found[0][0]["sequences"]
            cells = [cell(violations) if violations else "-" for violations in found]
            lines.append((label((variant, reading)) + f", first {n}" * (n < rows.size), cells))
    return lines_of("violations of the chain rule", map(title, modes), lines)


SAMPLED = ("training", "training_no_future", "infilling", "infilling_no_future")


def sample_table(folder, config, n):
    """Of n samples of each run, the share of unknown tokens that are what they were; a table for x_c of each law. Files of other settings are
    named and left out.
    """
    lines = {}
    for path in sorted(folder.glob("*.json")):
        try:
            file = json.loads(path.read_text())
            of = {(score["mode"], score["temperature"]): score for score in file["scores"]}
            wrong = difference(config, file["config"], VARY)
            if {score["n"] for score in of.values()} != {n}:
                wrong = wrong or f"{file['scores'][0]['n']} samples, not {n}: delete it to draw anew"
            shares = {kind: f"{score['restored']:.2%} +- {score['stderr']:.2%}" for kind, score in of.items()}
            variant = Config(**{key: file["config"][key] for key in VARY}).variant
            order = file["config"]["r_max"], VARIANTS.index(variant)
        except (OSError, ValueError, KeyError, TypeError, IndexError, UserError) as e:
            wrong = f"no whole result ({type(e).__name__})"
        if wrong:
            print(f"left out: {path} with {wrong}", file=sys.stderr)
        else:
            lines[order] = (file["run"], shares)
    if not lines:
        raise UserError(f"{folder} holds no such results: train the runs first, then give --samples=100")
    tables, titles = [], ["sampled", "greedy", "sampled, no future", "greedy, no future"]
    for law in ("training", "infilling"):
        kinds = [(mode, t) for mode in (law, f"{law}_no_future") for t in (0.8, 0)]
        rows = [(run, [shares.get(kind, "-") for kind in kinds]) for _, (run, shares) in sorted(lines.items())]
        tables.append(lines_of(f"{title(law)}, n = {n}", titles, rows))
    return "\n\n".join(tables)


def sweep_table(found):
    """Perplexities of all that was run at several r_max, {r_max: Rows}."""
    modes, lines = ("unconditional", "infilling", "training"), []

    def cell(rows, row, mode):
        perplexities, theirs = [2**x for x in rows.bits(row, mode)], rows.in_paper(row, mode)
        return mean_and_std(perplexities, 3) + (f" ({theirs:g})" if theirs else "") if perplexities else "-"

    for row, mode in itertools.product(dict.fromkeys(row for rows in found.values() for row in rows.of), modes):
        if sum(bool(rows.bits(row, mode)) for rows in found.values()) > 1:
            lines.append((f"{label(row)}, {title(mode)}", [cell(rows, row, mode) for rows in found.values()]))
    return lines_of("against r_max", (f"{r_max:g}" for r_max in found), lines)


def print_table(path, config, split, folder, asked):
    """All that there is to say at each r_max in `asked`, and what there is at several."""
    paper, about_paper = paper_figures(Path(path).stem)
    found = read_results(folder, config, split)
    if not asked & set(found):
        have = ",".join(f"{r_max:g}" for r_max in found)
        raise UserError(f"{folder} holds no result at r_max {', '.join(map(str, sorted(asked)))}: give --r_max={have}")
    at = {r_max: Rows(results, r_max, paper) for r_max, results in found.items()}
    for r_max, rows in at.items():
        if r_max not in asked:
            continue
        results = found[r_max]
        runs = {r["path"]: r for r in results}.values()
        minutes = [r["minutes"] for r in runs if r["minutes"] is not None]
        made = [sorted({str(r[key]) for r in runs}) for key in ("trained_by", "scored_by", "machine")]
        print(
            f"{path}, {split}: {rows.size} sequences of {config.block_size} tokens, r_max {r_max:g}, evaluation set "
            f"{results[0]['evaluation_set']}\n{config.max_iters} steps of {config.sequences_per_step} sequences; {len(runs)} run{'s' * (len(runs) > 1)}"
            + (f" of {min(minutes):.1f} to {max(minutes):.1f} minutes" if minutes else "")
            + f" on {', '.join(made[2])}, {', '.join(sorted({r['config']['dtype'] for r in runs}))}; trained by {', '.join(made[0])}, "
            f"scored by {', '.join(made[1])}\n"
        )
        whole = Rows([r for r in results if r["modes"]["unconditional"]["sequences"] == rows.size], r_max, paper)
        print(perplexity_table(whole, "modes") + "\n")
        if len(whole.of) < len(rows.of):
            print(f"on the first {rows.few} sequences:\n\n{perplexity_table(rows, 'first')}\n")
        print(future_table(whole) + "\n")
        if split == "val":
            print(consistency_table(rows) + "\n")
            if floors := read_floors(folder, r_max, results[0]["evaluation_set"]):
                print(
                    "floors, bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in floors.items()), "\n"
                )
    if len(found) > 1:
        print(sweep_table(at) + "\n")
    print(LEGEND.format(paper=about_paper))


LEGEND = """\
Perplexity per token, mean +- standard deviation over seeds; behind a name the number of seeds, if more than one. In brackets the
paper's figure ({paper}; per GPT-2 token). To be compared
are the percentages below: how many more bits per token than ac_gpt's, a ratio without a unit. n.r.: not resolved, the difference is
less than two standard errors over seeds (of one seed nothing is resolved). <=: a bound. random order: the mean over four orders.
saved by the future: bits per token, and their share of all bits (in the paper).
violations of the chain rule, bits per token: mean of their absolute values; mean with sign, positive where a token helps more in
x_c than as left context."""


# ---------------------------------------------------------------- figures

SHOWN = {  # rows of Figure 2: colours are the methods'
    ("gpt", ""): ("GPT", "tab:gray"),
    ("ac_gpt", ""): ("AC-GPT", "tab:green"),
    ("sigma_temporal", ""): ("sigma-GPT temporal", "tab:blue"),
    ("sigma_temporal_query", ""): ("sigma-GPT temporal, 'query'", "tab:cyan"),
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
    paper, about_paper = paper_figures(Path(path).stem)
    found = {r_max: Rows(results, r_max, paper) for r_max, results in read_results(folder, config, split).items()}

    def ours(r_max, row, mode, part="modes"):
        """Mean and standard deviation of the perplexity."""
        values = [2**x for x in found[r_max].bits(row, mode, part)] if r_max in found else []
        return (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0) if values else None

    def theirs(r_max, row, mode, part="modes"):
        value = Rows([], r_max, paper).in_paper(row, mode)
        return (value, 0.0) if value else None

    few = min(rows.few for rows in found.values())
    sources = {
        f"{config.dataset}, first {few} sequences": (ours, sorted(found)),
        about_paper: (theirs, sorted({r for r, _, _ in paper})),
    }
    save(figure_2(sources), folder / "figure2.png")
    save(figure_d1(), folder.parent / "conditioning_sets.png")
    save(figure_d2(), folder.parent / "modes.png")


def save(figure, path):
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=100, bbox_inches="tight")
    print(path)


def figure_2(sources):
    """Sources, {title: (function (r_max, row, mode, part) -> (mean, std) or None, its r_max)}, one below the other: (a) all modes,
    (b) with and without the future, both at r_max 0.6 or the nearest to it, (c) against r_max.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    figure, panels = plt.subplots(len(sources), 3, figsize=(17, 4.2 * len(sources)), width_ratios=[2.2, 1, 1.3])
    two = [("ac_gpt", ""), ("sigma_temporal", "")]  # over r_max
    for (name, (value, r_maxes)), (a, b, c) in zip(sources.items(), panels):
        middle = min(r_maxes, key=lambda r: abs(r - 0.6))
        for i, (row, (text, color)) in enumerate(SHOWN.items()):
            bars = [
                (j + 0.12 * (i - 3), *v) for j, mode in enumerate(MODES) if (v := value(middle, row, mode, "first"))
            ]
            if bars:
                x, y, error = zip(*bars)
                a.bar(x, y, 0.12, yerr=error, color=color, label=text)
        a.set(yscale="log", title=f"(a) {name}, r_max {middle:g}", ylabel="perplexity")
        a.set_xticks(range(len(MODES)), [title(mode).replace(" ", "\n", 1) for mode in MODES])
        for kind in ("major", "minor"):  # 20, not 2 x 10^1
            getattr(a.yaxis, f"set_{kind}_formatter")(ScalarFormatter())
        a.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        seeing = [row for row in (*two, ("sigma_temporal_query", "")) if value(middle, row, "training")]
        for i, row in enumerate(seeing):
            for j, mode in enumerate(("training_no_future", "training")):
                v = value(middle, row, mode)
                b.bar(i + 0.4 * j - 0.2, v[0], 0.38, yerr=v[1], color=SHOWN[row][1], alpha=1 if j else 0.5)
                b.text(i + 0.4 * j - 0.2, v[0] + v[1], f"{v[0]:.2f}", ha="center", va="bottom", fontsize=8)
        for row in two:
            for mode, style in (("unconditional", "o:"), ("infilling", "s--"), ("training", "^-")):
                points = [(r, v[0]) for r in r_maxes if (v := value(r, row, mode))]
                if points:
                    c.plot(*zip(*points), style, color=SHOWN[row][1], label=f"{SHOWN[row][0]}, {title(mode)}")
        b.set_xticks(range(len(seeing)), [SHOWN[row][0].replace(" ", "\n") for row in seeing])
        b.set(title="(b) training distribution,\nwithout (pale) and with the future", ylabel="perplexity")
        c.set(title="(c) against r_max", xlabel="r_max", ylabel="perplexity")
        c.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
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
