"""Train a model.

    python train.py configs/tiny.py                          about eight minutes on two CPU cores
    python train.py configs/tiny.py --resume                 go on from the last checkpoint as if nothing had happened
    python train.py configs/small.py --method=gpt --seed=2   any key of config.py
    torchrun --nproc_per_node=2 train.py configs/small.py    on two GPUs (or CPU processes)

Ctrl-C ends the run after the current step, with a checkpoint. All randomness of a step is derived from (seed, step), so
a resumed run repeats what an uninterrupted one would have done. Several processes share the sequences and x_c that one
would have used; only dropout is drawn by each for itself. This file knows no method: it calls model.training_loss.
"""

import contextlib
import functools
import math
import os
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import fast
import prepare_data
import sharding
from conditioning import draw_cond
from config import UserError, key, load_config, parse, resolve_machine, run
from evaluate import batches, evaluation_set


def learning_rate(config, step):
    """Linear warm-up from the lowest rate, then a cosine back to it at max_iters."""
    low, high = config.lowest_lr, config.learning_rate
    if step < config.warmup_iters:
        return low + (high - low) * step / config.warmup_iters
    done = (step - config.warmup_iters) / (config.max_iters - config.warmup_iters)
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * done))


def seed_for(*numbers):
    """One well-mixed seed out of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@functools.lru_cache(2)  # a step may reach into the next epoch
def epoch_order(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def draw_step(chunks, config, step):
    """The sequences of one optimizer step and their x_c: tokens (N, T) int64, cond (N, T) bool.

    Sorted by |x_c| and dealt like cards, to and fro, so that all micro-batches hold nearly the same number of tokens: none
    needs more memory than the others, and no process waits for another. The step's loss is the same in any order.
    """
    N = config.sequences_per_step
    where = [divmod(step * N + i, len(chunks)) for i in range(N)]
    chosen = [chunks[epoch_order(len(chunks), config.seed, e)[i]] for e, i in where]
    tokens = torch.from_numpy(np.stack(chosen).astype(np.int64))
    cond = draw_cond(config, N, torch.Generator().manual_seed(seed_for(config.seed, step, 0)))
    order = cond.sum(1).argsort(stable=True).view(config.batch_size, -1)  # (B, micro-batches)
    order[1::2] = order[1::2].flip(1)
    order = order.T.flatten()
    return tokens[order], cond[order]


def make_optimizer(model, config):
    """AdamW; weight decay on matrices, none on biases and norms."""
    kinds = {}
    for p in model.parameters():
        if p.requires_grad:
            kinds.setdefault((p.dim() >= 2, type(p.data)), []).append(p)  # shards do not go with what is whole
    groups = [{"params": ps, "weight_decay": config.weight_decay * matrices} for (matrices, _), ps in kinds.items()]
    fused = config.device.startswith(("cuda", "cpu"))
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


class Trainer:
    """A model, its optimizer and its data, at a step: `step`, `validate`, `save` and `fit`, which calls them."""

    def __init__(self, model, config, chunks, questions, state=None, rank=0, world=1):
        self.model, self.config, self.rank, self.world = model, config, rank, world
        self.chunks, self.questions = chunks, questions
        self.vocabulary = {"vocab_size": model.body.vocab_size, "separator": model.bos}
        if config.shard:
            sharding.shard(model, config.device)
        self.made_by = {"commit": checkpoint.git_commit(), "machine": checkpoint.machine_name(config)}
        self.optimizer = make_optimizer(model, config)
        self.scaler = torch.amp.GradScaler(config.device.partition(":")[0], enabled=config.dtype == "float16")
        self.iter, self.best, self.ahead = 0, math.inf, None
        if state:
            load = sharding.load_optimizer if config.shard else torch.optim.AdamW.load_state_dict
            try:
                load(self.optimizer, state["optimizer"])
            except ValueError as e:
                raise UserError(
                    f"{state['path']}: its optimizer had other parameters ({e}): give the same --shard"
                ) from None
            if state["scaler"] and self.scaler.is_enabled():  # empty unless it was trained in float16
                self.scaler.load_state_dict(state["scaler"])
            self.iter, self.best = state["iter"], state["best"]
        if config.compile:
            fast.compile_body(model.body)
        self.wrapped = DistributedDataParallel(model) if world > 1 and not config.shard else model
        self.stop = False

    def total(self, value):
        """The sum of a number over all processes."""
        if self.world == 1:
            return float(value)
        value = torch.tensor(float(value), dtype=torch.float64, device=self.config.device)
        dist.all_reduce(value)
        return value.item()

    def loss(self, model, tokens, cond, *seed):
        """Summed NLL of a micro-batch. The seed is for methods that draw orders or masks."""
        with checkpoint.autocast(self.config):
            return model(tokens, cond, torch.Generator().manual_seed(seed_for(*seed)))[0]

    def step(self):
        """One optimizer step -> its loss, in nats per trained token. The gradient is that of this very figure."""
        config = self.config
        self.model.train()
        torch.manual_seed(seed_for(config.seed, self.iter, 1 + self.rank))  # dropout's
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.iter)
        tokens, cond = self.ahead or draw_step(self.chunks, config, self.iter)
        n_trained = self.model.trained_on(cond).sum().item()  # in the whole step, all processes together
        micro_batches = batches(config, tokens, cond)[self.rank :: self.world]
        nll = 0.0
        for i, (x, c) in enumerate(micro_batches):
            wait = self.wrapped is not self.model and i + 1 < len(micro_batches)
            with self.wrapped.no_sync() if wait else contextlib.nullcontext():
                part = self.loss(self.wrapped, x, c, config.seed, self.iter, i * self.world + self.rank, 1)
                self.scaler.scale(part * self.world / n_trained).backward()  # DDP takes the mean over processes
            nll += part.detach()
        self.ahead = draw_step(self.chunks, config, self.iter + 1)  # while a GPU is still at work
        loss = self.total(nll) / n_trained
        self.scaler.unscale_(self.optimizer)
        clip = sharding.finish_gradients if config.shard else torch.nn.utils.clip_grad_norm_
        norm = clip(list(self.model.parameters()), config.grad_clip or math.inf)
        fp16 = self.scaler.is_enabled()  # overflows now and then by design; its scale collapses if it always does
        if not (math.isfinite(loss) and (self.scaler.get_scale() > 1e-3 if fp16 else math.isfinite(norm))):
            raise UserError(
                f"the loss ({loss}) or its gradient ({norm.item()}) is not finite at step {self.iter + 1}: lower "
                f"learning_rate = {config.learning_rate} or use --dtype=float32; what {config.out_dir} holds is untouched"
            )
        self.scaler.step(self.optimizer)  # in float16 it skips a step whose gradient overflowed, and lowers the scale
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.iter += 1
        return loss

    @torch.no_grad()
    def validate(self):
        """The training loss on the evaluation set, without dropout, in nats per token."""
        self.model.eval()
        tokens, cond = self.questions.tokens, self.questions.cond[self.config.law]
        parts, n = list(enumerate(batches(self.config, tokens, cond))), self.model.trained_on(cond).sum().item()
        # shards have to work together: each process takes all parts, and the total counts them `world` times
        mine, times = (parts, self.world) if self.config.shard else (parts[self.rank :: self.world], 1)
        nll = sum(self.loss(self.model, x, c, self.config.eval_seed, i) for i, (x, c) in mine)
        return self.total(nll) / n / times

    def save(self, name, **more):
        """Write a checkpoint; called by every process, since shards have to be put together."""
        weights = {name: p.detach() for name, p in checkpoint.own_weights(self.model).items()}
        state = {"iter": self.iter, "best": self.best, "config": asdict(self.config), **self.vocabulary, **self.made_by}
        state |= sharding.whole({"model": weights, **more})
        if self.rank == 0:
            checkpoint.save(Path(self.config.out_dir) / name, state)

    def validate_and_save(self, log):
        """Validate, and write best.pt (weights) if it is the best so far, then ckpt.pt (all that resuming needs)."""
        loss = self.validate()
        log.row(iter=self.iter, split="val", loss=loss)
        if better := loss < self.best:
            self.best = loss
            self.save("best.pt")
        self.save_for_resuming()
        if self.rank == 0:
            print(
                f"step {self.iter}: validation loss {loss:.4f}, {loss / math.log(2):.4f} bits per token"
                + ", the best" * better
            )

    def save_for_resuming(self):
        self.save("ckpt.pt", optimizer=self.optimizer.state_dict(), scaler=self.scaler.state_dict())

    def end_early(self, signum, frame):
        """Signal handler: finish the step, save, end. A second signal ends at once."""
        self.stop = True
        signal.signal(signum, signal.SIG_DFL)
        if self.rank == 0:
            print(f"finishing step {self.iter + 1}, then saving; once more to stop at once", flush=True)

    def fit(self, log):
        """Train up to max_iters, or until a signal asks for an early end."""
        config, saved_at = self.config, self.iter
        log.start(self.iter)
        while self.iter < config.max_iters and not self.stop:
            try:
                loss = self.step()
            except Exception as e:  # torch.compile's have many bases; others are passed on
                if not (config.compile and "torch._" in f"{type(e).__module__}"):
                    raise
                why = str(e).splitlines()[0][:80]
                raise UserError(f"torch.compile failed ({why}): run with --compile=False") from None
            if self.iter % config.log_interval == 0:
                log.progress(self.iter, loss, learning_rate(config, self.iter - 1))
            if self.iter % config.eval_interval == 0 or self.iter == config.max_iters:
                self.validate_and_save(log)
                saved_at = self.iter
                log.start(self.iter)
            self.stop = bool(self.total(self.stop))  # all processes end at the same step
        if saved_at < self.iter:
            self.save_for_resuming()
            if self.rank == 0:
                print(f"stopped after step {self.iter}; go on with --resume")


# ---------------------------------------------------------------- set-up


@dataclass
class Options:
    resume: bool = key(False, "short for --init_from=resume")
    overwrite: bool = key(False, "replace the run in out_dir")


def claim_folder(config, overwrite, resume):
    """Refuse an out_dir that holds a run, unless it is to be resumed or replaced."""
    folder = Path(config.out_dir)
    if not resume and not overwrite and any(folder.glob("*.pt")):
        raise UserError(f"{folder} holds a run: go on with --resume, replace it with --overwrite, or give --out_dir")
    # Resuming leaves all but what a kill in the middle of writing left behind.
    for pattern in ("*.tmp",) if resume else ("*.tmp", "*.pt", "log.csv", "loss.png", "eval_*.json", "samples_*.jsonl"):
        for file in folder.glob(pattern):
            file.unlink()


def set_up(paths, given, options, rank=0, world=1):
    """Find everything that could be wrong before the first step -> (trainer, log)."""
    config = resolve_machine(load_config(paths, given))
    state = None
    if config.init_from == "resume":
        if options.overwrite:
            raise UserError("--resume goes on with a run, --overwrite replaces it: give one of them")
        place = paths[0] if paths else config.out_dir
        model, config, state = checkpoint.open_run(place, given, "ckpt.pt", to_resume=True)
        config = replace(config, init_from=state["config"]["init_from"])  # where it began
    if config.adapter:
        raise UserError("--adapter is for evaluate.py and sample.py: leave it out")
    if config.shard and world == 1:
        raise UserError("shard = True needs several processes: start it by torchrun --nproc_per_node=...")
    if config.gradient_accumulation_steps % world:
        steps = f"gradient_accumulation_steps = {config.gradient_accumulation_steps}"
        raise UserError(f"{steps} does not split over {world} processes: make it a multiple")
    if rank == 0:
        prepare_data.prepare_if_missing(config)
    if world > 1:
        dist.barrier()
    chunks, questions = prepare_data.read_chunks(config, "train"), evaluation_set(config, "val")
    if not state:
        meta = prepare_data.read_meta(config)
        model = checkpoint.build(config, meta["vocab_size"], meta["separator"])
        if config.init_from != "scratch":
            checkpoint.start_from(model, config)
    trainer = Trainer(model, config, chunks, questions, state, rank, world)
    if rank == 0:
        claim_folder(config, options.overwrite, resume=bool(state))
    return trainer, checkpoint.Log(config, trainer.iter, quiet=rank > 0)


def describe(trainer):
    config, chunks = trainer.config, trainer.chunks
    N = config.sequences_per_step
    print(config)
    print(
        f"{config.method}: {sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f}M parameters on {config.device}, "
        f"{config.dtype}; {N} of {len(chunks):,} sequences a step, {config.max_iters * N / len(chunks):.2f} epochs"
    )


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    if options.resume:
        given["init_from"] = "resume"
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    if world > 1:
        machine = resolve_machine(load_config(paths, given))
        if machine.device == "cuda":
            given["device"] = f"cuda:{os.environ['LOCAL_RANK']}"
            resolve_machine(load_config(paths, given))  # more processes than GPUs?
            torch.cuda.set_device(given["device"])
        dist.init_process_group("nccl" if machine.device.startswith("cuda") else "gloo")
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        trainer, log = set_up(paths, given, options, rank, world)
        for number, _ in before:
            signal.signal(number, trainer.end_early)
        if rank == 0:
            describe(trainer)
        trainer.fit(log)
        if rank == 0:
            log.plot()
            best = f"lowest validation loss {trainer.best:.4f}" if trainer.best < math.inf else "not validated yet"
            print(f"{trainer.config.out_dir}: step {trainer.iter} of {trainer.config.max_iters}, {best}")
        if world > 1:
            dist.barrier()  # nobody leaves while another one still writes
        return trainer
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        if world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
