"""evaluate.py and sample.py, and everything together as a newcomer would run it, from another working directory."""

import ast
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bench
import checkpoint
import evaluate
import sample
from checkpoint import open_run
from conditioning import MODES
from config import Config, resolve_machine
from conftest import HERE, TEXT
from model import ac_mask
from prepare_data import Bytes

# ---------------------------------------------------------------- evaluate.py


def modes_of(folder, split="val", r="0.6"):
    return json.loads((folder / f"eval_{split}_r{r}.json").read_text())


def test_five_modes(trained, command):
    code, out, _ = command("evaluate.py", trained)
    result = modes_of(trained)
    assert code == 0 and set(result["modes"]) == set(MODES)
    assert result["iter"] == 10 and result["config"]["n_layer"] == 2 and len(result["evaluation_set"]) == 16
    tokens = {mode: value["tokens"] for mode, value in result["modes"].items()}
    assert tokens["unconditional"] == 8 * 32 and tokens["training"] == tokens["training_no_future"] < 8 * 32
    for value in result["modes"].values():
        assert value["sequences"] == 8 and f"{value['perplexity']:.3f} +- {value['stderr']:.3f}" in out
        assert f"({math.log2(value['perplexity']):.3f})" in out, "bits per byte"


def test_perplexity_by_hand(trained):
    """From single tokens, one sequence at a time: no mean of means anywhere."""
    model, config, _ = open_run(trained, {})
    questions = evaluate.evaluation_set(config, "val")
    (result,) = evaluate.evaluate(config, checkpoint.load(trained / "best.pt"), questions, "val")
    modes = result["modes"]
    for name, mode in MODES.items():
        total = count = 0
        for i in range(8):
            x, empty = questions.tokens[i : i + 1], torch.zeros(1, 32, dtype=torch.bool)
            known = questions.cond[mode.law][i : i + 1] if mode.law else empty
            with torch.no_grad():
                total += model.exact_nll(x, known if mode.future else empty)[~known].sum().item()
            count += (~known).sum().item()
        assert (
            math.isclose(modes[name]["perplexity"], math.exp(total / count), rel_tol=1e-5)
            and modes[name]["tokens"] == count
        )
    difference = math.log2(modes["training_no_future"]["perplexity"] / modes["training"]["perplexity"])
    assert math.isclose(evaluate.gain_bits(result, "training", 8)[0], difference, abs_tol=1e-9)
    first = [(modes["training"]["nll"][i], modes["training"]["scored"][i]) for i in range(3)]
    some = evaluate.statistics(*evaluate.first(result, "training", 3))
    assert some["tokens"] == sum(n for _, n in first) and some["sequences"] == 3
    assert math.isclose(some["perplexity"], math.exp(sum(x for x, _ in first) / some["tokens"]))


ALL, SEEN = set(MODES), {"unconditional", "infilling", "training"}


@pytest.mark.parametrize(
    "method, files",
    [
        ("gpt", {"": {"unconditional", "infilling_no_future", "training_no_future"}}),
        ("sigma_temporal", {"": ALL}),
        ("sigma_random", {"_left_to_right": ALL, "_random_order": SEEN}),
        ("mlm", {"": ALL}),
        ("diffusion", {"_bound": SEEN}),
    ],
)
def test_every_method(small, tmp_path, trained, command, expect_refusal, method, files):
    """Training, resuming, the five modes at two batch sizes, all kinds of samples."""
    folder = tmp_path / method
    args = [*small, f"--method={method}", f"--out_dir={folder}", "--eval_interval=2"]
    assert command("train.py", *args, "--max_iters=2")[0] == 0
    assert command("train.py", *args, "--max_iters=4", "--resume")[0] == 0
    found = []
    for batch in (1, 8):
        code, out, err = command("evaluate.py", folder, trained, f"--batch_size={batch}", "--mlm_sequences=3")
        assert code == 0 and ("<= " in out) == (method == "diffusion"), err
        assert ("on the first 3 sequences" in out) == (method == "mlm") and out.count("unconditional") == 1 + (
            method == "mlm"
        )
        found.append({name: json.loads((folder / f"eval_val_r0.6{name}.json").read_text()) for name in files})
    assert len(list(folder.glob("eval_*.json"))) == len(files)
    for name, modes in files.items():
        a, b = (result[name]["modes"] for result in found)
        assert set(a) == modes
        for mode in modes:
            assert math.isclose(a[mode]["perplexity"], b[mode]["perplexity"], rel_tol=1e-5), mode
            counts = (
                modes_of(trained)["modes"][mode]["scored"][:3]
                if method == "mlm"
                else modes_of(trained)["modes"][mode]["scored"]
            )
            assert a[mode]["scored"] == counts, "every method is scored on the same tokens"
    if method == "mlm":
        assert "on the first 3 sequences" in command("evaluate.py", folder, "--mlm_sequences=3")[1], "alone, too"
    if method == "diffusion":
        expect_refusal(["only a bound"], "evaluate.py", folder, "--text", "a [[b]] c")
        expect_refusal(["no exact likelihood"], "test_masks.py", f"--run={folder}")
    if method == "sigma_random":
        assert "left to right" in command("evaluate.py", folder, "--text", "a [[b]] c")[1]
    code, out, _ = command("sample.py", folder)
    assert code == 0 and out.count("---") == len(files.get("", ALL if method == "sigma_random" else SEEN))
    code, out, _ = command("sample.py", folder, "--text", "The ____4 sheep ____2", "--n=2")
    assert code == 0 and out.count("[[") == 4
    code, out, err = command("sample.py", folder, "--text", "The ____ sheep", "--lengths=2-3")
    assert code == 2 and "lengths" in err if method == "diffusion" else out.count("[[") == 1
    code, out, _ = command("sample.py", folder, "--protocol=paper", "--n=3", "--batch_size=2")
    for name in files.get("", ALL if method == "sigma_random" else SEEN):
        lines = (folder / f"samples_{name}.jsonl").read_text().splitlines()
        assert code == 0 and [json.loads(line)["i"] for line in lines] == [0, 1, 2]
    assert len(out.splitlines()) == len(list(folder.glob("samples_*.jsonl")))
    code, out, _ = command("sample.py", folder, "--prompt", "The ", "--max_new_tokens=5")
    assert code == 0 and out.startswith("The [[")


def test_same_figures_at_any_batch_size(trained, command):
    results = []
    for batch in (1, 8):
        assert command("evaluate.py", trained, f"--batch_size={batch}")[0] == 0
        results.append(modes_of(trained))
    assert results[0]["evaluation_set"] == results[1]["evaluation_set"]
    for mode, value in results[0]["modes"].items():
        assert math.isclose(value["perplexity"], results[1]["modes"][mode]["perplexity"], rel_tol=1e-5)


def test_standard_error_against_the_bootstrap():
    g = torch.Generator().manual_seed(0)
    scored = torch.rand(300, 20, generator=g) < torch.rand(300, 1, generator=g)
    nll = (torch.rand(300, 20, generator=g) + torch.rand(300, 1, generator=g)).double()  # sequences differ
    sums, counts = (nll * scored).sum(1), scored.sum(1)
    found = evaluate.statistics(sums, counts)
    again = []
    for _ in range(2000):
        chosen = torch.randint(300, (300,), generator=g)
        again.append(((nll * scored)[chosen].sum() / scored[chosen].sum()).exp().item())
    assert math.isclose(found["stderr"], torch.tensor(again).std().item(), rel_tol=0.1)
    assert math.isnan(evaluate.statistics(sums[:1], counts[:1])["stderr"]), "one sequence tells nothing of the spread"
    assert evaluate.statistics(sums * 1e6, counts)["perplexity"] == math.inf


def test_side_by_side(trained, small, tmp_path, command, expect_refusal):
    import train

    gpt = tmp_path / "gpt"
    train.main([*small, "--method=gpt", f"--out_dir={gpt}", "--max_iters=2"])
    code, out, _ = command("evaluate.py", trained, gpt)
    assert code == 0 and "trained" in out and "gpt" in out
    row = next(line for line in out.splitlines() if line.startswith("training distribution"))
    assert row.rstrip().endswith("-"), "GPT has no value where the future is needed"
    assert set(modes_of(gpt)["modes"]) == {"unconditional", "infilling_no_future", "training_no_future"}
    assert "saved by the future" in out and "saved by the future" not in command("evaluate.py", gpt)[1]
    r1 = tmp_path / "r1"
    train.main([*small, "--r_max=1", f"--out_dir={r1}", "--max_iters=2"])
    expect_refusal(["different questions", "--r_max"], "evaluate.py", trained, r1)
    assert command("evaluate.py", trained, r1, "--r_max=0.6")[0] == 0
    expect_refusal(["gpt knows the past alone"], "evaluate.py", gpt, "--text", "a [[b]] c")
    assert command("evaluate.py", gpt, "--text", "a [[b]]")[0] == 0


def test_score_of_a_text(trained, command):
    code, out, _ = command("evaluate.py", trained, "--text", "The 3th [[sheep]] jumps")
    *rows, total = out.strip().splitlines()
    assert code == 0 and [row.split("'")[1] for row in rows] == list("sheep")
    assert math.isclose(sum(float(row.split()[0]) for row in rows), float(total.split()[0]), abs_tol=1e-3)


def test_questions_are_kept(trained, data_dir, expect_refusal):
    _, config, _ = open_run(trained, {})
    for file in (data_dir / "mini-bytes").glob("eval_test_*.npz"):
        file.unlink()
    first = evaluate.evaluation_set(config, "test")
    files = list((data_dir / "mini-bytes").glob("eval_test_*.npz"))
    assert len(files) == 1 and evaluate.evaluation_set(config, "test").hash == first.hash
    files[0].write_bytes(files[0].read_bytes()[:100])
    expect_refusal([files[0].name, "delete"], "evaluate.py", trained, "--split=test")
    files[0].unlink()
    assert evaluate.evaluation_set(config, "test").hash == first.hash


# ---------------------------------------------------------------- sample.py


def test_continue_and_modes(trained, command):
    code, out, _ = command("sample.py", trained, "--prompt", "The 7th", "--max_new_tokens=9", "--temperature=0")
    assert code == 0 and out.startswith("The 7th[[") and out.rstrip().endswith("]]")
    code, out, _ = command("sample.py", trained)
    assert code == 0 and [line[4:] for line in out.splitlines() if line.startswith("--- ")] == [
        "unconditional", "infilling", "training", "infilling no future", "training no future"
    ]  # fmt: skip


def test_what_is_known_and_what_is_forced(trained, command, monkeypatch):
    """Prompts and the no-future modes keep tokens in the body and leave x_c empty; the others put them into x_c."""
    asked = []

    def generate(model, config, options, tokens, cond, forced=None, seed=None):
        asked.append((int(cond[0].sum()), int((cond if forced is None else forced)[0].sum())))
        return tokens

    monkeypatch.setattr(sample, "generate", generate)
    command("sample.py", trained, "--prompt", "abc", "--max_new_tokens=5")
    command("sample.py", trained, "--text", "ab____3c")
    command("sample.py", trained)
    assert asked[:3] == [(0, 3), (3, 3), (0, 20)]
    (n, known), (m, scattered), blind, blind_scattered = asked[3:]
    assert n == known and m == scattered and blind == (0, known) and blind_scattered == (0, scattered)


def test_nucleus_and_temperature():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(20_000, 4)

    def shares(**keys):
        setting = {"temperature": 1.0, "top_p": 1.0, "seed": 0, **keys}
        return torch.bincount(sample.sampler("cpu", **setting)(logits), minlength=4) / 20_000

    assert torch.allclose(shares(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.02)
    assert torch.allclose(shares(top_p=0.6), torch.tensor([0.625, 0.375, 0, 0]), atol=0.02), (
        "the token that crosses p stays"
    )
    assert torch.allclose(shares(top_p=0.0), torch.tensor([1.0, 0, 0, 0]))
    assert torch.allclose(shares(temperature=0.5), torch.tensor([0.25, 0.09, 0.0225, 0.0025]) / 0.365, atol=0.02)
    assert shares(temperature=0.0)[0] == 1


def test_spaces_around_a_mark(offline_gpt2):
    from prepare_data import GPT2

    for tokenizer, expected in ((Bytes(), ["of the ", "Union", " is"]), (GPT2(), ["of the", " Union", " is"])):
        ids, known = evaluate.encode_marked(tokenizer, "of the [[Union]] is", r"\[\[(.+?)\]\]")
        runs = itertools.groupby(zip(ids, known), lambda pair: pair[1])
        assert [tokenizer.decode([i for i, _ in pairs]) for _, pairs in runs] == expected


@pytest.mark.parametrize(
    "args, words",
    [
        (["--temperature=1e999", "--text", "____3"], ["temperature"]),
        (["--prompt", "x" * 40], ["block_size = 32"]),
        (["--prompt", "abc", "--max_new_tokens=30"], ["33 tokens", "block_size = 32"]),
        (["--text", "a\udc80 ____3"], ["remove it"]),
        (["--text"], ["needs a value"]),
        (["--text", "____3", "--prompt", "a"], ["--text and --prompt", "give one of them"]),
        (["--top_p=2", "--text", "____3"], ["top_p = 2"]),
        (["--n_layer=5", "--text", "____3"], ["n_layer = 5", "n_layer = 2"]),
        (["--checkpoint=no.pt"], ["no.pt is not there", "--checkpoint=best.pt"]),
        (["--out_dir=out/other"], ["out/other", "leave one"]),
    ],
)
def test_mistakes_in_sampling(trained, expect_refusal, args, words):
    expect_refusal(words, "sample.py", trained, *args)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--text", "[[]] x [[a]]"], ["do not pair"]),
        (["--text", "[[a]] b]]"], ["do not pair"]),
        (["--text", "nothing marked"], ["nothing marked", "[[ ]]"]),
        (["--text", "x" * 30 + "[[abc]]"], ["33 tokens", "block_size = 32"]),
        (["--split=dev"], ["'dev'", "val"]),
        (["--tokenizer=gpt2"], ["tokenizer = 'gpt2'", "'bytes'"]),
    ],
)
def test_mistakes_in_evaluating(trained, expect_refusal, args, words):
    expect_refusal(words, "evaluate.py", trained, *args)


def test_nothing_to_evaluate(expect_refusal, trained, tmp_path):
    expect_refusal(["'typo'", "training, infilling"], "evaluate.py", trained, "--law=typo")
    expect_refusal(["config file or run folders"], "evaluate.py")
    expect_refusal(["is not there", "train"], "evaluate.py", tmp_path / "nowhere")
    expect_refusal(["is not there", "train"], "evaluate.py", HERE / "configs" / "tiny.py", f"--out_dir={tmp_path}")


# ---------------------------------------------------------------- bench.py

TINY_BENCH = ["--tokenizer=bytes", "--block_size=32", "--n_layer=2", "--n_head=2", "--n_embd=32", "--batch_size=4"]


@pytest.mark.parametrize("part", ["train", "nll", "sample"])
def test_bench(command, part):
    code, out, err = command("bench.py", *TINY_BENCH, "--rounds=1", f"--what={part}")
    assert code == 0 and len(out.splitlines()) > 4, (out, err)


def test_bench_measures_our_own_models(expect_refusal):
    expect_refusal(["models/smollm2", "only our own models"], "bench.py", HERE / "configs/finetune_smollm2.py")
    expect_refusal(["hf:x", "only our own models"], "bench.py", *TINY_BENCH, "--tokenizer=hf:x")


def test_bench_counts_what_is_done():
    """FLOPs: the pairs of the mask itself, and the matrix products as PyTorch counts them."""
    config = Config(n_layer=2, n_head=2, n_embd=16, block_size=8, tokenizer="bytes", dropout=0.0, batch_size=4)
    (tokens, *_), (cond, *_) = bench.random_step(config, 257)
    known, vocab = cond.sum(1).tolist(), 320  # 257, filled up
    model = checkpoint.build(resolve_machine(replace(config, device="cpu")), 257, 256)
    with FlopCounterMode(display=False) as counter:
        loss, _ = model(tokens, cond)
        loss.backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    slots, _, present = model.arrange(tokens, cond)
    allowed = ac_mask(present, slots.size(1) - 8)[present]
    pairs = int(allowed.sum())
    expected = products + 3 * config.n_layer * 4 * 16 * pairs
    assert bench.flops(config, vocab, known, [8 - n for n in known]) == expected


def test_bench_memory():
    """At least weights, gradients and both moments of AdamW."""
    config = resolve_machine(Config(n_layer=2, n_head=2, n_embd=512, block_size=64, device="cpu", batch_size=4))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        found = child.submit(bench.peak_bytes, config, 257, 0.6).result()
    weights = 4 * (320 * 512 + 2 * 12 * 512**2)
    assert 4 * weights < found < 12 * weights, (weights, found)


# ---------------------------------------------------------------- the whole


def test_from_text_to_filled_blank(tmp_path):
    """All scripts as processes of their own, with a config file, from a folder that is not the repository's."""
    (tmp_path / "book.txt").write_text(TEXT)
    (tmp_path / "mine.py").write_text(
        "dataset = 'mine'\nblock_size = 32\nn_layer = 1\nn_head = 2\nn_embd = 32\nbatch_size = 4\n"
        "gradient_accumulation_steps = 1\nmax_iters = 6\neval_interval = 3\neval_sequences = 8\nlog_interval = 2\n"
    )

    def run(script, *args):
        done = subprocess.run([sys.executable, HERE / script, *args], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "train" in run("prepare_data.py", "mine", "--input=book.txt")
    out = run("train.py", "mine.py")
    assert "step 6/6" in out and "n_embd=32" in out
    assert "unconditional" in run("evaluate.py", "mine.py")
    assert "  The [[" in run("sample.py", "mine.py", "--text", "The ____4 sheep")
    assert sorted(os.listdir(tmp_path / "out" / "mine-ac_gpt-r0.6-s1337")) == [
        "best.pt", "ckpt.pt", "eval_val_r0.6.json", "log.csv", "loss.png"
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["book.txt", "data", "mine.py", "out"]


LAYERS = (
    ("tasks",), ("config", "conditioning", "prepare_data", "fast", "sharding"), ("model",), ("baselines", "llm"), ("coral",), ("checkpoint",),
    ("evaluate",), ("infill", "report"), ("train", "sample"), ("finetune", "coral_runs", "generation"), ("reproduce", "bench", "bridge"),
)  # fmt: skip
# What a command alone needs, imported where it is called.
UPWARD = {("config", "prepare_data"), ("generation", "evaluate"), ("coral_runs", "coral")}


def test_imports_go_down():
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    assert {path.stem for path in HERE.glob("*.py") if not path.stem.startswith(("test_", "conftest"))} == set(level)
    for name in level:
        tree = ast.parse((HERE / f"{name}.py").read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for other in names:
                if other in level:
                    assert level[other] < level[name] or (other, name) in UPWARD, f"{name} imports {other}"


def test_model_needs_torch_alone():
    code = "import sys, torch; before = set(sys.modules); import model; print(*(set(sys.modules) - before))"
    new = subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True, capture_output=True, text=True).stdout
    known = {"model", "conditioning", "fast", "torch"} | sys.stdlib_module_names
    assert {name.split(".")[0] for name in new.split()} <= known, new


def test_readme_names_what_exists():
    text = (HERE / "README.md").read_text()
    for name in set(re.findall(r"\b[\w/]+\.(?:py|png)\b", text)) - {"my.py", "loss.png"}:
        assert (HERE / name).exists(), f"README names {name}"
