"""Build a model from a config, save it with all that its use needs, and open it again.

A run is a folder: ckpt.pt (the latest state, to resume from), best.pt (the weights with the lowest validation loss),
log.csv, loss.png, eval_*.json. Checkpoints hold tensors and plain Python types, so torch.load(..., weights_only=True)
reads them. This file neither trains nor scores.
"""

import csv
import dataclasses
import math
import pickle
import platform
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import torch

import baselines
from config import (
    FIXED,
    Config,
    UserError,
    kinds_of,
    known_or_complain,
    load_config,
    read_config_file,
    resolve_machine,
    whole_file,
)
from coral import Coral, TargetAware
from model import Transformer

METHODS = {**baselines.METHODS, "coral": Coral}

# keys that a checkpoint brings from where it was trained, and that stay there
MACHINE = ("device", "dtype", "compile", "shard")


def build(config, vocab_size, separator):
    """A new model with random weights (from config.seed) on config.device."""
    torch.manual_seed(config.seed)
    if config.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # float32 products in TF32
    if config.llm:
        import llm  # needs transformers

        body = llm.load(config, vocab_size)
    else:
        kind = TargetAware if config.method == "coral" else Transformer
        body = kind(vocab_size, config.n_layer, config.n_head, config.n_embd, config.dropout)
    method = METHODS[config.method]
    model = method(body, separator, **{name: getattr(config, name) for name in method.settings})
    return model if config.shard else model.to(config.device)  # it may be too large to lie there whole


def machine_name(config):
    """What a run was made on."""
    kind = config.device.partition(":")[0]
    if kind == "cuda":
        return torch.cuda.get_device_name(config.device)
    cpu = (
        f"{torch.get_num_threads()} threads of a CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    )
    return cpu if kind == "cpu" else f"{kind} ({platform.machine()})"


def git_commit():
    """The commit of this code, '+' behind it when files differ from it, or None outside a repository."""
    here = Path(__file__).parent
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return None
    return out.stdout.strip() or None


def autocast(config):
    """The context in which forward passes run: matrix products in config.dtype."""
    dtype = getattr(torch, config.dtype)
    return torch.autocast(config.device.partition(":")[0], dtype, enabled=dtype != torch.float32)


def save(path, state):
    """Write a checkpoint, whole or not at all."""
    with whole_file(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as e:  # torch covers the OSError of a failed write with an error of its own
            raise (e.__context__ if isinstance(e.__context__, OSError) else e) from None


def load(path):
    """The dict that `save` wrote, on the CPU."""
    path = Path(path)
    if not path.is_file():
        others = ", ".join(sorted(f"--checkpoint={file.name}" for file in path.parent.glob("*.pt")))
        fix = f"there is {others}" if others else "train it first, or name the folder of another run"
        raise UserError(f"{path} is not there: {fix}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not (isinstance(state, dict) and {"config", "model", "iter"} <= set(state)):
            raise ValueError("it holds no config, model and iter")
        return {**state, "path": str(path)}
    except (RuntimeError, EOFError, OSError, ValueError, TypeError, pickle.UnpicklingError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise UserError(
            f"{path} is no whole checkpoint of ours ({reason[:80]}): try --checkpoint=, or train again"
        ) from None


def find_run(place, given, name="best.pt", to_resume=False):
    """Read the checkpoint of a finished or interrupted run -> (config, state).

    place: a config file, whose out_dir is meant, or a run folder. given: {key: value} set on the command line. The
    checkpoint's config holds, changed by the command line alone (and the file's device, dtype and compile); neither it nor the file may ask for another model, nor,
    to resume, for another experiment.
    """
    folder, file = Path(place), {}
    if folder.suffix == ".py":
        folder, file = Path(load_config([place], given).out_dir), read_config_file(place)
    elif given.get("out_dir", place) != place:
        raise UserError(f"out_dir = {given['out_dir']!r} contradicts the run folder {place}: leave one of them out")
    state = load(folder / name)
    saved, asked = state["config"], {**file, **given}
    for key in saved:
        known_or_complain(key, kinds_of(Config), state["path"])
    for key, kind in FIXED.items():
        then = saved.get(key, getattr(Config, key))
        if key in asked and asked[key] != then and (kind == "model" or to_resume):
            fix = "start another run" if to_resume else "leave it out, or name another run"
            raise UserError(f"{key} = {asked[key]!r} contradicts {state['path']}, trained with {key} = {then!r}: {fix}")
    saved = {key: value for key, value in saved.items() if key not in MACHINE}
    machine = {key: file[key] for key in MACHINE if key in file}
    config = resolve_machine(Config(**{**saved, **machine, **given, "out_dir": str(folder)}))
    return (config if to_resume else dataclasses.replace(config, shard=False)), state


def restore(config, state):
    """The model of a run, with the weights of the checkpoint."""
    model = build(config, state["vocab_size"], state["separator"])
    load_weights(model, state)
    if config.adapter:
        model.body.put_adapter(config)
    return model.eval()


@torch.no_grad()
def load_weights(model, state):
    """Take over what a checkpoint holds."""
    weights = own_weights(model)
    if missing := set(weights) ^ set(state["model"]):
        raise UserError(f"{state['path']} does not fit its config: {min(missing)} is in one of them only; train again")
    for name, weight in weights.items():
        weight.copy_(state["model"][name])


def start_from(model, config):
    """Begin with the weights of another run of the same size, config.init_from. COrAL may begin as a GPT, its head as the embedding."""
    state = load(Path(config.init_from) / "best.pt")
    then = {**asdict(Config()), **state["config"], "vocab_size": state["vocab_size"]}
    now = {**asdict(config), "vocab_size": model.body.vocab_size}
    if now["method"] == "coral" and then["method"] in ("gpt", "ac_gpt"):
        then["method"], state["model"]["body.lm_head"] = "coral", state["model"].get("body.wte.weight")
    size = ("vocab_size", "n_layer", "n_head", "n_embd", "lora_rank")
    for name in ("method", "sigma_positions", "tokenizer", "llm", *size):
        if then[name] != now[name]:
            raise UserError(
                f"init_from = {config.init_from} has {name} = {then[name]}, not {now[name]}: name another run"
            )
    load_weights(model, state)


def own_weights(model):
    """{name: parameter} of all that a checkpoint holds: of a language model what is trained, the rest lies in its folder."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or not hasattr(model.body, "lm")}


def open_run(*place, **how):
    """find_run and restore -> (model, config, state)."""
    config, state = find_run(*place, **how)
    return restore(config, state), config, state


# ---------------------------------------------------------------- the log of a run

LOG_COLUMNS = ("iter", "split", "loss", "lr", "tokens/s", "ms")


class Log:
    """log.csv, the lines on the screen, and loss.png."""

    def __init__(self, config, iter, quiet):
        self.path, self.config, self.quiet = Path(config.out_dir) / "log.csv", config, quiet
        if not quiet:
            rows = [row for row in read_log(self.path) if int(row["iter"]) <= iter]  # later ones will come again
            with whole_file(self.path, "w", newline="") as file:
                writer = csv.DictWriter(file, LOG_COLUMNS)
                writer.writeheader()
                writer.writerows(rows)

    def start(self, iter):
        self.since, self.time = iter, time.perf_counter()

    def row(self, **values):
        if self.quiet:
            return
        try:
            with open(self.path, "a", newline="") as file:
                csv.DictWriter(file, LOG_COLUMNS).writerow(values)
        except OSError as e:
            raise UserError(f"cannot write {self.path} ({e.strerror}): make room and --resume") from None

    def progress(self, iter, loss, lr):
        config, seconds = self.config, (time.perf_counter() - self.time) / max(1, iter - self.since)
        tokens = config.sequences_per_step * config.block_size / seconds
        self.row(iter=iter, split="train", loss=loss, lr=lr, ms=round(seconds * 1000, 1), **{"tokens/s": round(tokens)})
        if not self.quiet:
            minutes, rest = divmod(round((config.max_iters - iter) * seconds), 60)
            speed = f"{tokens:,.0f} tok/s  {seconds * 1000:.0f} ms/step  ETA {minutes}:{rest:02d}"
            print(f"step {iter}/{config.max_iters}  loss {loss:.4f}  lr {lr:.1e}  {speed}", flush=True)
        self.start(iter)

    def plot(self):
        try:
            import matplotlib
        except ImportError:
            print("no loss.png: pip install matplotlib")
            return
        matplotlib.use("agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4))
        for split, style in (("train", "-"), ("val", "o-")):
            rows = [row for row in read_log(self.path) if row["split"] == split]
            loss = [float(row["loss"]) / math.log(2) for row in rows]
            axes.plot([int(row["iter"]) for row in rows], loss, style, label=split, linewidth=1, markersize=4)
        axes.set(xlabel="step", ylabel="bits per trained token", title=Path(self.config.out_dir).name)
        axes.grid(alpha=0.3)
        axes.legend()
        with whole_file(self.path.with_name("loss.png")) as file:
            figure.savefig(file, dpi=120, bbox_inches="tight")
        plt.close(figure)


def read_log(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["split"] and row["loss"]]  # a killed run may end mid-row
