"""reproduce.py and report.py: what is run, skipped, resumed and left out; every number of the tables by hand; the floors."""

import json
import math
import re
import shlex
import shutil
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import evaluate
import report
import reproduce
import train
from conditioning import EvaluationSet
from config import Config, load_config, parse
from conftest import HERE, SMALL
from test_baselines import weighty
from test_masks import T, V, random_queries

# ---------------------------------------------------------------- which runs there are


def test_the_grid():
    path, options = str(HERE / "configs" / "tiny.py"), reproduce.Options(r_max="0.2,0.6", seeds=2)
    configs = reproduce.grid(path, {"seed": 5}, options)
    assert len(configs) == len({c.out_dir for c in configs}) == len({report.name_of(c) for c in configs}) == 8 * 2 * 2
    assert {c.seed for c in configs[:16]} == {5} and {c.seed for c in configs[16:]} == {6}, "seed by seed"
    assert [c.variant for c in configs[:8]] == report.VARIANTS and {c.max_iters for c in configs} == {4600}
    assert sum(c.sigma_positions == "query" for c in configs) == 2 * 4
    assert {c.method for c in configs} == {"gpt", "ac_gpt", "sigma_temporal", "sigma_random", "mlm", "diffusion"}


def test_listed_commands_are_the_grid(command):
    path = str(HERE / "configs" / "tiny.py")
    args = [
        "--seeds=2",
        "--r_max=0.2,1",
        "--methods=gpt,sigma_random_query",
        "--max_iters=7",
        "--seed=3",
        "--results=my folder",
    ]
    code, out, _ = command("reproduce.py", path, *args, "--list")
    paths, given, options = parse([path, *args], reproduce.Options)
    wanted = [c.out_dir for c in reproduce.grid(path, given, options)]
    found = []
    for line in out.splitlines():
        (script, *paths), given, options = parse(shlex.split(line)[1:], reproduce.Options)
        (config,) = reproduce.grid(*paths, given, options)
        assert script == "reproduce.py" and config.max_iters == 7 and options.results == "my folder"
        found.append(config.out_dir)
    assert code == 0 and found == wanted


@pytest.fixture(scope="session")
def finished(data_dir, tmp_path_factory):
    """A small comparison: config file, working folder with out/ and results/ of three methods and two seeds."""
    folder = tmp_path_factory.mktemp("grid")
    (folder / "small.py").write_text("\n".join(f"{x[2:].replace('=', ' = ', 1)}" for x in SMALL if "dataset" not in x))
    with open(folder / "small.py", "a") as file:
        file.write(f"\ndataset = 'mini'\ndata_dir = {str(data_dir)!r}\nmlm_sequences = 3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        reproduce.main(["small.py", "--methods=gpt,ac_gpt,sigma_random,mlm", "--seeds=2"])
        reproduce.main(["small.py", "--methods=sigma_temporal_query", "--seeds=1"])
    return folder


@pytest.fixture
def work(finished, tmp_path, monkeypatch):
    """A copy of it that a test may break, as the working folder."""
    shutil.copytree(finished, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def results_in(folder):
    return {path.stem: json.loads(path.read_text()) for path in sorted((folder / "results" / "small").glob("*.json"))}


def test_a_result_can_be_traced(finished):
    found = results_in(finished)
    two = {f"{m}-r0.6-s{s}" for m in ("gpt", "ac_gpt", "sigma_random", "mlm") for s in (1337, 1338)}
    assert set(found) == two | {"sigma_temporal_query-r0.6-s1337"}
    for name, result in found.items():
        assert {"scored_by", "machine", "minutes", "torch", "iter"} <= set(result) and result["run"] == name
        assert result["trained_by"] == checkpoint.git_commit()
        assert result["config"]["max_iters"] == 10 and result["checkpoint"] == "best.pt"
        n = 3 if "mlm" in name else 8
        assert {r["split"] for r in result["results"]} == {"val", "test"}
        for r in result["results"]:
            assert all({"perplexity", "stderr", "tokens", "sequences"} == set(m) for m in r["modes"].values())
            assert all(m["sequences"] == n for m in r["modes"].values())
            assert all(m["sequences"] == 3 for m in r["first"].values())
        evaluated = json.loads(next((finished / result["config"]["out_dir"]).glob("eval_val_*.json")).read_text())
        of_val = next(r for r in result["results"] if r["split"] == "val" and r["reading"] == evaluated["reading"])
        for mode, value in of_val["modes"].items():
            assert value["perplexity"] == evaluated["modes"][mode]["perplexity"]
            some = evaluate.statistics(*evaluate.first(evaluated, mode, 3))
            assert of_val["first"][mode] == some


def test_what_is_finished_is_skipped(work, command, monkeypatch):
    before = {path: path.read_bytes() for path in (work / "results" / "small").glob("*.json")}
    monkeypatch.setattr(train, "main", lambda argv: pytest.fail(f"trains {argv}"))
    code, out, _ = command("reproduce.py", "small.py", "--methods=gpt,ac_gpt,sigma_random,mlm", "--seeds=2")
    assert code == 0 and "unconditional" in out
    assert before == {path: path.read_bytes() for path in (work / "results" / "small").glob("*.json")}
    # the run is finished, its result is gone: it is scored again, to the same figures
    path = work / "results" / "small" / "ac_gpt-r0.6-s1338.json"
    path.unlink()
    assert command("reproduce.py", "small.py", "--methods=ac_gpt", "--seeds=2")[0] == 0
    old, new = json.loads(before[path]), json.loads(path.read_text())
    assert old["results"] == new["results"] and old["consistency"] == new["consistency"]


def test_what_is_interrupted_is_resumed(work, command, monkeypatch):
    """Ctrl-C ends the command without a result; the same command then gives what an uninterrupted one gives."""
    path = work / "results" / "small" / "ac_gpt-r0.6-s1337.json"
    old = json.loads(path.read_text())
    path.unlink()
    shutil.rmtree(work / "out" / "small-ac_gpt-r0.6-s1337")
    step = train.Trainer.step

    def step_and_stop(self):
        self.stop = self.iter == 6
        return step(self)

    args = ["reproduce.py", "small.py", "--methods=ac_gpt", "--seeds=1"]
    monkeypatch.setattr(train.Trainer, "step", step_and_stop)
    code, out, err = command(*args)
    assert code == 130 and "interrupted" in err and "stopped after step 7" in out and not path.exists()
    monkeypatch.setattr(train.Trainer, "step", step)
    code, out, _ = command(*args)
    assert code == 0 and "step 10/10" in out and "step 7/10" not in out
    assert json.loads(path.read_text())["results"] == old["results"]


# ---------------------------------------------------------------- what is left out


def test_foreign_results_are_left_out(work, command):
    clean = command("reproduce.py", "small.py", "--table")
    folder = work / "results" / "small"
    result = json.loads((folder / "gpt-r0.6-s1337.json").read_text())

    def write(name, **changes):
        (folder / name).write_text(json.dumps({**result, **changes}))

    (folder / "ac_gpt-r0.6-s7.json").write_text((folder / "ac_gpt-r0.6-s1337.json").read_text()[:900])
    write("gpt-r0.6-s1337 (copy).json")
    write("gpt-r0.6-s4.json", config={**result["config"], "seed": 4, "max_iters": 9})
    others = [{**r, "evaluation_set": "other"} for r in result["results"]]
    write("gpt-r0.6-s5.json", config={**result["config"], "seed": 5}, results=others)
    write("gpt-r0.6-s6.json", config={**result["config"], "seed": 6}, results=[{"split": "val"}])
    write("gpt-r0.6-s8.json", config={**result["config"], "seed": 8}, results=[])
    write("gpt-r0.6-s9.json", config={**result["config"], "seed": 9}, results=result["results"][1:])
    (folder / "note.json").write_text("[1, 2]")
    (folder / "floors.json").write_text("{")
    code, out, err = command("reproduce.py", "small.py", "--table")
    assert code == 0 and out == clean[1] and clean[2] == ""
    for name, why in {
        "ac_gpt-r0.6-s7": "no whole result", "(copy)": "gpt-r0.6-s1337 by its content", "gpt-r0.6-s4": "max_iters = 9, not 10",
        "gpt-r0.6-s5": "other questions", "gpt-r0.6-s6": "without reading", "gpt-r0.6-s8": "without results",
        "gpt-r0.6-s9": "nothing of the split val", "note": "no whole result", "floors": "broken",
    }.items():  # fmt: skip
        assert any(name in line and why in line for line in err.splitlines()), (name, err)
    assert len(err.splitlines()) == 9


def test_different_tokens_stop_the_command(work, expect_refusal):
    path = work / "results" / "small" / "gpt-r0.6-s1338.json"
    result = json.loads(path.read_text())
    result["results"][0]["modes"]["training_no_future"]["tokens"] += 1
    path.write_text(json.dumps(result))
    expect_refusal(["training_no_future", "different tokens"], "reproduce.py", "small.py", "--table")


def test_a_run_without_log_lines_or_test_split(work, data_dir, command):
    """No minutes are known then; fineweb has no test split."""
    shutil.copytree(data_dir / "mini-bytes", work / "data" / "mini-bytes")
    meta = json.loads((work / "data" / "mini-bytes" / "meta.json").read_text())
    del meta["tokens"]["test"]
    (work / "data" / "mini-bytes" / "meta.json").write_text(json.dumps(meta))
    args = [
        "small.py",
        "--methods=gpt",
        "--seeds=1",
        "--log_interval=50",
        "--results=new",
        "--seed=3",
        "--data_dir=data",
    ]
    code, out, err = command("reproduce.py", *args)
    (result,) = (json.loads(path.read_text()) for path in (work / "new" / "small").glob("*.json"))
    assert code == 0 and "1 run on" in out and result["minutes"] is None, err
    assert {r["split"] for r in result["results"]} == {"val"}


# ---------------------------------------------------------------- the tables


def cells(out, name):
    """The cells of the first row of that name and of the line below it."""
    lines = out.splitlines()
    i = next(i for i, line in enumerate(lines) if line.startswith(name + "  "))
    first, below = (re.split(r"\s{2,}", line.strip()) for line in lines[i : i + 2])
    return first[1:], below


def test_table_by_hand(finished, command, monkeypatch):
    monkeypatch.chdir(finished)
    code, out, _ = command("reproduce.py", "small.py", "--table")
    found = results_in(finished)

    def values(name, mode, of="modes"):
        return [found[f"{name}-r0.6-s{s}"]["results"][0][of][mode]["perplexity"] for s in (1337, 1338)]

    full, first = out.split("on the first 3 sequences")
    gpt, below = cells(full, "gpt (2)")
    a, b = values("gpt", "unconditional")
    assert code == 0 and gpt[0] == f"{(a + b) / 2:.3f} +- {abs(a - b) / math.sqrt(2):.3f} (17.9)"
    assert gpt[1:3] == ["-", "-"] and len(gpt) == 5 and len(below) == 3
    bits = [[math.log2(x) for x in values(name, "unconditional")] for name in ("gpt", "ac_gpt")]
    means = [sum(x) / 2 for x in bits]
    error = math.sqrt(sum(statistics.variance(x) / 2 for x in bits))
    mark = "" if abs(means[0] - means[1]) >= 2 * error else " n.r."
    assert below[0] == f"{means[0] / means[1] - 1:+.1%}{mark} (-0.9%)", "ln 17.9 / ln 18.4 = 0.991"
    assert "mlm" not in full and "mlm (2)" in first and "sigma_random, left to right (2)" in full
    a, b = values("mlm", "training", "first")
    assert cells(first, "mlm (2)")[0][2].startswith(f"{(a + b) / 2:.3f} +- ")
    lines = [line for line in full.splitlines() if re.match(r"(gpt|ac_gpt|sigma|tokens|  .*unconditional)", line)]
    assert len({len(line) for line in lines[:7]}) == 1, "long names do not push the columns away"
    # the paper's sigma-random is scored from left to right, but not in the training distribution
    assert "(234)" in cells(full, "sigma_random, left to right (2)")[0][0]
    assert "(55.2)" not in cells(full, "sigma_random, left to right (2)")[0][2]
    assert "(55.2)" in cells(full, "sigma_random, random order (2)")[0][2]
    future = out.split("saved by the future")[1]
    saved = [
        math.log2(x) - math.log2(y)
        for x, y in zip(values("ac_gpt", "training_no_future"), values("ac_gpt", "training"))
    ]
    share = sum(saved) / sum(math.log2(x) for x in values("ac_gpt", "training_no_future"))
    text = f"{sum(saved) / 2:.4f} +- {statistics.stdev(saved):.4f}, {share:.1%} (6.0%)"
    assert cells(future, "ac_gpt")[0][1] == text, "1 - ln 15.2 / ln 18.1 = 6.0%"
    consistency = out.split("violations of the chain rule")[1]
    signed = [found[f"ac_gpt-r0.6-s{s}"]["consistency"][""]["training"]["signed"] for s in (1337, 1338)]
    assert f"; {sum(signed) / 2:+.4f} +- {statistics.stdev(signed):.4f}" in cells(consistency, "ac_gpt")[0][2]
    assert "mlm, first 3" in consistency and "sigma_temporal_query  " in full
    assert "test: 8 sequences" in command("reproduce.py", "small.py", "--table", "--split=test")[1]


def test_the_table_over_r_max(work, command, expect_refusal):
    """What is there at several r_max has a line of its own; the other tables are of the r_max that is asked for."""
    folder = work / "results" / "small"
    result = json.loads((folder / "ac_gpt-r0.6-s1337.json").read_text())
    result["config"]["r_max"] = 0.2
    result["results"][0]["modes"]["infilling"]["perplexity"] = 12.5
    (folder / "ac_gpt-r0.2-s1337.json").write_text(json.dumps(result))
    code, out, err = command("reproduce.py", "small.py", "--table")
    assert code == 0 and err == "" and out.count("small.py, val") == 1 and "r_max 0.6" in out
    a, b = (
        results_in(work)[f"ac_gpt-r0.6-s{s}"]["results"][0]["modes"]["infilling"]["perplexity"] for s in (1337, 1338)
    )
    sweep = out.split("against r_max")[1]
    assert sweep.split()[:2] == ["0.2", "0.6"] and "gpt, uncond" not in sweep.replace("ac_gpt", "")
    text = f"{(a + b) / 2:.3f} +- {abs(a - b) / math.sqrt(2):.3f} (17.1)"
    assert cells(sweep, "ac_gpt, infilling")[0] == ["12.500 (17.2)", text]
    out = command("reproduce.py", "small.py", "--table", "--r_max=0.2")[1]
    assert out.count("small.py, val") == 1 and "r_max 0.2" in out and "12.500 (17.2)" in out.split("against")[0]
    expect_refusal(["r_max 0.3", "--r_max=0.2,0.6"], "reproduce.py", "small.py", "--table", "--r_max=0.3")


def test_resolved():
    """Means 1 and 2, variances 0.5 each, two seeds: the standard error of the difference is sqrt(0.5 / 2 * 2)."""
    a, b = [0.5, 1.5], [1.5, 2.5]
    assert not report.resolved(a, b) and report.resolved(a, [x + 0.42 for x in b])
    assert not report.resolved(a, [x + 0.41 for x in b]) and not report.resolved([1.0], [3.0, 3.0])
    assert not report.resolved([1.0, 1.0], [1.0, 1.0]) and not report.resolved(a, [math.inf, 1.0])
    assert report.mean_and_std([math.inf, 1.0], 3) == "inf"


def test_figures_of_the_paper():
    small, about = report.paper_figures("tiny")
    assert about == "Table B.1, small on WikiText-103"
    assert small[0.6, "ac_gpt", "training"] == 15.2 and small[1.0, "gpt", "unconditional"] == 17.9
    assert report.paper_figures("fineweb_base")[0][0.4, "gpt", "unconditional"] == 27.58
    counts = {model: len(report.paper_figures(model)[0]) for model in ("small", "base", "medium", "fineweb_base")}
    assert counts == {"small": 115, "base": 115, "medium": 115, "fineweb_base": 18}, "GPT has three modes of five"


def test_plot(work, command):
    code, out, _ = command("reproduce.py", "small.py", "--plot")
    files = ["results/small/figure2.png", "results/conditioning_sets.png", "results/modes.png"]
    assert code == 0 and out.splitlines() == files
    for file in files:
        assert (work / file).read_bytes()[:4] == b"\x89PNG" and (work / file).stat().st_size > 5000


def test_committed_results_are_whole(command, monkeypatch, tmp_path):
    """None of them is left out, and README shows what --table and --samples print of them."""
    monkeypatch.chdir(HERE)
    listed = subprocess.run(["git", "ls-files", "results/tiny/*.json"], capture_output=True, text=True).stdout.split()
    for file in listed or Path("results").glob("tiny/**/*.json"):  # without git: all that is there
        copy = tmp_path / Path(file).relative_to("results")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    for args in (["--table"], ["--samples=100"]):
        code, out, err = command("reproduce.py", "configs/tiny.py", *args, f"--results={tmp_path}")
        assert code == 0 and err == "" and out.strip() in Path("README.md").read_text()


@pytest.mark.parametrize(
    "args, words",
    [
        ([], ["name one config file"]),
        (["out/small-gpt-r0.6-s1337"], ["name one config file"]),
        (["small.py", "--methods=gtp"], ["'gtp'", "sigma_random_query"]),
        (["small.py", "--r_max=0.2;0.4"], ["0.2;0.4", "commas"]),
        (["small.py", "--r_max=1.5"], ["r_max = 1.5"]),
        (["small.py", "--seeds=0"], ["seeds = 0", "at least 1"]),
        (["small.py", "--method=gpt"], ["--method ", "--methods"]),
        (["small.py", "--table", "--max_iters=7"], ["no result of these settings"]),
        (["small.py", "--table", "--results=nowhere"], ["nowhere", "no result"]),
        (["small.py", "--methods=gpt", "--max_iters=7"], ["gpt-r0.6-s1337.json", "max_iters = 10, not 7"]),
        (["small.py", "--methods=gpt", "--max_iters=7", "--results=new"], ["out/small-gpt-r0.6-s1337", "max_iters = 10, not 7"]),
        (["small.py", "--floors", "--tokenizer=gpt2"], ["'gpt2'", "bytes"]),
        (["small.py", "--results=small.py"], ["small.py", "--results"]),
        (["with_out_dir.py"], ["out_dir", "--methods"]),
        (["small.py", "--methods=diffusion"], ["small-diffusion-r0.6-s1337", "no ckpt.pt", "delete"]),
    ],
)  # fmt: skip
def test_mistakes(work, expect_refusal, args, words):
    (work / "with_out_dir.py").write_text("out_dir = 'out/all'\n")
    (work / "out" / "small-diffusion-r0.6-s1337").mkdir()
    (work / "out" / "small-diffusion-r0.6-s1337" / "best.pt").write_bytes(b"")
    expect_refusal(words, "reproduce.py", *args)


def test_samples(work, command):
    code, _, err = command("reproduce.py", "small.py", "--samples=4", "--methods=mlm", "--seed=99")
    assert code == 2 and "left out: out/small-mlm-r0.6-s99" in err and "holds no such results" in err
    code, out, err = command("reproduce.py", "small.py", "--samples=4", "--methods=gpt,ac_gpt,diffusion")
    assert code == 0 and "left out: out/small-diffusion-r0.6-s1337" in err
    table = out[out.index("training distribution, n = 4") :].splitlines()
    assert len(table) == 7 and table[4].startswith("infilling, n = 4")
    assert [line.count("%") for line in table] == [0, 4, 8, 0, 0, 4, 8] and table[1].count(" -") == 2
    found = json.loads((work / "results" / "small" / "samples" / "ac_gpt-r0.6-s1337.json").read_text())
    assert len(found["scores"]) == 8 and found["scores"][0]["n"] == 4 and found["config"]["max_iters"] == 10
    share = f"{found['scores'][0]['restored']:.2%} +- {found['scores'][0]['stderr']:.2%}"
    assert re.split(r"\s{2,}", table[2])[1] == share
    share = next(s for s in found["scores"] if s["mode"] == "infilling_no_future" and s["temperature"] == 0)["restored"]
    assert table[6].split()[-3] == f"{share:.2%}"
    shutil.rmtree(work / "out")
    args = ["reproduce.py", "small.py", "--methods=gpt,ac_gpt"]
    assert command(*args, "--samples=4")[1].splitlines() == table
    folder = work / "results" / "small" / "samples"
    (folder / "broken.json").write_text("{")
    foreign = {**found, "config": {**found["config"], "max_iters": 9}}
    (folder / "gpt-r0.6-s1.json").write_text(json.dumps(foreign))
    code, out, err = command(*args, "--samples=4")
    assert code == 0 and out.splitlines() == table and "broken.json" in err and "max_iters = 9" in err
    code, out, err = command(*args, "--samples=5")
    assert code == 2 and "4 samples, not 5" in err
    assert "left out" not in command("reproduce.py", "small.py", "--table")[2]


def test_not_by_torchrun(work, expect_refusal, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    expect_refusal(["--list", "torchrun"], "reproduce.py", "small.py")


# ---------------------------------------------------------------- floors


def test_ngram_by_brute_force():
    rng = np.random.default_rng(0)
    train_set, test_set, bos, vocab = rng.integers(0, 3, (20, 6)), rng.integers(0, 3, (4, 6)), 3, 4

    def p(token, past, text):
        """Witten-Bell, by counting in the padded text."""
        if past is None:
            return 1 / vocab
        n = len(past)
        followers = [row[i] for row in text for i in range(2, len(row)) if tuple(row[i - n : i]) == past]
        lower = p(token, past[1:] if n else None, text)
        if not followers:
            return lower
        kinds = len(set(followers))
        return (followers.count(token) + kinds * lower) / (len(followers) + kinds)

    padded = [[bos, bos, *row] for row in train_set.tolist()]
    found = reproduce.ngram_nll(train_set, test_set, 3, vocab, bos)
    for row, nll in zip(test_set.tolist(), found):
        row = [bos, bos, *row]
        for i, value in enumerate(nll, 2):
            assert math.isclose(value, -math.log(p(row[i], tuple(row[i - 2 : i]), padded)), rel_tol=1e-12)
    assert math.isclose(sum(p(x, (0, 1), padded) for x in range(vocab)), 1)


def test_floors(work, command):
    code, out, _ = command("reproduce.py", "small.py", "--floors")
    saved = json.loads((work / "results" / "small" / "floors.json").read_text())
    bits = saved["bits_per_byte"]
    assert code == 0 and all(f"{name} {value:.3f}" in out for name, value in bits.items())
    assert 0 < bits["5-gram model"] < 8 and bits["xz -9e of them behind the training text"] < 8
    assert "5-gram model" in command("reproduce.py", "small.py", "--table")[1], "it is no foreign result"


# ---------------------------------------------------------------- consistency


@pytest.mark.parametrize("method", ["ac_gpt", "sigma_temporal", "mlm", "gpt"])
@pytest.mark.parametrize("where", [0.0, 0.99])
def test_violations_by_summing_out(monkeypatch, method, where):
    """log p(A | C) + log p(B | A, C) - log p(A, B | C), where p(A | C) is the sum of p(A, B | C) over all B."""
    from baselines import METHODS

    model, (tokens, cond) = weighty(METHODS[method]), random_queries(10)
    cond = cond & (cond.sum(1, keepdim=True) < T - 1)  # at least two unknown tokens
    monkeypatch.setattr(evaluate, "uniform_int", lambda bound, shape, generator: (bound * where).long())
    config = Config(batch_size=3, device="cpu", dtype="float32")
    found = evaluate.chain_rule_violations(model, config, EvaluationSet(tokens, {"training": cond}))[""]
    assert set(found) == ({"unconditional"} if method == "gpt" else {"unconditional", "training"})
    for name, (violations, counts) in found.items():
        c = cond if name == "training" else cond & False
        for x, known, violation, count in zip(tokens, c, violations, counts):
            unknown = (~known).nonzero()[:, 0]
            n = 1 if where == 0 else len(unknown) - 1
            B = unknown[n:]
            A_known = known.clone()
            A_known[unknown[:n]] = True
            every = torch.cartesian_prod(*[torch.arange(V)] * len(B)).view(-1, len(B))
            texts = x.repeat(len(every), 1)
            texts[:, B] = every
            with torch.no_grad():
                joint = -model.exact_nll(texts, known.expand(len(every), T)).sum(1)
                last = -model.exact_nll(x[None], A_known[None]).sum()
                whole = -model.exact_nll(x[None], known[None]).sum()
            expected = joint.logsumexp(0) + last - whole
            assert count == len(B) and math.isclose(violation, expected, abs_tol=1e-5)
    if method in ("gpt", "mlm"):
        assert all(v.abs().max() < 1e-5 for v, _ in found.values()), "one joint by construction"
    else:
        assert found["training"][0].abs().max() > 0.01


def test_violations_of_sigma_random():
    """The parts in both orders, and the shuffle of B is the same with A before it and with A in x_c."""
    from baselines import SigmaRandom

    model, (tokens, cond) = weighty(SigmaRandom), random_queries(10)
    config = Config(batch_size=10, device="cpu", dtype="float32")
    cond = cond & (cond.sum(1, keepdim=True) < T - 1)
    found = evaluate.chain_rule_violations(model, config, EvaluationSet(tokens, {"training": cond}))
    assert set(found) == {"left to right", "random order", "random order, swapped"}
    for reading, modes in found.items():
        assert modes["unconditional"][0].abs().max() < 1e-5, f"{reading}: the same sequence, but for where x_c ends"
        assert modes["training"][0].abs().max() > 0.1
    (_, right), (_, left) = (found[f"random order{x}"]["training"] for x in ("", ", swapped"))
    assert torch.equal(left + right, (~cond).sum(1)), "the parts make up x_e"


def test_consistency_of_a_run(trained, small, tmp_path, command, expect_refusal):
    code, out, _ = command("evaluate.py", trained, "--consistency")
    config, state = checkpoint.find_run(trained, {})
    found = evaluate.consistency(config, state, evaluate.evaluation_set(config, "val"))[""]
    assert code == 0 and set(found) == {"unconditional", "infilling", "training"}
    for v in found.values():
        assert 0 <= abs(v["signed"]) <= v["absolute"] and f"{v['signed']:+.4f} +- {v['stderr']:.4f}" in out
    train.main([*small, "--method=diffusion", f"--out_dir={tmp_path / 'd'}", "--max_iters=2"])
    expect_refusal(["only a bound", tmp_path / "d"], "evaluate.py", tmp_path / "d", "--consistency")


def test_the_first_questions_are_cut_alike():
    """MLM answers the first few only; its parts A and B are those of the other methods."""
    from baselines import METHODS

    (tokens, cond), config = random_queries(10), Config(batch_size=10, device="cpu", dtype="float32")
    cond = cond & (cond.sum(1, keepdim=True) < T - 1)
    counts = []
    for n in (4, 10):
        questions = EvaluationSet(tokens[:n], {"infilling": cond[:n].flip(1), "training": cond[:n]})
        found = evaluate.chain_rule_violations(weighty(METHODS["ac_gpt"]), config, questions)[""]
        counts.append({name: count[:4].tolist() for name, (_, count) in found.items()})
    assert counts[0] == counts[1]


def test_default_folders_differ():
    def folder(method, positions):
        return load_config([], {"method": method, "sigma_positions": positions}).out_dir

    assert folder("sigma_random", "dual") != folder("sigma_random", "query") and folder("gpt", "dual") == folder(
        "gpt", "query"
    )
