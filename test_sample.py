"""Marked text and the paper's protocol: what is drawn follows p(x_e | x_c), what is ranked is ranked by p(text), files go on."""

import io
import json
import math
import re
from itertools import product

import pytest
import torch

import evaluate
import infill
import sample
import train
from baselines import METHODS
from checkpoint import open_run
from config import UserError
from conftest import HERE, SMALL
from prepare_data import GPT2, Bytes, main
from test_baselines import weighty
from test_masks import T, V

# ---------------------------------------------------------------- draws


def law_of(model, tokens, cond, known):
    """{text: probability} of all texts that agree with `tokens` where `known`: p(x_e | x_c), by enumeration."""
    unknown = (~known).nonzero()[:, 0]
    texts = tokens.repeat(V ** len(unknown), 1)
    texts[:, unknown] = torch.tensor(list(product(range(V), repeat=len(unknown))))
    with torch.no_grad():
        nll = model.exact_nll(texts, cond.expand_as(texts), (~known).expand_as(texts)).sum(1)
    return {tuple(text): p for text, p in zip(texts.tolist(), nll.neg().exp().tolist())}


def chi_square(rows, law):
    """Sum of (found - expected)^2 / expected over the texts, less its mean, in its standard deviations."""
    n, counts = len(rows), {}
    for row in rows.tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert set(counts) <= set(law)
    cells = [(counts.get(text, 0), n * p) for text, p in law.items() if n * p > 5]
    rest = n - sum(c for c, _ in cells), n - sum(e for _, e in cells)
    cells += [rest] * (rest[1] > 5)
    freedom = len(cells) - 1
    return (sum((c - e) ** 2 / e for c, e in cells) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("method", ["gpt", "ac_gpt", "sigma_temporal", "sigma_random", "mlm"])
def test_frequencies_of_fillings(method):
    model, tokens = weighty(METHODS[method]), torch.tensor([0, 2, 1, 3, 1])
    known = torch.tensor([c == "#" for c in ("##..." if method == "gpt" else ".#.#.")])
    n, pick = 20_000, sample.sampler("cpu", 1.0, 1.0, 5)
    rows = model.generate(tokens.expand(n, T), known.expand(n, T), pick)
    assert (rows[:, known] == tokens[known]).all()
    assert abs(chi_square(rows, law_of(model, tokens, known, known))) < 4
    other = tokens.clone()
    other[1] = 0
    wrong = law_of(model, other, known, known)
    wrong = {(*t[:1], 2, *t[2:]): p for t, p in wrong.items()}
    assert chi_square(rows, wrong) > 20, "another condition has another law"


@pytest.mark.parametrize("method", ["gpt", "ac_gpt", "sigma_temporal"])
def test_frequencies_of_what_is_forced(method):
    """The no-future modes: each token given those before it alone, the forced ones among them."""
    model, tokens = weighty(METHODS[method]), torch.tensor([0, 2, 1, 3, 1])
    known = torch.tensor([c == "#" for c in ".#.#."])
    n, nothing = 20_000, torch.zeros_like(known)
    rows = model.generate(
        tokens.expand(n, T), nothing.expand(n, T), sample.sampler("cpu", 1.0, 1.0, 5), None, known.expand(n, T)
    )
    assert abs(chi_square(rows, law_of(model, tokens, nothing, known))) < 4


# ---------------------------------------------------------------- marked text


@pytest.fixture(scope="session")
def alphabet(tmp_path_factory):
    """A run that has learnt the first ten letters, in turn."""
    folder = tmp_path_factory.mktemp("alphabet")
    (folder / "letters.txt").write_text("abcdefghij" * 4000)
    main(["letters", f"--input={folder / 'letters.txt'}", f"--data_dir={folder}"])
    keys = [x for x in SMALL if not x.startswith(("--dataset", "--max_iters", "--eval_interval", "--log_interval"))]
    more = ["--dataset=letters", f"--data_dir={folder}", f"--out_dir={folder / 'run'}", "--max_iters=250"]
    train.main([*keys, *more, "--eval_interval=250", "--log_interval=250"])
    return folder / "run"


def lines_of(command, run, *args):
    code, out, err = command("sample.py", run, *args, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_a_free_length_is_found(alphabet, command):
    """Between d and i only four letters fit; all candidates are ranked by p(text)."""
    found = lines_of(command, alphabet, "--text", "abcd____ijabc", "--lengths=1-7", "--n=5")
    assert found[0]["fillings"] == ["efgh"] and found[0]["text"] == "abcdefghijabc"
    assert [c["log_p"] for c in found] == sorted((c["log_p"] for c in found), reverse=True)
    assert found[0]["log_p"] - found[1]["log_p"] > 2 and len({c["text"] for c in found}) == 5


def test_several_free_lengths(alphabet, command):
    """Settled one after another."""
    found = lines_of(command, alphabet, "--text", "abcd____hijab____fg____ja", "--lengths=2-4")
    assert found[0]["fillings"] == ["efg", "cde", "hi"]


def test_fixed_blanks_and_words(alphabet, command):
    found = lines_of(command, alphabet, "--text", "ab____3fgh[[xyz]]bc", "--n=2")
    assert found[0]["fillings"] == ["cde", "ija"]
    (best,) = lines_of(command, alphabet, "--text", "abcd[[efj]]hij")
    assert best["fillings"] == ["efg"]
    found = lines_of(command, alphabet, "--text", "abcd[[efg]]hij", "--n=8", "--temperature=3")
    assert found and all(c["fillings"] != ["efg"] for c in found), "as it was is no answer"


def test_scores_are_those_of_the_text(alphabet, command):
    model = open_run(alphabet, {})[0]
    found = [c for c in lines_of(command, alphabet, "--text", "abcd____2ghi", "--n=8") if c["text"].isascii()]
    assert found
    for c in found:
        tokens = torch.tensor([Bytes().encode_batch([c["text"]])[0].tolist()])
        with torch.no_grad():
            log_p = -model.exact_nll(tokens, torch.zeros_like(tokens, dtype=torch.bool)).sum().item()
        assert math.isclose(log_p, c["log_p"], abs_tol=1e-3)


def test_given_candidates(alphabet, command):
    words = ["efg", "e", "efghi", "jjj"]
    found = lines_of(command, alphabet, "--text", "abcd____hij", f"--candidates={'|'.join(words)}")
    model, _, _ = open_run(alphabet, {})
    log_p = []
    for word in words:
        tokens = torch.tensor([Bytes().encode_batch([f"abcd{word}hij"])[0].tolist()])
        with torch.no_grad():
            log_p.append(-model.exact_nll(tokens, torch.zeros_like(tokens, dtype=torch.bool)).sum().item())
    p = dict(zip(words, torch.tensor(log_p, dtype=torch.float64).softmax(0).tolist()))
    assert [c["fillings"][0] for c in found] == sorted(words, key=p.get, reverse=True) and found[0]["fillings"] == [
        "efg"
    ]
    for c in found:
        assert math.isclose(c["p"], p[c["fillings"][0]], abs_tol=1e-4)
    out = command("sample.py", alphabet, "--text", "abcd[[b]]hij", f"--candidates={'|'.join(words)}")[1]
    assert out.splitlines()[0].split() == [f"{found[0]['log_p']:.2f}", f"{found[0]['p']:.2%}", "abcd[[efg]]hij"]


def test_long_texts_have_a_window(alphabet, command, tmp_path, monkeypatch):
    text = "abcdefghij" * 20 + "abc____ghi" + "jabcdefghi" * 20
    (tmp_path / "long.txt").write_text(text)
    code, out, err = command("sample.py", alphabet, f"--file={tmp_path / 'long.txt'}", "--lengths=2-4")
    assert code == 0 and out.rstrip("\n").endswith(text.replace("____", "[[def]]")) and "block_size = 32" in err
    assert "189 tokens at its start" in err, "3 + 200 before a blank of up to 4: (410 - 32) / 2"
    monkeypatch.setattr("sys.stdin", io.StringIO(text[190:]))
    assert "abc[[def]]ghi" in command("sample.py", alphabet, "--file=-", "--lengths=3")[1]


def test_fillings_belong_to_marks(alphabet, command):
    """Neighbours, too: no known token stands between them. And long underscores are one blank."""
    found = lines_of(command, alphabet, "--text", "abc____2____3ij", "--n=20", "--tries=3", "--temperature=2")
    assert all([len(x) for x in c["fillings"]] == [2, 3] for c in found if c["text"].isascii()) and len(found) > 8
    assert lines_of(command, alphabet, "--text", "abc____2____3ij")[0]["fillings"] == ["de", "fgh"]
    assert lines_of(command, alphabet, "--text", "abcd________ijab", "--lengths=3-5")[0]["fillings"] == ["efgh"]


def test_words_as_they_were(alphabet, expect_refusal, command):
    expect_refusal(
        ["as they were", "--temperature"], "sample.py", alphabet, "--text", "abcd[[efg]]hij", "--temperature=0"
    )
    assert "the shortest filling wins" in command("sample.py", alphabet, "--text", "abcd____", "--lengths=1-3")[2]


def test_marks_and_spaces(offline_gpt2):
    """GPT-2's tokens carry their space: it goes with the blank, and a text that is cut before a blank does not end in one."""
    tokenizer = GPT2()
    text = "The ____ of the [[United States]] is ____2 strong"
    marked = infill.Marked(tokenizer, text, 64)
    ids, known, sizes = marked.encode([1, "United States", 2])
    assert sizes == [1, 2, 2] and known.count(False) == 5
    assert tokenizer.decode([i for i, k in zip(ids, known) if k]) == "The of the is strong"
    cut, _, _ = marked.encode([1], marked.marks[1].start())
    assert cut == ids[: len(cut)] and tokenizer.decode(cut[2:]) == " of the"


def test_sigma_random_ranks_in_its_own_order(small, tmp_path, command):
    folder = tmp_path / "sigma"
    train.main([*small, "--method=sigma_random", f"--out_dir={folder}", "--max_iters=2"])
    _, out, _ = command("sample.py", folder, "--text", "The [[s]]heep", "--candidates=s|t", "--json")
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    model, config, _ = open_run(folder, {})
    tokens = torch.tensor([list(found["text"].encode())])
    with torch.no_grad():
        nll = [model.exact_nll(tokens, tokens < 0, None, g).sum().item() for g in evaluate.seeded(config, 4)]
    assert math.isclose(found["log_p"], -sum(nll) / 4, abs_tol=1e-3)


def test_what_diffusion_draws_is_not_sorted(small, tmp_path, command):
    folder = tmp_path / "diffusion"
    train.main([*small, "--method=diffusion", f"--out_dir={folder}", "--max_iters=2"])
    args = ["sample.py", folder, "--text", "The ____2 sheep", "--json", "--temperature=3", "--top_p=1"]
    _, out, err = command(*args, "--n=12")
    drawn = [json.loads(line)["text"] for line in out.splitlines() if line.startswith("{")]
    assert len(drawn) == 12 and drawn != sorted(drawn) and "not ranked" in err


def test_window():
    """T tokens, the unknown ones in their middle where the text is long enough on both sides."""
    known = [True] * 100
    known[50:54] = [False] * 4
    assert infill.window(known, 10) == (47, 43) and infill.window(known, 4) == (50, 46)
    assert infill.window(known[45:], 20) == (0, 35) and infill.window(known[:56], 20) == (36, 0)
    assert infill.window(known, 100) == infill.window(known, 200) == (0, 0)
    with pytest.raises(UserError, match="4 tokens"):
        infill.window(known, 3)


def test_what_knows_no_future_is_ranked_by_it(small, tmp_path, command):
    """GPT draws from the left side alone, and says so; its candidates are ranked by the whole text all the same."""
    folder = tmp_path / "gpt"
    train.main([*small, "--method=gpt", f"--out_dir={folder}", "--max_iters=2"])
    _, out, err = command("sample.py", folder, "--text", "The ____3 sheep", "--n=3", "--json")
    scores = [json.loads(line)["log_p"] for line in out.splitlines() if line.startswith("{")]
    assert len(scores) == 3 and "before it alone" in err and scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--text", "no blank"], ["no blank", "____8"]),
        (["--text", "a ____0 b"], ["____0", "1 .. 32"]),
        (["--text", "a ____99999999999"], ["____99999999999", "1 .. 32"]),
        (["--text", "a ____20 b ____20"], ["43 tokens", "block_size is 32"]),
        (["--text", "a ____ ____ b"], ["two blanks of free length", "____8"]),
        (["--text", "____" + "9" * 5000], ["1 .. 32"]),
        (["--text", "a ____ b", "--lengths=\u00b2"], ["1 .. 32"]),
        (["--mode=infilling"], ["--mode", "--protocol"]),
        (["--candidates=a|b"], ["--candidates", "--text or --file"]),
        (["--text", "a ____3", "--max_new_tokens=3"], ["--max_new_tokens", "--prompt"]),
        (["--text", "a [[b ____ c]]"], ["overlap"]),
        (["--text", "a [[b"], ["do not pair"]),
        (["--text", "[[]]"], ["do not pair"]),
        (["--text", "a ____ b", "--lengths=0-3"], ["0-3", "1 .. 32"]),
        (["--text", "a ____ b", "--lengths=5-3"], ["5-3"]),
        (["--text", "a ____ b", "--lengths=few"], ["few"]),
        (["--text", "a ____ b", "--candidates", "a||b"], ["a||b", "empty"]),
        (["--text", "____2 ____", "--candidates", "a|b"], ["2 marks"]),
        (["--file=nowhere.txt"], ["nowhere.txt"]),
        (["--file=-", "--text=____3"], ["--text and --file"]),
        (["--protocol=mine"], ["mine", "paper"]),
        (["--protocol=paper", "--n=9"], ["--n=9", "8 sequences"]),
        (["--protocol=paper", "--mode=infiling"], ["infiling", "infilling"]),
    ],
)
def test_mistakes(trained, expect_refusal, args, words):
    expect_refusal(words, "sample.py", trained, *args)


# ---------------------------------------------------------------- the protocol


def samples(folder, name):
    return (folder / f"samples_{name}.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture
def run_folder(small, tmp_path):
    folder = tmp_path / "run"
    train.main([*small, f"--out_dir={folder}", "--max_iters=2"])
    return folder


def test_samples_are_traced(run_folder, command):
    args = ["sample.py", run_folder, "--protocol=paper", "--batch_size=3"]
    code, out, _ = command(*args, "--n=5")
    assert code == 0 and len(out.splitlines()) == 5
    model, config, _ = open_run(run_folder, {})
    questions = evaluate.evaluation_set(config, "val")
    for name in sample.MODES:
        for i, line in enumerate(samples(run_folder, name)):
            found, x = json.loads(line), questions.tokens[i]
            known = torch.zeros(32, dtype=torch.bool)
            for a, b in found["known"]:
                known[a:b] = True
            assert torch.equal(known, sample.asked_in(name, questions)[i]) and found["i"] == i
            ids = torch.tensor(found["tokens"])
            assert torch.equal(ids[known], x[known]) and found["text"] == Bytes().decode(found["tokens"])
            cond = known if sample.MODES[name].future else known & False
            with torch.no_grad():
                log_p = -model.exact_nll(ids[None], cond[None], ~known[None]).sum().item()
            assert math.isclose(found["log_p"], log_p, abs_tol=1e-3)


def test_samples_go_on(run_folder, command):
    """Killed in the middle of a batch, asked for more, asked again: as if drawn at once."""
    args = ["sample.py", run_folder, "--protocol=paper", "--mode=infilling", "--batch_size=3"]
    assert command(*args, "--n=8")[0] == 0
    straight, path = samples(run_folder, "infilling"), run_folder / "samples_infilling.jsonl"
    assert len(set(straight)) == 8
    for left in ("".join(straight[:4]) + straight[4][:50], "", "".join(straight[:3])):
        path.write_text(left)
        assert command(*args, "--n=8")[0] == 0 and samples(run_folder, "infilling") == straight
    path.unlink()
    for n in (2, 4, 8):
        assert command(*args, f"--n={n}")[0] == 0 and samples(run_folder, "infilling") == straight[:n]
    assert command(*args, "--n=3", "--temperature=0")[0] == 0
    assert (run_folder / "samples_infilling_temperature0.0.jsonl").exists()
    assert "8 samples are there" in command(*args, "--n=3")[1]
    assert samples(run_folder, "infilling") == straight, "asked for fewer: all of them stay"


def test_foreign_samples_are_refused(run_folder, small, command, expect_refusal):
    args = ["sample.py", run_folder, "--protocol=paper", "--mode=infilling", "--n=2"]
    assert command(*args)[0] == 0
    before = samples(run_folder, "infilling")
    expect_refusal(["batch_size = 4, not 2", "move the file"], *args, "--n=4", "--batch_size=2")
    expect_refusal(["dtype = float32, not bfloat16"], *args, "--n=4", "--dtype=bfloat16")
    train.main([*small, f"--out_dir={run_folder}", "--max_iters=4", "--resume"])
    expect_refusal(["checkpoint = "], *args)
    assert samples(run_folder, "infilling") == before
    for bad, words in ((b"{}\n", "line 1 is no sample"), (b"\xff\n", "cannot be read")):
        (run_folder / "samples_infilling.jsonl").write_bytes(bad)
        expect_refusal([words], *args)


def test_a_prompt_that_fills_all(small, tmp_path, command, expect_refusal):
    folder = tmp_path / "short"
    train.main([*small, "--block_size=16", f"--out_dir={folder}", "--max_iters=2"])
    args = ["sample.py", folder, "--protocol=paper", "--n=2"]
    expect_refusal(["--mode=unconditional"], *args, "--mode=unconditional")
    code, out, err = command(*args)
    assert code == 0 and len(out.splitlines()) == 4 and "left out" in err and "unconditional" in err


def test_modes_that_a_method_lacks(small, tmp_path, expect_refusal):
    for method, mode in (("gpt", "infilling"), ("diffusion", "training_no_future")):
        folder = tmp_path / method
        train.main([*small, f"--method={method}", f"--out_dir={folder}", "--max_iters=2"])
        expect_refusal([f"--mode={mode}", method], "sample.py", folder, "--protocol=paper", f"--mode={mode}")


def test_readme_in_python(trained, capsys):
    """The example of README runs."""
    text = (HERE / "README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "open_run" in block)
    exec(code.replace("out/demo", str(trained)), {})
    out = capsys.readouterr().out.splitlines()
    assert (
        out[0].startswith("tensor(-")
        and out[1].startswith("The Congress of the ")
        and " has the power." in "".join(out)
    )
