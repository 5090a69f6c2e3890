"""A tokenizer of Hugging Face with a chat template, conversations, and a small model: what a run is tuned from."""

import gzip
import json
import pathlib

import jax
import numpy as np
import tokenizers

import jax_fp8 as fp8

BEGIN, END, EOS = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
HEAD = "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = HEAD + "{{ message['content'] + '<|im_end|>' }}{{ '\n' }}" + TAIL
MARKED = HEAD + (
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
) + TAIL  # fmt: skip
WORDS = "naïve model learns to predict bytes — what is FP8 a number of eight bits".split()


def write_tokenizer(folder, template=PLAIN, in_file_of_its_own=False, **settings):
    """A byte-level tokenizer with special tokens, and its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    made.add_special_tokens([BEGIN, END, EOS])
    made.save(str(folder / "tokenizer.json"))
    described = {"bos_token": None, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    described |= {"bos_token": EOS, **settings}
    if template is not None and not in_file_of_its_own:
        described["chat_template"] = template
    if in_file_of_its_own:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def conversations(count=60, seed=0):
    """Records of a few turns, of very different lengths."""
    random, records = np.random.default_rng(seed), []

    def words(most):
        return " ".join(random.choice(WORDS, random.integers(1, most)))

    for number in range(count):
        messages = [{"role": "system", "content": words(4)}] if number % 3 == 0 else []
        for _ in range(random.integers(1, 4)):
            messages += [{"role": "user", "content": words(9)}, {"role": "assistant", "content": words(7)}]
        records.append({"messages": messages, "number": number})
    return records


def write_lines(path: pathlib.Path, records):
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def write_model(folder, seed=0, dtype=None, vocab=384, **changes):
    """A small random model of Hugging Face, with params so large that its loss is not that of guessing."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "mlp_hidden_size": 128, "max_seq_len": 64}
    config = fp8.GPTConfig.preset("tiny-llama", vocab_size=vocab, **{**sizes, **changes})
    model = fp8.GPT(config, recipe=None)
    params = jax.jit(model.init)(jax.random.key(seed), np.zeros((1, 16), np.int32))["params"]
    params = jax.tree.map(lambda param: 3 * param if param.ndim > 1 else param, params)
    params["head"] = 4 * params["head"]
    fp8.save_huggingface(folder, config, params, dtype=dtype)
    return config, params
