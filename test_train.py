"""Training: exact resuming, several processes, what the loss counts, what stops a run; and that a model learns by heart."""

import csv
import json
import math
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch

import checkpoint
import evaluate
import fast
import prepare_data
import train
from config import Config, UserError, parse
from conftest import HERE


def start(*args, launcher=(sys.executable,)):
    """Start train.py in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(HERE / "train.py"), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def trainer_of(args):
    paths, given, options = parse([*args, "--device=cpu"], train.Options)
    return train.set_up(paths, given, options)


def losses(folder, split="train"):
    with open(folder / "log.csv") as file:
        return {int(row["iter"]): float(row["loss"]) for row in csv.DictReader(file) if row["split"] == split}


def assert_same_state(a, b):
    """Two checkpoints are equal bit for bit: weights and optimizer."""
    assert a["iter"] == b["iter"] and a["best"] == b["best"] and a["scaler"] == b["scaler"]
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    for i, state in a["optimizer"]["state"].items():
        for name in state:
            assert torch.equal(state[name], b["optimizer"]["state"][i][name]), (i, name)


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("how, dtype", [("kill", "float32"), ("ctrl-c", "float16")])
def test_ten_and_ten_steps_are_twenty(small, tmp_path, how, dtype):
    """Dropout included; killed without warning after a checkpoint, or ended by Ctrl-C in the middle of an interval."""
    args = [*small, "--dropout=0.2", "--max_iters=20", "--eval_interval=7", f"--dtype={dtype}"]
    (straight, _), broken = trainer_of([*args, f"--out_dir={tmp_path / 'straight'}"]), tmp_path / "broken"
    torch.set_num_threads(1)
    straight.fit(checkpoint.Log(straight.config, 0, quiet=False))

    process = start(*args, f"--out_dir={broken}")
    wanted = "step 8/" if how == "kill" else "step 3/"
    for line in process.stdout:
        if line.startswith(wanted):
            process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == (-signal.SIGKILL if how == "kill" else 0), rest
    at = checkpoint.load(broken / "ckpt.pt")["iter"]
    assert at in (7, 14) if how == "kill" else 3 <= at < 20, at
    if how == "ctrl-c":
        assert "go on with --resume" in rest

    resumed, log = trainer_of([*args, f"--out_dir={broken}", "--init_from=resume"])
    assert resumed.iter == at and max(losses(broken)) == at, "log rows after the checkpoint are dropped"
    resumed.fit(log)
    torch.set_num_threads(2)
    assert_same_state(checkpoint.load(tmp_path / "straight" / "ckpt.pt"), checkpoint.load(broken / "ckpt.pt"))
    assert losses(broken) == losses(tmp_path / "straight") and len(losses(broken)) == 20
    assert losses(broken, "val") == losses(tmp_path / "straight", "val")


def test_validating_more_often_changes_nothing(small, tmp_path):
    for interval in (2, 10):
        train.main([*small, "--dropout=0.2", f"--eval_interval={interval}", f"--out_dir={tmp_path / str(interval)}"])
    assert losses(tmp_path / "2") == losses(tmp_path / "10")


def test_a_folder_with_a_run_is_kept(small, trained, expect_refusal, command, tmp_path):
    before = (trained / "ckpt.pt").read_bytes()
    expect_refusal([trained, "--resume", "--overwrite"], "train.py", *small, f"--out_dir={trained}")
    for change in ("n_layer = 3", "r_max = 0.3", "seed = 5"):
        args = [*small, f"--out_dir={trained}", "--resume", f"--{change.replace(' ', '')}"]
        expect_refusal([change, "trained with"], "train.py", *args)
    expect_refusal(["give one of them"], "train.py", *small, f"--out_dir={trained}", "--resume", "--overwrite")
    expect_refusal(["ckpt.pt is not there"], "train.py", *small, f"--out_dir={tmp_path}", "--resume")
    assert (trained / "ckpt.pt").read_bytes() == before
    code, out, _ = command("train.py", *small, f"--out_dir={trained}", "--resume")
    assert code == 0 and "step 10 of 10" in out and (trained / "ckpt.pt").read_bytes() == before
    train.main([*small, f"--out_dir={tmp_path / 'again'}"])
    (tmp_path / "again" / "samples_training.jsonl").write_text("")
    train.main([*small, f"--out_dir={tmp_path / 'again'}", "--overwrite", "--max_iters=2"])
    assert not (tmp_path / "again" / "samples_training.jsonl").exists()
    assert checkpoint.load(tmp_path / "again" / "ckpt.pt")["iter"] == 2 and len(losses(tmp_path / "again")) == 2


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"not a checkpoint" * 99])
def test_damaged_checkpoints(small, trained, tmp_path, expect_refusal, damage):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "ckpt.pt").write_bytes(damage((trained / "ckpt.pt").read_bytes()))
    expect_refusal(["ckpt.pt"], "train.py", *small, f"--out_dir={folder}", "--resume")
    expect_refusal(["ckpt.pt"], "evaluate.py", folder, "--checkpoint=ckpt.pt")
    for other in ({"some": "dict"}, torch.zeros(3)):
        torch.save(other, folder / "ckpt.pt")
        expect_refusal(["ckpt.pt", "it holds no config"], "sample.py", folder, "--checkpoint=ckpt.pt")
    state = torch.load(trained / "ckpt.pt", weights_only=True)
    state["config"]["n_layers"] = 3
    torch.save(state, folder / "ckpt.pt")
    expect_refusal(["n_layers", "ckpt.pt"], "sample.py", folder, "--checkpoint=ckpt.pt")


def test_full_disk_keeps_the_previous_checkpoint(trained):
    state, path = checkpoint.load(trained / "ckpt.pt"), trained / "ckpt.pt"
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(UserError, match="untouched"):
            checkpoint.save(path, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and not list(trained.glob("*.tmp"))


def test_checkpoints_are_plain(trained):
    state = torch.load(trained / "ckpt.pt", weights_only=True)
    assert Config(**state["config"]).n_layer == 2 and state["iter"] == 10 and state["vocab_size"] == 257


# ---------------------------------------------------------------- the step


def test_two_processes_do_what_one_does(small, tmp_path):
    args = [*small, "--dropout=0", "--gradient_accumulation_steps=4", "--max_iters=6", "--eval_interval=3"]
    train.main([*args, f"--out_dir={tmp_path / 'one'}"])
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    process = start(*args, f"--out_dir={tmp_path / 'two'}", launcher=torchrun)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() and all(abs(one[i] - two[i]) < 1e-5 for i in one), (one, two)
    one, two = losses(tmp_path / "one", "val"), losses(tmp_path / "two", "val")
    assert len(one) == 2 and all(abs(one[i] - two[i]) < 1e-5 for i in one), (one, two)


def test_uneven_processes_are_refused(small, expect_refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(train.dist, "init_process_group", lambda *a: None)
    monkeypatch.setattr(train.dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    expect_refusal(["gradient_accumulation_steps = 2", "3 processes"], "train.py", *small, f"--out_dir={tmp_path}")


def test_accumulation_does_not_change_the_gradient(small, tmp_path):
    """8 x 1, 4 x 2 and 1 x 8 sequences: one loss and one set of gradients, though |x_e| differs between micro-batches."""
    found = []
    for batch, accumulation in ((8, 1), (4, 2), (1, 8)):
        args = [
            *small,
            f"--batch_size={batch}",
            f"--gradient_accumulation_steps={accumulation}",
            "--dropout=0",
            "--grad_clip=0",
        ]
        trainer, _ = trainer_of([*args, f"--out_dir={tmp_path / str(batch)}"])
        gradients = {}
        trainer.optimizer.step = lambda *a, m=trainer.model, g=gradients: g.update(
            {n: p.grad.clone() for n, p in m.named_parameters()}
        )
        found.append((trainer.step(), gradients))
    for loss, gradients in found[1:]:
        assert abs(loss - found[0][0]) < 1e-5
        assert all(torch.allclose(g, found[0][1][n], atol=1e-5) for n, g in gradients.items())


def test_the_loss_is_per_token_of_the_step(small, tmp_path):
    trainer, _ = trainer_of([*small, "--dropout=0", f"--out_dir={tmp_path}"])
    tokens, cond = train.draw_step(trainer.chunks, trainer.config, 0)
    assert tokens.shape == cond.shape == (8, 32)
    expected = (
        sum(trainer.model.exact_nll(x[None], c[None]).sum().item() for x, c in zip(tokens, cond)) / (~cond).sum().item()
    )
    assert abs(trainer.step() - expected) < 1e-5


def test_micro_batches_are_of_equal_size(small, tmp_path):
    """Dealt like cards: their numbers of known tokens are far closer than those of micro-batches drawn at random."""
    args = [*small, "--gradient_accumulation_steps=10", f"--out_dir={tmp_path}"]
    trainer, _ = trainer_of(args)
    known = [train.draw_step(trainer.chunks, trainer.config, i)[1].sum(1).view(10, 4) for i in range(20)]
    dealt = torch.stack([x.sum(1).double().std() for x in known]).mean()
    at_random = torch.stack([x.double().std() * 2 for x in known]).mean()
    assert dealt < 0.3 * at_random, (dealt, at_random)


def test_every_step_draws_its_own(small, tmp_path):
    trainer, _ = trainer_of([*small, f"--out_dir={tmp_path}"])
    (_, a), (_, b) = (train.draw_step(trainer.chunks, trainer.config, i) for i in (0, 1))
    assert sorted(a.sum(1).tolist()) != sorted(b.sum(1).tolist())


def test_an_epoch_sees_every_chunk_once(small, tmp_path):
    trainer, _ = trainer_of([*small, f"--out_dir={tmp_path}", "--batch_size=1", "--gradient_accumulation_steps=1"])
    n = len(trainer.chunks)
    for epoch in (0, 1):
        seen = [train.draw_step(trainer.chunks, trainer.config, epoch * n + i)[0][0] for i in range(n)]
        assert sorted(x.tolist() for x in seen) == sorted(trainer.chunks.tolist())


def test_learning_rate():
    config = Config(learning_rate=1.0, warmup_iters=10, max_iters=110)
    assert train.learning_rate(config, 0) == 0.1 and train.learning_rate(config, 10) == 1.0
    assert math.isclose(train.learning_rate(config, 60), 0.55) and math.isclose(train.learning_rate(config, 110), 0.1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(small, tmp_path, dtype):
    train.main([*small, f"--dtype={dtype}", f"--out_dir={tmp_path / dtype}", "--max_iters=30", "--eval_interval=30"])
    train.main([*small, "--dtype=float32", f"--out_dir={tmp_path / 'full'}", "--max_iters=1"])
    loss, full = losses(tmp_path / dtype), losses(tmp_path / "full")
    assert loss[30] < loss[1] - 0.5 and 1e-7 < abs(loss[1] - full[1]) < 0.05, "close to float32, but not computed in it"
    assert (checkpoint.load(tmp_path / dtype / "ckpt.pt")["scaler"] != {}) == (dtype == "float16")


def test_not_finite_stops_without_overwriting(small, tmp_path, expect_refusal):
    args = [*small, f"--out_dir={tmp_path}", "--max_iters=6", "--eval_interval=3"]
    train.main([*args, "--max_iters=3"])
    before = (tmp_path / "ckpt.pt").read_bytes()
    expect_refusal(
        ["not finite", "step 5", "untouched"], "train.py", *args, "--resume", "--learning_rate=1e30", "--grad_clip=0"
    )
    assert (tmp_path / "ckpt.pt").read_bytes() == before


def test_compiled_is_the_same(small, tmp_path, monkeypatch):
    """Traced, not translated; batches of many sizes, training and validation; no recompile limit is hit."""
    monkeypatch.setattr(fast, "attend_packed", fast.attend_packed)  # compile_body changes it
    found = []
    for compiled in (False, True):
        trainer, log = trainer_of(
            [*small, "--max_iters=12", "--eval_interval=4", f"--out_dir={tmp_path / str(compiled)}"]
        )
        if compiled:
            torch._dynamo.reset()
            fast.compile_body(trainer.model.body, backend="eager")
        trainer.fit(log)
        found.append(losses(tmp_path / str(compiled)) | losses(tmp_path / str(compiled), "val"))
    assert len(found[0]) == 12 and all(abs(found[0][i] - found[1][i]) < 1e-4 for i in found[0]), found
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_failed_compile_says_what_to_do(small, tmp_path, expect_refusal, monkeypatch):
    def no_compiler(*args, **kwargs):
        raise torch._dynamo.exc.InternalTorchDynamoError("no compiler here")

    def compile(module, **kwargs):
        module.forward = no_compiler

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    expect_refusal(["no compiler here", "--compile=False"], "train.py", *small, "--compile", f"--out_dir={tmp_path}")


# ---------------------------------------------------------------- the whole


@pytest.mark.parametrize("method", ["ac_gpt", "gpt"])
def test_learn_by_heart_and_reproduce(tmp_path, method):
    """A model that has learned one sequence fills any blank in it; a wrong alignment could not."""
    (tmp_path / "text").write_text("Whose woods these are I think I know" * 20)  # 36 characters
    prepare_data.main(["woods", f"--input={tmp_path / 'text'}", f"--data_dir={tmp_path}"])
    trainer, log = trainer_of([
        "--dataset=woods", f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'run'}", f"--method={method}", "--block_size=36",
        "--n_layer=2", "--n_head=2", "--n_embd=64", "--dropout=0", "--batch_size=8", "--gradient_accumulation_steps=1",
        "--learning_rate=3e-3", "--warmup_iters=10", "--max_iters=150", "--eval_interval=150", "--r_max=1.0", "--log_interval=50",
    ])  # fmt: skip
    trainer.fit(log)
    assert trainer.best < 0.15
    text = torch.tensor([list(b"Whose woods these are I think I know")])
    for start, end in ((0, 36), (6, 11), (20, 36)):
        known = torch.ones_like(text, dtype=torch.bool)
        known[:, start:end] = False
        cond = known if method == "ac_gpt" else known & False
        trainer.model.eval()
        out = trainer.model.generate(text, cond, lambda logits: logits.argmax(-1), forced=known)
        assert torch.equal(out, text), bytes(out[0].clamp(max=255).tolist())


def test_x_c_of_one_token_to_predict(small, tmp_path):
    train.main([*small, "--r_min=1", "--r_max=1", "--max_iters=2", f"--out_dir={tmp_path}"])
    assert len(losses(tmp_path)) == 2 and all(math.isfinite(loss) for loss in losses(tmp_path).values())


def test_a_law_of_your_own(small, tmp_path, monkeypatch, expect_refusal, command):
    """README's example: one function, one entry in the table."""

    def every_second(config, n, generator):
        return (torch.arange(config.block_size) % 2 == 1).expand(n, -1)

    expect_refusal(["'every_second'", "training, infilling"], "train.py", *small, "--law=every_second")
    monkeypatch.setitem(evaluate.LAWS, "every_second", every_second)
    train.main([*small, "--law=every_second", "--max_iters=2", f"--out_dir={tmp_path}"])
    assert checkpoint.load(tmp_path / "ckpt.pt")["config"]["law"] == "every_second"
    command("evaluate.py", tmp_path)
    result = json.loads((tmp_path / "eval_val_r0.6.json").read_text())
    assert result["modes"]["every_second"]["tokens"] == result["modes"]["every_second_no_future"]["tokens"] == 8 * 16


def test_a_law_must_leave_something_to_predict(small, tmp_path, monkeypatch):
    monkeypatch.setitem(
        evaluate.LAWS, "all", lambda config, n, generator: torch.ones(n, config.block_size, dtype=torch.bool)
    )
    with pytest.raises(AssertionError, match="leaves no token"):
        train.main([*small, "--law=all", f"--out_dir={tmp_path}"])


def test_a_config_file_does_not_undo_the_command_line(small, tmp_path):
    """The first start overrides the file; resuming with the file alone keeps what was trained with."""
    (tmp_path / "c.py").write_text("learning_rate = 4e-3\nweight_decay = 0.2\n")
    args = [
        str(tmp_path / "c.py"),
        *(arg for arg in small if "learning_rate" not in arg),
        f"--out_dir={tmp_path / 'run'}",
    ]
    train.main([*args, "--learning_rate=1e-4", "--max_iters=5"])
    trainer, _ = trainer_of([*args, "--init_from=resume", "--max_iters=10"])
    assert (trainer.config.learning_rate, trainer.config.weight_decay, trainer.iter) == (1e-4, 0.2, 5)


def test_best_is_the_best(small, tmp_path):
    trainer, log = trainer_of([*small, f"--out_dir={tmp_path}", "--max_iters=3", "--eval_interval=1"])
    found = iter((math.nan, 1.0, 3.0))
    trainer.validate = lambda: next(found)
    trainer.fit(log)
    assert checkpoint.load(tmp_path / "best.pt")["iter"] == 2 and checkpoint.load(tmp_path / "ckpt.pt")["iter"] == 3
    assert checkpoint.load(tmp_path / "ckpt.pt")["best"] == 1.0


def test_validation_asks_the_trained_law_without_dropout(small, tmp_path):
    for law in ("training", "infilling"):
        trainer, _ = trainer_of([*small, f"--law={law}", f"--out_dir={tmp_path / law}", "--dropout=0.5"])
        trainer.step()
        found = trainer.validate()
        tokens, cond = trainer.questions.tokens, trainer.questions.cond[law]
        with torch.no_grad():
            expected = trainer.model.eval().exact_nll(tokens, cond).sum() / (~cond).sum()
        assert abs(found - expected) < 1e-5


def test_dropout_differs_from_step_to_step(small, tmp_path):
    trainer, _ = trainer_of([*small, f"--out_dir={tmp_path}"])
    seeds = set()
    for _ in range(3):
        trainer.step()
        seeds.add(torch.initial_seed())
    assert len(seeds) == 3


def test_initial_weights_and_optimizer(small, tmp_path):
    trainer, _ = trainer_of([*small, f"--out_dir={tmp_path}", "--n_embd=128", "--beta1=0.8", "--weight_decay=0.3"])
    for name, p in trainer.model.named_parameters():
        expected = 0.02 / math.sqrt(2 * 2) if name.endswith("proj.weight") else 0.02
        assert p.dim() < 2 or abs(p.std().item() / expected - 1) < 0.05, name
    decayed, others = trainer.optimizer.param_groups
    assert decayed["betas"] == (0.8, 0.999) and (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in others["params"]} == {1}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_gradient_is_clipped(small, tmp_path, dtype):
    trainer, _ = trainer_of([*small, f"--out_dir={tmp_path}", f"--dtype={dtype}", "--grad_clip=0.01"])
    norms = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: norms.append(
            sum(p.grad.square().sum() for g in optimizer.param_groups for p in g["params"])
        )
    )
    trainer.step()
    assert abs(math.sqrt(norms[0]) - 0.01) < 1e-4


def test_float16_that_always_overflows_stops(small, tmp_path):
    trainer, log = trainer_of(
        [*small, f"--out_dir={tmp_path}", "--dtype=float16", "--max_iters=50", "--eval_interval=50"]
    )
    next(trainer.model.parameters()).register_hook(lambda grad: grad * math.nan)
    with pytest.raises(UserError, match="not finite"):
        trainer.fit(log)


def test_resuming_in_another_precision(small, tmp_path):
    """float32 and bfloat16 checkpoints hold no loss scale; a dtype in the config file counts on resuming too."""
    (tmp_path / "c.py").write_text("dtype = 'float16'\ninit_from = 'resume'\n")
    args = [*small, f"--out_dir={tmp_path / 'run'}"]
    train.main([*args, "--max_iters=2"])
    trainer, _ = trainer_of([str(tmp_path / "c.py"), *args, "--max_iters=4"])
    assert trainer.config.dtype == "float16" and trainer.iter == 2 and math.isfinite(trainer.step())


def test_a_mistake_found_late_does_not_delete_the_old_run(small, tmp_path, monkeypatch):
    train.main([*small, f"--out_dir={tmp_path}", "--max_iters=1"])
    monkeypatch.setattr(train, "make_optimizer", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main([*small, f"--out_dir={tmp_path}", "--overwrite"])
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter"] == 1
