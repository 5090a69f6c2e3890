"""`python -m jax_fp8 generate`: a checkpoint generates, as it was trained; what cannot be is one sentence."""

import dataclasses
import re

import huggingface as oracle
import jax
import numpy as np
import pytest
import tokenizers

import jax_fp8 as fp8
from jax_fp8 import cli
from jax_fp8.run import checkpoints, generate, job, resuming, settings, trained
from jax_fp8.run.encoders import ByteEncoder, LibraryEncoder

CONFIG = fp8.GPTConfig(vocab_size=256, num_layers=1, num_heads=2, hidden_size=32, max_seq_len=16)


SPEED = r"first token after \d+\.\d s, then [\d,]+\.\d tokens/s\n"


@pytest.fixture
def save(tmp_path):
    """Save a run that has not been trained, in a folder of its own."""

    def save(name, tokenizer="bytes", identity="bytes", **options):
        chosen = dataclasses.replace(settings.defaults("tiny"), tokenizer=tokenizer, **options)
        model = job.make_model(chosen, CONFIG, chosen.recipe)
        variables = jax.jit(model.init)(jax.random.key(1), np.zeros((1, 16), np.int32))
        # So large that logits count beside the noise that tokens are drawn with, and scales that are not those of init.
        variables = jax.tree.map(lambda leaf: 10 * leaf, variables)
        state = fp8.TrainState.create(variables=variables, tx=fp8.fused_adamw(1e-3))
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        with checkpoints.Checkpoints(run / "checkpoints", 1, 2, False) as kept:
            kept.save(3, state, resuming.describe_run(chosen, CONFIG, identity, "text"))
        return run, model, variables

    return save


@pytest.fixture
def write(tmp_path, monkeypatch, capsys):
    """The exit status, and what is printed."""
    monkeypatch.chdir(tmp_path)

    def write(*arguments):
        status = generate.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return write


def test_a_model_writes_as_it_was_saved(save, write):
    """With its params and its scales, which a program that has them says as well; and nothing of the run changes."""
    run, model, variables = save("mine", fast=True, fp8_head=True)
    unfinished = run / "checkpoints/6.orbax-checkpoint-tmp-0"  # what the run is just writing
    unfinished.mkdir()
    before = sorted(run.rglob("*"))
    status, text, said = write("mine", "--prompt", "naïv", "--tokens", 12, "--temperature", 0)
    assert status == 0 and re.fullmatch("runs/mine after step 3, delayed\n" + SPEED, said)
    prompt = np.frombuffer("naïv".encode(), np.uint8)[None]
    expected = fp8.generate(model, variables, prompt, max_new_tokens=12)
    assert text == ByteEncoder().decode(expected[0]) + "\n"
    assert sorted(run.rglob("*")) == before
    other = fp8.generate(
        model, {**variables, "params": jax.tree.map(np.sin, variables["params"])}, prompt, max_new_tokens=12
    )
    assert (other != expected).any()  # negative control: other params write something else

    loaded = trained.load(run)
    assert (loaded.model.recipe, loaded.model.head_recipe) == (model.recipe, fp8.CurrentScaling())
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, variables)

    drawn = [
        write(run, "--prompt", "naïv", "--top-k", 40, "--top-p", 0.9, "--seed", seed, "--tokens", 12)[1]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    said = write(run, "--prompt", "naïv", "--weights", "fp8")[2]
    assert "--weights fp8 is for models that are no runs, got the run" in said
    status, text, said = write(run, "--prompt", "naïv", "--tokens", 13)
    assert (status, text) == (2, "")
    assert "fit into the 16 tokens that the model can read, got 5 and 13; ask for at most 12" in said
    assert "give a shorter prompt" in write(run, "--prompt", 17 * "a")[2]


def test_the_tokenizer_is_the_runs(save, write, book, tmp_path):
    encoder = LibraryEncoder.trained_on(book.read_bytes(), 256 + 20, tmp_path)
    run, *_ = save("mine", tokenizer="bpe", identity=encoder.identity, recipe="bf16")
    arguments = ["mine", "--prompt", "model", "--tokens", "3"]
    assert "tokenizer.json must have the tokenizer of the run, got no such file" in write(*arguments)[2]
    (run / "tokenizer.json").write_text(encoder.text())
    assert write(*arguments)[0] == 0
    other = LibraryEncoder.trained_on(book.read_bytes(), 256 + 10, tmp_path)
    (run / "tokenizer.json").write_text(other.text())
    assert "must be the tokenizer of the checkpoint, got another one" in write(*arguments)[2]


def test_a_model_of_hugging_face_writes(write, book, tmp_path):
    """From its folder, and from the file that it is converted to; the tokenizer lies beside."""
    described = oracle.LLAMA | {"vocab_size": oracle.VOCAB}
    folder = oracle.write_folder(tmp_path / "theirs", described, oracle.random_tensors(described, "bfloat16"))
    arguments = ["--prompt", "AB", "--tokens", "12", "--temperature", "0"]
    status, _, said = write(folder, *arguments)
    assert status == 2 and f"{folder / 'tokenizer.json'} must have the tokenizer of the model, got no such file" in said
    # Every byte that a text may have must be one of the model's tokens: so few are a tokenizer of words.
    words = {chr(65 + i): i for i in range(oracle.VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "A"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))

    status, text, said = write(folder, *arguments)
    assert status == 0 and re.fullmatch(re.escape(f"{folder}, bf16\n") + SPEED, said)
    config, params = fp8.load_huggingface(folder)
    tokens = fp8.generate(fp8.GPT(config, recipe=None), {"params": params}, np.array([[0, 1]]), max_new_tokens=12)
    assert text == tokenizer.decode(list(np.asarray(tokens)[0])) + "\n"

    status, in_fp8, said = write(folder, *arguments, "--weights", "fp8", "--kv-cache", "fp8")
    assert status == 0 and said.startswith(f"{folder}, fp8\n")
    variables = fp8.load_huggingface(folder, dtype=fp8.E4M3)[1]
    tokens = fp8.generate(
        fp8.GPT(config, recipe=None), variables, np.array([[0, 1]]), max_new_tokens=12, kv_cache_dtype=fp8.E4M3
    )
    assert in_fp8 == tokenizer.decode(list(np.asarray(tokens)[0])) + "\n"
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine/model.safetensors"
    assert cli.main(["convert", "--from", "huggingface", str(folder), "--to", str(file)]) == 0
    (tmp_path / "mine/tokenizer.json").write_text(tokenizer.to_str())
    assert write(file, *arguments)[1].endswith(text)
    assert write(file, *arguments, "--weights", "fp8", "--kv-cache", "fp8")[1].endswith(in_fp8)
    fp8.save_params(file, params)
    assert "must have the shape of its model, but has params alone" in write(file, *arguments)[2]


def test_text_comes_in_whole_characters():
    """Each of them once, with its last byte; bytes that are no text come at the end, as one decoding says them."""
    for text in ("naïve ☃ text".encode(), "ends with ☃".encode()[:-1], b"\xff\xfe and \xff", b""):
        pieces = list(generate.decoded(ByteEncoder(), iter(text)))
        assert "".join(pieces) == text.decode(errors="replace") and len(pieces) == len(text) + 1
    pieces = list(generate.decoded(ByteEncoder(), iter("a☃b".encode())))
    assert pieces == ["a", "", "", "☃", "b", ""]


def test_a_tick_is_a_token(save):
    run, *_ = save("ticks")
    ticks = []
    request = generate.Request(prompt="ab", tokens=5, temperature=0)
    "".join(generate.continued(trained.load(run), request, lambda: ticks.append(1)))
    assert len(ticks) == 5


def test_tokens_a_second_without_the_first():
    clock = generate.Clock()
    clock.tick()
    assert re.fullmatch(r"first token after \d+\.\d s", str(clock))
    clock.start, clock.first, clock.last, clock.tokens = 1.0, 3.5, 5.5, 401
    assert str(clock) == "first token after 2.5 s, then 200.0 tokens/s"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "--prompt", "a"], "a run must be a folder, or the name of one in runs, got 'nowhere'"),
        (["empty", "--prompt", "a"], "runs/empty must have a checkpoint, got none; train with --checkpoint-every"),
        (["empty", "--prompt", ""], "--prompt must have some text to continue, got none"),
        (["empty"], "--prompt must have some text"),
        (["--prompt", "a"], "a run must be named, got none; give its folder, or its name in runs"),
        (["empty", "--prompt", "a", "--tokens", "some"], "'some' (--help lists the options)"),
        (["empty", "--prompt", "a", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["empty", "--prompt", "a", "--temperature", "-1"], "--temperature must be 0 or a positive number, got -1.0"),
        (["empty", "--prompt", "a", "--temperature", "nan"], "--temperature must be 0 or a positive number, got nan"),
        (["empty", "--prompt", "a", "--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["empty", "--prompt", "a", "--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5"),
        (["empty", "--prompt", "a", "--seed", "-1"], "--seed must be from 0 to 2**63 - 1, got -1"),
    ],
)
def test_what_cannot_be_written(arguments, sentence, write, tmp_path):
    (tmp_path / "runs/empty").mkdir(parents=True)
    status, text, said = write(*arguments)
    assert (status, text) == (2, "")
    assert sentence in said and len(said.splitlines()) == 1 and said.startswith("python -m jax_fp8 generate: ")
