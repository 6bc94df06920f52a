"""Scores of generated text: how much of the original it restores, and MAUVE (Pillutla et al., 2021).

    python sample.py out/A --protocol=paper --n=241                          draws the samples
    python evaluate.py out/A out/B --samples                                 share of tokens restored, bits of what was drawn
    python evaluate.py out/A --mauve --mauve_model=gpt2-large      and MAUVE, by the package mauve-text

MAUVE compares two sets of texts as points in the feature space of a language model: 1 where they fall alike into the clusters, near 0
where not. It depends on that model, on how many texts there are and on the clusters, so it comes with two figures that show its
scale: of the originals that the samples replace, and of these with their words in random order, each against the same reference.
This file samples nothing.
"""

import hashlib
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import sample
from checkpoint import autocast, open_run
from config import UserError, whole_file
from evaluate import evaluation_set, mean_and_error, questions_of
from prepare_data import encode, file_sha256, get_tokenizer, read_chunks, read_meta

# ---------------------------------------------------------------- the samples


def read_samples(path, asked, checkpoint):
    """The samples of a file as tokens (n, T), known (n, T), log_p: list; UserError unless they answer this evaluation set, and are
    by this checkpoint (a hash).
    """
    samples = sample.read_samples(path, {"evaluation_set": asked.hash, "checkpoint": checkpoint})
    if not samples or [s["i"] for s in samples] != list(range(len(samples))):
        raise UserError(f"{path}: not all samples are there: draw them again with sample.py --protocol")
    tokens = torch.tensor([s["tokens"] for s in samples])
    known = torch.zeros_like(tokens, dtype=torch.bool)
    for row, s in zip(known, samples):
        for a, b in s["known"]:
            row[a:b] = True
    return tokens, known, [s["log_p"] for s in samples]


def restored(tokens, known, originals):
    """Share of the unknown tokens that are what they were, and its standard error: tokens, known, originals (n, T)."""
    unknown = ~known
    return mean_and_error(((tokens == originals) & unknown).sum(1).double(), unknown.sum(1).double())


# ---------------------------------------------------------------- MAUVE


def references(config, n):
    """The texts with which MAUVE compares, and what they are (paper, Appendix A): of WikiText-103 the first 200 paragraphs of the test
    split that are at least T tokens long, of FineWeb 1000 documents; of other data n sequences of the test split.
    """
    T, tokenizer, meta = config.block_size, get_tokenizer(config.tokenizer), read_meta(config)

    def documents(split, start=0):
        """All documents that begin and end in the split, past a token, without their separators."""
        tokens = np.asarray(read_chunks(config, split)).ravel()[start:]
        parts = np.split(tokens, (tokens == meta["separator"]).nonzero()[0] + 1)
        return [part[:-1] for part in parts[bool(start) : -1] if len(part) > 1]

    if config.dataset == "fineweb":
        found, about = documents("val", 1_024_000)[:1000], "validation documents past token 1,024,000"
    elif config.dataset == "wikitext103":
        rows = documents("test")
        found, about = [row for row in rows if len(row) >= T][:200], f"test paragraphs of at least {T} tokens"
        if len(found) < 200:
            texts = [tokenizer.decode(row.tolist()) for row in rows]
            heads = [i for i, text in enumerate(texts) if re.match(r" = [^=]+ = \n", text)]
            articles = [np.concatenate(rows[a:b]) for a, b in zip(heads, [*heads[1:], len(rows)])]
            about = f"test articles of at least {T} tokens (of such paragraphs there are {len(found)} only)"
            found = [article for article in articles if len(article) >= T][:200]
    else:
        split = "test" if "test" in meta["tokens"] else "val"
        about = f"sequences of the {split} split" + ", which are the originals themselves" * (split == "val")
        found = evaluation_set(config, split).tokens[:n].numpy()
    return [tokenizer.decode(ids[:T].tolist()) for ids in found], about


def feature_model(name, device):
    """A function text -> feature (d,): the last hidden state of a causal language model at the last token of the text.

    name: a run folder of ours (GPT or AC-GPT), or what transformers can load: a folder, or a model of the hub.
    """
    if (Path(name) / "best.pt").exists():
        model, config, _ = open_run(name, {"device": device})
        if config.method not in ("gpt", "ac_gpt"):
            raise UserError(f"--mauve_model={name} is of the method {config.method}: take a gpt or ac_gpt run")
        tokenizer = get_tokenizer(config.tokenizer)

        def feature(text):
            tokens = torch.tensor([[model.bos, *encode(tokenizer, text)[: config.block_size - 1]]])
            positions = torch.arange(tokens.size(1))
            with autocast(config):
                return model.body(*model.moved(tokens[0], positions), [(0, tokens.size(1))])[-1]

        return feature
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise UserError("--mauve_model: a model of the hub needs a package: pip install transformers") from None
    try:
        tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).to(device).eval()
    except (OSError, ValueError) as e:
        raise UserError(f"--mauve_model={name} cannot be loaded ({f'{e}'.strip()[:80].splitlines()[0]}): give a run folder of "
                        "ours, a folder of transformers, or go online once") from None  # fmt: skip

    longest = min(1024, getattr(model.config, "max_position_embeddings", 1024))

    def feature(text):
        inputs = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt").to(device)
        return model(**inputs).last_hidden_state[0, -1]

    return feature


class Mauve:
    """MAUVE against the references of a data set; k-means as in the paper: 500 iterations, 5 restarts."""

    SEEDS = (0, 1, 2)

    def __init__(self, config, name, n, buckets):
        try:
            from mauve import compute_mauve
        except ImportError:
            raise UserError("--mauve needs a package: pip install mauve-text") from None
        self.compute, self.name = compute_mauve, name
        texts, self.about = references(config, n)
        self.n, self.buckets = len(texts), buckets or max(2, round(min(len(texts), n) / 10))
        if min(len(texts), n) < self.buckets:
            fix = "draw more samples, or give fewer buckets by --mauve_buckets"
            raise UserError(
                f"{self.buckets} buckets need as many samples and references; there are {n} and {len(texts)}: {fix}"
            )
        self.model = feature_model(name, config.device)
        self.reference = self.features(texts, config.data_folder)

    @torch.no_grad()
    def features(self, texts, cache=None):
        """(n, d); those of the references are kept in the folder `cache`."""
        about = [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(Path(self.name).glob("*"))
        ]
        key = hashlib.sha256(json.dumps([self.name, about, texts]).encode()).hexdigest()[:12]
        path = cache and os.access(cache, os.W_OK) and cache / f"mauve_{key}.npy"
        if path and path.exists():
            return np.load(path)
        found = np.stack(
            [self.model(text).float().cpu().numpy() for text in tqdm(texts, "features", leave=False, disable=None)]
        )
        if path:
            with whole_file(path) as file:
                np.save(file, found)
        return found

    def score(self, texts):
        """Mean over the seeds of k-means, and standard deviation."""
        features = self.features(texts)
        found = [
            self.compute(p_features=self.reference, q_features=features, num_buckets=self.buckets, kmeans_num_redo=5,
                         kmeans_max_iter=500, seed=seed).mauve for seed in self.SEEDS
        ]  # fmt: skip
        return float(np.mean(found)), float(np.std(found, ddof=1))


def shuffled(text, seed):
    words = text.split()
    return " ".join(np.random.default_rng(seed).permutation(words).tolist())


# ---------------------------------------------------------------- the table


def score_samples(config, state, path, mauve=None):
    """All that is to be said of a run's file of samples -> dict."""
    asked, tokenizer = evaluation_set(config, "val"), get_tokenizer(config.tokenizer)
    tokens, known, log_p = read_samples(path, asked, file_sha256(state["path"])[:16])
    share, error = restored(tokens, known, asked.tokens[: len(tokens)])
    unknown = int((~known).sum())
    bits = None if None in log_p else -sum(log_p) / unknown / math.log(2)
    score = {"file": path.name, "n": len(tokens), "tokens": unknown, "restored": share, "stderr": error, "bits": bits}
    if mauve:
        score["mauve"], score["mauve_std"] = mauve.score([tokenizer.decode(row) for row in tokens.tolist()])
    return score


def print_samples(runs, options):
    """Of all files of samples in the runs, (config, state) each, a line."""
    files = [(*run, path) for run in runs for path in sorted(Path(run[0].out_dir).glob("samples_*.jsonl"))]
    if not files:
        raise UserError(f"{runs[0][0].out_dir} holds no samples: draw them with sample.py --protocol=paper --n=...")
    questions_of(runs, "val")
    config, numbers = files[0][0], {path.read_bytes().count(b"\n") for *_, path in files}
    n = min(numbers)
    if options.mauve and len(numbers) > 1:
        raise UserError(
            f"--mauve: the files hold {', '.join(map(str, sorted(numbers)))} samples: draw as many for each"
        )
    mauve = Mauve(config, options.mauve_model, n, options.mauve_buckets) if options.mauve else None
    names = [f"{Path(config.out_dir).name}, {path.stem.removeprefix('samples_')}" for config, _, path in files]
    width = max(map(len, names))
    title = f"{'':{width}}{'n':>6}{'tokens':>9}{'restored':>18}{'bits per token':>16}"
    print(title + f"{'MAUVE':>18}" * bool(mauve))

    def line(name, n, tokens="", share="", bits="", score=None):
        found = f"{score[0]:.3f} +- {score[1]:.3f}".rjust(18) if score else ""
        print(f"{name:{width}}{n:6}{tokens:>9}{share:>18}{bits:>16}{found}", flush=True)

    for name, (config, state, path) in zip(names, files):
        s = score_samples(config, state, path, mauve)
        share, bits = f"{s['restored']:.2%} +- {s['stderr']:.2%}", "-" if s["bits"] is None else f"{s['bits']:.3f}"
        line(name, s["n"], s["tokens"], share, bits,
             mauve and (s["mauve"], s["mauve_std"]))  # fmt: skip
    if mauve:
        tokenizer = get_tokenizer(config.tokenizer)
        texts = [tokenizer.decode(row) for row in evaluation_set(config, "val").tokens[:n].tolist()]
        line("the originals", n, score=mauve.score(texts))
        line("the originals, words shuffled", n, score=mauve.score([shuffled(text, i) for i, text in enumerate(texts)]))
        print(
            f"MAUVE against {mauve.n} {mauve.about}; features of {mauve.name}, {mauve.buckets} buckets, mean and standard "
            f"deviation over k-means seeds {', '.join(map(str, mauve.SEEDS))}"
            + "; of so few texts it tells large differences only"
            * (n < 1000)
        )
