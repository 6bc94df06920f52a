"""Every setting of the project: its name, type, default and range, once.

A config file is plain Python assignments, `n_layer = 4`; the command line overrides single keys, `--n_layer=6`:

    python train.py configs/tiny.py --r_max=0.4 --seed=2
    python train.py --help

Unknown names, wrong types and values out of range end in one line and exit code 2, before any work is done. This file
also holds what every script needs for that: UserError, its one handler `run`, and files that are written whole or not
at all. It does not build, read or train anything.
"""

import ast
import contextlib
import dataclasses
import difflib
import gc
import os
import sys
import textwrap
import typing
from dataclasses import dataclass
from pathlib import Path


class UserError(Exception):
    """Something that the user can mend: the message names the value and the fix in one line."""


def key(default, help, low=None, high=None, choices=None, fixed=None):
    """A dataclass field that is also a setting. `fixed`: a checkpoint allows one value only, "model" always, "run" when
    training goes on from it.
    """
    about = {"help": help, "low": low, "high": high, "choices": choices, "fixed": fixed}
    return dataclasses.field(default=default, metadata=about)


METHOD_NAMES = ("gpt", "ac_gpt", "sigma_temporal", "sigma_random", "mlm", "diffusion")  # of the comparison


@dataclass
class Config:
    """The defaults are the paper's Small model and the recipe of its authors' scripts, on the text that needs no download."""

    # data
    dataset: str = key(
        "sotu", "sotu, wikitext103, fineweb, product, reverse, or the name given to prepare_data.py", fixed="run"
    )
    tokenizer: str = key(
        "bytes", "tokenizer of the data: bytes, gpt2, hf:FOLDER_OR_NAME of transformers", fixed="model"
    )
    data_dir: str = key("data", "folder of the prepared data sets")
    block_size: int = key(1024, "T, body tokens of a sequence", low=1, fixed="model")
    # method
    method: str = key("ac_gpt", "what is trained", choices=(*METHOD_NAMES, "coral"), fixed="model")
    sigma_positions: str = key(
        "dual", "how sigma-GPT is told its two positions (baselines.py)", choices=("dual", "query"), fixed="model"
    )
    law: str = key("training", "the law (distribution) of x_c in training, by its name in conditioning.py", fixed="run")
    r_min: float = key(0.0, "smallest share of known tokens", low=0, high=1, fixed="run")
    r_max: float = key(0.6, "largest share of known tokens", low=0, high=1, fixed="run")
    b_min: int = key(1, "fewest blocks of known tokens", low=1, fixed="run")
    b_max: int | None = key(None, "most blocks of known tokens; None: |x_c|", low=1, fixed="run")
    mix: float = key(0.0, "share of training sequences with empty x_c", low=0, high=1, fixed="run")
    prompt_length: int = key(0, "law = 'prompt': known tokens at the start", low=0, fixed="run")
    # coral.py
    stage: str = key("0", "coral: what is trained", choices=("0", "1", "2a", "2b"), fixed="run")
    k_f: int = key(4, "coral: how far ahead it predicts", low=1, high=64, fixed="run")
    k_b: int = key(8, "coral: how far behind it reconstructs", low=0, fixed="run")
    granularity: int = key(4, "coral: tokens of a patch to be spoilt", low=1, fixed="run")
    ratio: float = key(0.25, "coral: share of patches that are spoilt", low=0, high=1, fixed="run")
    corruption: str = key(
        "fixed",
        "coral: granularity and ratio as given, or drawn for each sequence",
        choices=("fixed", "drawn"),
        fixed="run",
    )
    # model
    n_layer: int = key(6, "Transformer blocks", low=1, fixed="model")
    n_head: int = key(12, "attention heads", low=1, fixed="model")
    n_embd: int = key(768, "width", low=1, fixed="model")
    dropout: float = key(0.1, "dropout in training; of an llm, in its adapter", low=0, high=1)
    llm: str | None = key(
        None, "instead of these: a folder of transformers or a name on the hub (llm.py)", fixed="model"
    )
    lora_rank: int = key(16, "llm: rank of the LoRA adapter; 0: all weights are trained", low=0, fixed="model")
    lora_alpha: float = key(32.0, "llm: scale of the adapter, times 1 / rank", low=0, fixed="model")
    lora_targets: str = key(
        "all-linear", "llm: the layers with an adapter, by their names with commas between", fixed="model"
    )
    adapter: str | None = key(None, "llm, not in training: an adapter of peft in place of the run's own")
    shard: bool = key(False, "llm: share out the weights over the processes of torchrun (sharding.py)")
    gradient_checkpointing: bool = key(False, "llm: less memory, a third more time")
    # optimisation
    batch_size: int = key(8, "sequences of a micro-batch", low=1)
    gradient_accumulation_steps: int = key(16, "micro-batches of a step, over all processes together", low=1)
    max_iters: int = key(18200, "optimizer steps", low=1)
    learning_rate: float = key(5e-4, "largest learning rate, reached after the warm-up", low=0)
    min_lr: float | None = key(None, "learning rate at the start and at the end; None: learning_rate / 10", low=0)
    warmup_iters: int = key(2000, "steps of linear warm-up; a cosine follows", low=0)
    weight_decay: float = key(0.1, "AdamW's weight decay, on matrices only", low=0, fixed="run")
    beta1: float = key(0.9, "AdamW's beta1", low=0, high=0.99999, fixed="run")
    beta2: float = key(0.999, "AdamW's beta2", low=0, high=0.99999, fixed="run")
    grad_clip: float = key(1.0, "largest norm of the gradient; 0: no clipping", low=0)
    init_from: str = key("scratch", "scratch; resume: go on from ckpt.pt; or a run folder, whose weights to start from")
    # evaluation
    eval_interval: int = key(500, "steps between validations, each followed by a checkpoint", low=1)
    eval_sequences: int | None = key(None, "sequences of the evaluation set; None: the whole split", low=1)
    mlm_sequences: int = key(40, "sequences on which MLM is evaluated, which takes a pass for each token", low=1)
    eval_seed: int = key(2026, "seed of the evaluation set, for every run the same", low=0, high=2**32 - 1, fixed="run")
    log_interval: int = key(10, "steps between progress lines", low=1)
    # machine
    seed: int = key(
        1337, "seed of initial weights, order of sequences, x_c and dropout", low=0, high=2**32 - 1, fixed="run"
    )
    out_dir: str | None = key(None, "folder of the run; None: out/<config>-<method>-r<r_max>-s<seed>")
    device: str = key("auto", "cpu, cuda, cuda:1, mps; auto: cuda > mps > cpu")
    dtype: str = key(
        "auto",
        "compute precision; auto: bfloat16 on newer CUDA cards, float16 on older ones, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    compile: bool = key(False, "torch.compile the Transformer")

    def __post_init__(self):
        check(self)
        if self.r_min > self.r_max:
            raise UserError(f"r_min = {self.r_min} is larger than r_max = {self.r_max}: swap them")
        if self.b_max is not None and self.b_min > self.b_max:
            raise UserError(f"b_min = {self.b_min} is larger than b_max = {self.b_max}: swap them")
        if self.prompt_length >= self.block_size:
            raise UserError(
                f"prompt_length = {self.prompt_length} leaves nothing of block_size = {self.block_size}: lower it"
            )
        if self.method == "coral" and (self.law != "prompt" or self.r_max > 0):
            raise UserError(
                f"method = 'coral' knows a prompt alone: give law = 'prompt' and r_max = 0, not {self.law!r}, {self.r_max}"
            )
        if self.method == "coral" and self.compile:
            raise UserError("compile = True does nothing for method = 'coral': leave it out")
        if self.n_embd % (2 * self.n_head):
            raise UserError(
                f"n_embd = {self.n_embd} does not split into {self.n_head} heads of even width: "
                f"take n_head from the divisors of {self.n_embd // 2}"
            )
        if self.method.startswith("sigma") and self.sigma_positions == "dual" and self.n_embd < 4 * self.n_head:
            raise UserError(f"n_head = {self.n_head}: 'dual' needs heads of width 4 at least; lower it")
        if self.tokenizer not in ("bytes", "gpt2") and not self.tokenizer.startswith("hf:"):
            raise UserError(f"tokenizer = {self.tokenizer!r} is unknown: choose from bytes, gpt2, hf:FOLDER_OR_NAME")
        if self.llm and self.method not in ("gpt", "ac_gpt"):
            raise UserError(f"method = {self.method!r} is not for an llm: choose from gpt, ac_gpt")
        for name in ("shard", "adapter", "gradient_checkpointing"):
            if getattr(self, name) and not self.llm:
                raise UserError(f"{name} = {getattr(self, name)!r} is for language models only (llm): leave it out")
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            raise UserError(f"min_lr = {self.min_lr} is larger than learning_rate = {self.learning_rate}: lower it")

    @property
    def variant(self):
        """The method, and the position scheme where it is not the usual one."""
        query = self.method.startswith("sigma") and self.sigma_positions == "query"
        return self.method + "_query" * query

    @property
    def data_folder(self):
        tokenizer = self.tokenizer.removeprefix("hf:").strip("/").replace("/", "--")
        return Path(self.data_dir) / f"{self.dataset}-{tokenizer}"

    @property
    def sequences_per_step(self):
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def lowest_lr(self):
        return self.learning_rate / 10 if self.min_lr is None else self.min_lr

    def __str__(self):
        pairs = "  ".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())
        return textwrap.fill(pairs, 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


FIXED = {f.name: f.metadata["fixed"] for f in dataclasses.fields(Config) if f.metadata["fixed"]}

# ---------------------------------------------------------------- checking values


def kinds_of(settings):
    """{name: tuple of allowed types} of a dataclass of keys."""
    hints = typing.get_type_hints(settings)
    return {name: typing.get_args(hint) or (hint,) for name, hint in hints.items()}


def check(settings):
    """Raise UserError unless every value has its type and lies in its range; turn 1 into 1.0 or True where asked."""
    kinds = kinds_of(type(settings))
    for field in dataclasses.fields(settings):
        name, value, about = field.name, getattr(settings, field.name), field.metadata
        if float in kinds[name] and type(value) is int:
            value = float(value)
        if bool in kinds[name] and value in (0, 1):
            value = bool(value)
        setattr(settings, name, value)
        if type(value) not in kinds[name]:
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds[name])
            raise UserError(f"{name} = {value!r} is of type {type(value).__name__}: give {wanted} ({about['help']})")
        if about["choices"] and value not in (None, *about["choices"]):
            raise UserError(f"{name} = {value!r} is unknown: choose from {', '.join(about['choices'])}")
        if value is not None and (about["low"] is not None and not value >= about["low"]):
            raise UserError(f"{name} = {value} is too small: give at least {about['low']} ({about['help']})")
        if value is not None and (about["high"] is not None and not value <= about["high"]):
            raise UserError(f"{name} = {value} is too large: give at most {about['high']} ({about['help']})")


def known_or_complain(name, allowed, where):
    if name not in allowed:
        close = difflib.get_close_matches(name, allowed, 1)
        hint = f"did you mean {close[0]!r}?" if close else "see --help for all names"
        raise UserError(f"{where}: unknown key {name!r}; {hint}")


# ---------------------------------------------------------------- reading files and the command line


def read_config_file(path):
    """{name: value} from a file of assignments. Values may do arithmetic and use the names assigned before them."""
    try:
        tree = ast.parse(Path(path).read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read the config file {path}: {getattr(e, 'strerror', None) or e}") from None
    except SyntaxError as e:
        raise UserError(f"{path}, line {e.lineno}: {e.msg}; a config is lines like: n_layer = 4") from None
    given = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        where = f"{path}, line {node.lineno}"
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise UserError(f"{where}: a config holds assignments only, like: n_layer = 4")
        name = node.targets[0].id
        known_or_complain(name, kinds_of(Config), where)
        try:
            given[name] = eval(compile(ast.Expression(node.value), str(path), "eval"), {"__builtins__": {}}, given)
        except (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError) as e:
            raise UserError(f"{where}: {name} has no value: {e}") from None
    return given


def read_text_value(name, text, kinds):
    """The value that a command-line text stands for, given the types that its key may have."""
    if str in kinds:
        return None if text == "None" and type(None) in kinds else text
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text  # `check` will name it


def parse(argv, options=None, doc=""):
    """Split a command line into (paths, given, options).

    paths: the arguments without `--`. given: {name: value} of the Config keys on the command line, and of no others.
    options: an instance of the script's own dataclass of keys, checked. Keys are written --key=value or --key value; booleans may be bare.
    """
    own = kinds_of(options) if options else {}
    kinds = {**kinds_of(Config), **own}
    if "--help" in argv or "-h" in argv:
        print_help(doc, options)
        sys.exit(0)
    paths, given, chosen = [], {}, {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            paths.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        known_or_complain(name, kinds, "command line")
        if not equals:
            bare = bool in kinds[name] and (not rest or rest[0].lower() not in ("true", "false", "0", "1"))
            if not bare and not rest:
                raise UserError(f"command line: --{name} needs a value: --{name}=...")
            text = "True" if bare else rest.pop(0)
        (chosen if name in own else given)[name] = read_text_value(name, text, kinds[name])
    if options:
        options = options(**chosen)
        check(options)
    return paths, given, options


def task_of(options, takes):
    """Which of several tasks a script's options ask for, None for its usual one. takes: {task: names of the options that go with it}.
    UserError for two tasks at once, and for an option that does not go with the task.
    """
    changed = [field.name for field in dataclasses.fields(options) if getattr(options, field.name) != field.default]
    asked = [name for name in takes if name in changed]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} ask for different things: give one of them")
    task = asked[0] if asked else None
    for name in changed:
        if name != task and name not in takes[task]:
            others = " or ".join(f"--{other}" for other in takes if other and name in takes[other])
            elsewhere = f", but with {others}" * bool(others)
            raise UserError(
                f"--{name} does nothing {f'with --{task}' if task else 'alone'}{elsewhere}: change the one or the other"
            )
    return task


def load_config(paths, given):
    """The Config of one config file or none, changed by the keys given on the command line, with out_dir filled in."""
    if len(paths) > 1:
        raise UserError(f"one config file, not {' '.join(paths)} (keys are written --key=value, text goes in quotes)")
    config = Config(**{**(read_config_file(paths[0]) if paths else {}), **given})
    if config.out_dir is None:
        name = Path(paths[0]).stem if paths else "default"
        config.out_dir = f"out/{name}-{config.variant}-r{config.r_max:g}-s{config.seed}"
    return config


def print_help(doc, options):
    print(doc.strip())
    for title, settings in (("Options", options), ("Keys (of config files too)", Config)):
        if settings:
            print(f"\n{title}:")
            for field in dataclasses.fields(settings):
                choices = field.metadata["choices"]
                text = field.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
                print(
                    textwrap.fill(f"  --{field.name}={field.default}".ljust(36) + text, 118, subsequent_indent=" " * 36)
                )


# ---------------------------------------------------------------- the machine


def resolve_machine(config):
    """A copy of the config in which device and dtype are what this machine will use; UserError if it lacks them."""
    import torch

    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    device = config.device if config.device != "auto" else next(d for d in ("cuda", "mps", "cpu") if has[d])
    kind, _, index = device.partition(":")
    if not has.get(kind) or (index and not (index.isdigit() and int(index) < torch.cuda.device_count())):
        here = ", ".join(name for name in has if has[name])
        raise UserError(f"device = {config.device!r} is not available; this torch ({torch.__version__}) has: {here}")
    new_card = kind == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    dtype = config.dtype
    if dtype == "auto":
        dtype = {"cuda": "bfloat16" if new_card else "float16"}.get(kind, "float32")
    if dtype == "bfloat16" and kind == "cuda" and not new_card:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"dtype = 'bfloat16' is not supported by {name}: use --dtype=float16 or float32")
    return dataclasses.replace(config, device=device, dtype=dtype)


# ---------------------------------------------------------------- endings: files, errors


@contextlib.contextmanager
def whole_file(path, mode="wb", **how):
    """Open a temporary file that takes the place of `path` when the block ends well; else `path` stays as it was."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, **how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        fix = "make room or choose another folder; what was there before is untouched"
        raise UserError(f"cannot write {path} ({e.strerror}): {fix}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def run(main):
    """Run a script's main(argv): a UserError becomes one line and exit code 2."""
    try:
        main(sys.argv[1:])
        gc.collect()  # what holds on to a process group has to go before the interpreter does
    except UserError as e:
        print(f"{Path(sys.argv[0]).name}: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `python sample.py ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
