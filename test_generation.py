"""What is said of generated text: shares by hand, MAUVE with real features, its references, what is refused."""

import json
import math
import os
import re
import sys

import numpy as np
import pytest
import torch

import evaluate
import generation
import train
from checkpoint import open_run
from config import Config, UserError
from prepare_data import Bytes

VAL = ["--eval_sequences=30"]


@pytest.fixture(scope="session")
def sampled(data_dir, tmp_path_factory):
    """A small run with samples in all modes."""
    import sample
    from conftest import SMALL

    folder = tmp_path_factory.mktemp("sampled") / "run"
    keys = [x for x in SMALL if "eval_sequences" not in x]
    train.main([*keys, *VAL, f"--data_dir={data_dir}", f"--out_dir={folder}"])
    sample.main([str(folder), "--protocol=paper", "--n=30", "--batch_size=30"])
    return folder


def test_restored_by_hand():
    tokens, originals = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1, 9, 3, 9], [5, 6, 9, 8]])
    known = torch.tensor([[True, False, False, False], [False, False, False, True]])
    share, error = generation.restored(tokens, known, originals)
    assert share == 3 / 6, "of 2, 3, 4 and 5, 6, 7 it restores 3 and 5, 6"
    # the ratio estimator's: residuals 1 - 1.5 and 2 - 1.5
    assert math.isclose(error, math.sqrt(2 * 0.25 * 2) / 6)


def test_table_of_samples(sampled, command):
    code, out, _ = command("evaluate.py", sampled, "--samples")
    _, config, _ = open_run(sampled, {})
    asked = evaluate.evaluation_set(config, "val")
    assert code == 0 and len(out.splitlines()) == 6 and "MAUVE" not in out
    for name in ("infilling", "training_no_future"):
        hits = count = 0
        log_p = []
        for line, original in zip((sampled / f"samples_{name}.jsonl").read_text().splitlines(), asked.tokens.tolist()):
            found = json.loads(line)
            known = {i for a, b in found["known"] for i in range(a, b)}
            hits += sum(found["tokens"][i] == original[i] for i in range(32) if i not in known)
            count += 32 - len(known)
            log_p.append(found["log_p"])
        row = next(line for line in out.splitlines() if line.startswith(f"run, {name} ")).split()
        assert row[2:5] == ["30", str(count), f"{hits / count:.2%}"]
        assert row[-1] == f"{-sum(log_p) / count / math.log(2):.3f}"


def test_mauve(sampled, command, monkeypatch):
    """Real features, of a model of ours: the originals are nearer to the reference than noise is."""
    load, args = np.load, ["evaluate.py", sampled, "--mauve", f"--mauve_model={sampled}"]
    code, out, err = command(*args)
    assert code == 0 and "30 sequences of the test split" in out and "3 buckets" in out and "seeds 0, 1, 2" in out, err
    scores = {re.split(r"  +", line)[0]: float(line.split()[-3]) for line in out.splitlines()[1:-1]}
    assert len(scores) == 7 and all(0 < x <= 1 for x in scores.values())
    assert scores["the originals"] > 0.8
    kept = []
    monkeypatch.setattr(generation.np, "load", lambda path: (path.suffix == ".npy" and kept.append(path)) or load(path))
    assert command(*args)[1] == out and len(kept) == 1, "the references' features are kept, and k-means is seeded"
    os.utime(sampled / "best.pt")
    assert command(*args)[0] == 0 and len(kept) == 1, "other files of the model, other features"


def test_mauve_tells_texts_apart(sampled):
    _, config, _ = open_run(sampled, {})
    mauve = generation.Mauve(config, str(sampled), 30, None)
    tokens = evaluate.evaluation_set(config, "val").tokens
    alike = [Bytes().decode(row) for row in tokens.tolist()]
    noise = ["zq" * 16] * 30
    assert mauve.score(alike)[0] > mauve.score(noise)[0] + 0.3
    assert mauve.score(noise)[0] < 0.5


def test_features_are_of_the_last_token(sampled):
    feature = generation.feature_model(str(sampled), "cpu")
    model, _, _ = open_run(sampled, {})
    tokens = torch.tensor([[model.bos, *b"The sheep"]])
    with torch.no_grad():
        hidden = model.body(tokens, torch.arange(10)[None], torch.ones(10, 10).tril().bool()[None])
        assert torch.allclose(feature("The sheep"), hidden[0, -1], atol=1e-5)
        assert torch.equal(feature("x" * 31), feature("x" * 50)), "cut to T, BOS included"


def test_features_of_transformers(tmp_path):
    """A folder of transformers: the last hidden state at the last token, of 1024 at most."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["?", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llm = LlamaForCausalLM(LlamaConfig(vocab_size=4, max_position_embeddings=2048, **size)).eval()
    llm.save_pretrained(tmp_path)
    feature = generation.feature_model(str(tmp_path), "cpu")
    with torch.no_grad():
        hidden = llm(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert torch.allclose(feature("a b c"), hidden, atol=1e-5)
        assert torch.equal(feature("a " * 1024 + "b"), feature("a " * 1024))


def fake_data(tmp_path, dataset, splits, T=12):
    """A prepared data set of bytes: {split: documents}."""
    folder = tmp_path / f"{dataset}-bytes"
    folder.mkdir()
    meta = {"vocab_size": 257, "separator": 256, "dtype": "uint16", "tokens": {}, "sha256": {}}
    for split, documents in splits.items():
        ids = np.concatenate([np.array([*text.encode(), 256], np.uint16) for text in documents])
        ids = np.concatenate([ids, np.full(-len(ids) % T, 256, np.uint16)])
        ids.tofile(folder / f"{split}.bin")
        meta["tokens"][split], meta["sha256"][split] = len(ids), split
    (folder / "meta.json").write_text(json.dumps(meta))
    return Config(dataset=dataset, tokenizer="bytes", data_dir=str(tmp_path), block_size=T)


def test_references(tmp_path):
    """200 long paragraphs of WikiText-103; where there are fewer, articles; FineWeb's documents past a million tokens."""
    rows = [text for i in range(210) for text in (f" = {i} = \n", "short\n", f"paragraph {i:03}\n")]
    found, about = generation.references(fake_data(tmp_path, "wikitext103", {"test": rows}), 5)
    assert found == [f"paragraph {i:03}"[:12] for i in range(200)] and "paragraphs of at least 12 tokens" in about
    rows = [text for i in range(205) for text in (f" = {i} = \n", "ab\n", *[" = = x = = \n"] * (i < 50), "cd\n")]
    (tmp_path / "b").mkdir()
    found, about = generation.references(fake_data(tmp_path / "b", "wikitext103", {"test": rows}), 5)
    assert len(found) == 200 and "articles" in about and "there are 50 only" in about
    assert [text[:7] for text in found[:9]] == [f" = {i} = " for i in range(9)], (
        "a heading of a section begins no article"
    )
    (tmp_path / "c").mkdir()
    documents = ["x" * 1_023_990, "tail of the first", *(f"{i} document" for i in range(1100))]
    found, about = generation.references(fake_data(tmp_path / "c", "fineweb", {"val": documents}), 5)
    assert found == [f"{i} document"[:12] for i in range(1000)] and "1,024,000" in about


def test_mistakes(sampled, trained, tmp_path, expect_refusal, monkeypatch):
    expect_refusal(["no samples", "--protocol=paper"], "evaluate.py", trained, "--samples")
    args = ["evaluate.py", sampled, "--mauve"]
    expect_refusal(["31 buckets", "30 and 30"], *args, "--mauve_buckets=31", f"--mauve_model={sampled}")
    expect_refusal(["--mauve_buckets does nothing alone, but with --mauve"], *args[:-1], "--mauve_buckets=3")
    expect_refusal(["--split does nothing with --samples"], *args[:-1], "--samples", "--split=test")
    expect_refusal(["--consistency and --samples"], *args[:-1], "--samples", "--consistency")
    expect_refusal([tmp_path, "cannot be loaded"], *args, f"--mauve_model={tmp_path}")
    monkeypatch.setitem(sys.modules, "mauve", None)
    expect_refusal(["pip install mauve-text"], *args)


def test_broken_samples(tmp_path):
    asked = type("Asked", (), {"hash": "abc"})
    path = tmp_path / "samples_infilling.jsonl"
    good = {"i": 0, "tokens": [1, 2], "known": [[0, 1]], "log_p": -1.0, "evaluation_set": "abc", "checkpoint": "c"}
    for lines, why in (
        ([{**good, "evaluation_set": "other"}], "evaluation_set = other, not abc"),
        ([{**good, "checkpoint": "other"}], "checkpoint = other, not c"),
        ([good, {**good, "i": 2}], "not all samples"),
        ([{"i": 0}], "line 1 is no sample"),
        ([], "not all samples"),
    ):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(UserError, match=why):
            generation.read_samples(path, asked, "c")
    path.write_text(json.dumps(good) + "\n")
    assert generation.read_samples(path, asked, "c")[1].tolist() == [[True, False]]
