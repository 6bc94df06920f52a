"""The bridge between AC-GPT and COrAL: what each may see, how often it is asked, and what it leaves alone."""

import json

import pytest
import torch

import bridge
import train
from coral import Decoder
from model import ACGPT, Transformer
from test_coral import EOS, SIZE, Oracle

T, GAP = 7, slice(2, 5)


def models():
    torch.manual_seed(0)
    model = ACGPT(Transformer(6, 2, n_head=2, n_embd=16), bos=EOS)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    return model.double().eval(), torch.randint(5, (4, T), generator=torch.Generator().manual_seed(1))


def likeliest(model, tokens, cond, t):
    """By trying every token at t: the one with the smallest NLL there."""
    alone = torch.zeros_like(tokens, dtype=torch.bool)
    alone[:, t] = True
    nll = []
    for v in range(6):
        tokens[:, t] = v
        nll.append(model.exact_nll(tokens, cond, alone)[:, t])
    return torch.stack(nll).argmin(0)


@torch.no_grad()
def test_ac_gpt_fills_and_sweeps():
    model, tokens = models()
    gap, known = torch.zeros_like(tokens, dtype=torch.bool), tokens.clone()
    gap[:, GAP] = True
    for t in range(GAP.start, GAP.stop):
        known[:, t] = likeliest(model, known, ~gap, t)
    filled = bridge.fill(model, tokens, GAP)
    assert torch.equal(filled, known) and not torch.equal(known, tokens)
    for t in reversed(range(GAP.start, GAP.stop)):
        others = torch.ones_like(gap)
        others[:, t] = False
        known[:, t] = likeliest(model, known, others, t)
    assert torch.equal(bridge.from_the_right(model, filled, GAP), known) and not torch.equal(known, filled)


@pytest.mark.parametrize("k_f, calls", [(4, 2), (4, 1), (1, 3), (2, 6)])
def test_a_gap_is_repaired_in_so_many_calls(k_f, calls):
    truth = [EOS, *range(5), 1, 2]
    decoder = Decoder(Oracle(truth), EOS, max_len=99, k_f=k_f)
    spoilt = torch.tensor([0, 1, 4, 4, 4, 1, 1])  # the last is wrong, and not in the gap
    assert bridge.repair(decoder, spoilt, GAP, calls).tolist() == [0, 1, 2, 3, 4, 1, 1]
    assert decoder.calls == calls


def test_a_draft_does_not_see_what_is_behind_and_a_repair_does():
    tokens, seen = models()[1][0], []
    oracle = Oracle([EOS, *tokens.tolist()])

    def log_p(slots, src, tgt):
        seen.append((slots.tolist(), set(src.tolist())))
        return oracle(slots, src, tgt)

    bridge.repair(Decoder(log_p, EOS, max_len=99), tokens, GAP, 2)
    whole = [EOS, *tokens.tolist()]
    assert seen == [(whole[:3], {2}), (whole, set(range(2, 8)))]


@pytest.fixture(scope="module")
def ac_gpt(task_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bridge") / "ac_gpt"
    train.main([*task_data, "--method=ac_gpt", "--r_max=0.6", f"--out_dir={folder}"])
    return folder


def test_the_table(command, finished, ac_gpt, tmp_path):
    code, out, err = command("bridge.py", finished, ac_gpt, f"--start={SIZE - 9}", "--n=3", f"--results={tmp_path}")
    assert code == 0, err
    assert f"a gap of 9 tokens behind {SIZE - 9}" in out and "COrAL, draft of 4 a call" in out
    (file,) = (tmp_path / "bridge").glob("*.json")
    ways = json.loads(file.read_text())["ways"]
    assert [way["calls"] for way in ways] == [0, 9, 18, 9, 18, 9, 18]
    assert ways[0]["restored"][0] == ways[0]["whole"][0] == 1


def test_bad_input(expect_refusal, finished, ac_gpt, trained, tmp_path):
    expect_refusal(
        [f"--start={SIZE - 1}", "--length=5", SIZE], "bridge.py", finished, ac_gpt, f"--start={SIZE - 1}", "--length=5"
    )
    expect_refusal(["name a run of coral"], "bridge.py", finished)
    expect_refusal([trained, "gpt", "name another run"], "bridge.py", finished, ac_gpt, trained)
    expect_refusal(["ac_gpt"], "bridge.py", finished, finished / "2b")
