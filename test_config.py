"""Settings: what is accepted, and that each kind of mistake ends in one line that names the value and the fix."""

import dataclasses

import pytest

import checkpoint
from config import Config, UserError, load_config, parse, read_config_file, resolve_machine, whole_file


def config_of(*argv):
    paths, given, _ = parse(argv)
    return load_config(paths, given)


def test_files_and_command_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        '"""A docstring."""\nn_layer = 2\nbatch_size = 5 * 8  # arithmetic\nmax_iters = n_layer * 50\ndropout = 0\n'
    )
    config = config_of(str(file), "--n_layer=3", "--compile", "--r_max", "0.4", "--b_max=None", "--learning_rate=1")
    assert (config.n_layer, config.batch_size, config.max_iters) == (3, 40, 100)
    assert config.compile is True and config.r_max == 0.4 and config.b_max is None
    assert type(config.dropout) is float and type(config.learning_rate) is float
    assert config.out_dir == "out/mine-ac_gpt-r0.4-s1337"
    assert config_of("--compile=false").compile is False and config_of("--compile", "0").compile is False


def test_every_config_file_is_good():
    from conftest import HERE

    files = sorted((HERE / "configs").glob("*.py"))
    assert len(files) >= 6
    for file in files:
        config = config_of(str(file))
        given = read_config_file(file)
        defaults = {f.name: f.default for f in dataclasses.fields(Config)}
        assert all(given[name] != defaults[name] for name in given), f"{file.name}: only what differs from the defaults"
        assert config.out_dir.startswith(f"out/{file.stem}-")


def test_methods_are_those_there_are():
    choices = next(f for f in dataclasses.fields(Config) if f.name == "method").metadata["choices"]
    assert set(choices) == set(checkpoint.METHODS)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--n_layers=4"], ["n_layers", "did you mean 'n_layer'"]),
        (["--zzz=4"], ["zzz", "--help"]),
        (["--n_layer=four"], ["n_layer", "'four'", "int"]),
        (["--n_layer=2.5"], ["n_layer", "2.5", "int"]),
        (["--n_layer=True"], ["n_layer", "True", "int"]),
        (["--n_layer=0"], ["n_layer = 0", "at least 1"]),
        (["--n_layer"], ["--n_layer", "needs a value"]),
        (["--r_max=1.5"], ["r_max = 1.5", "at most 1"]),
        (["--seed=99999999999999999999"], ["seed", "at most"]),
        (["--r_max=nan"], ["r_max", "nan"]),
        (["--r_min=0.7"], ["r_min = 0.7", "r_max = 0.6"]),
        (["--b_min=5", "--b_max=3"], ["b_min = 5", "b_max = 3"]),
        (["--method=bert"], ["'bert'", "ac_gpt"]),
        (["--n_head=7"], ["n_embd = 768", "7 heads"]),
        (["--min_lr=1"], ["min_lr = 1.0", "learning_rate"]),
        (["--compile=maybe"], ["compile", "'maybe'", "bool"]),
        (["no/such.py"], ["no/such.py"]),
        (["a.py", "r_max=0.4"], ["one config file", "a.py r_max=0.4", "--key=value"]),
    ],
)
def test_mistakes_on_the_command_line(argv, words):
    with pytest.raises(UserError) as e:
        config_of(*argv)
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value), str(e.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("n_layers = 4", ["line 1", "did you mean 'n_layer'"]),
        ("\nn_layer = 'four'", ["n_layer", "'four'", "int"]),
        ("n_layer = four", ["line 1", "four"]),
        ("n_layer = [1][5]", ["line 1", "range"]),
        ("n_layer = 1 / 0", ["line 1", "zero"]),
        ("n_layer: int = 3", ["line 1", "assignments"]),
        ("import os", ["line 1", "assignments"]),
        ("n_layer = __import__('os').getpid()", ["line 1", "__import__"]),
        ("n_layer = = 3", ["line 1", "n_layer = 4"]),
    ],
)
def test_mistakes_in_a_file(tmp_path, text, words):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(UserError) as e:
        config_of(str(tmp_path / "c.py"))
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value), str(e.value)


def test_machine():
    import torch

    config = resolve_machine(config_of())
    assert config.device != "auto" and config.dtype != "auto"
    assert resolve_machine(config_of("--device=cpu")).dtype == "float32"
    for device in ("cuda:99", "tpu", "cpu:1"):
        with pytest.raises(UserError, match=device):
            resolve_machine(config_of(f"--device={device}"))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="cuda"):
            resolve_machine(config_of("--device=cuda"))


def test_whole_file_or_none(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError), whole_file(path, "w") as file:
        file.write("half")
        raise ValueError
    with pytest.raises(UserError, match="untouched"), whole_file(path, "w") as file:
        file.write("half")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="another folder"), whole_file(path / "below", "w"):
        pass
    with whole_file(path, "w") as file:
        file.write("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_scripts_explain_themselves(command, expect_refusal):
    for script in ("train.py", "evaluate.py", "sample.py", "prepare_data.py"):
        code, out, _ = command(script, "--help")
        assert code == 0 and "--r_max=0.6" in out and f"python {script}" in out
        expect_refusal(["rmax", "did you mean 'r_max'"], script, "--rmax=0.3")
