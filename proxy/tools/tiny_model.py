"""Make the tiny random model that a real vLLM serves in the tests and in the demo.

Run by path with an interpreter that has vLLM (`tokenizers` and `transformers` come with it)::

    PYTHON proxy/tools/tiny_model.py DIR

Nothing of ours is imported, because `proxy` is not installed beside vLLM. DIR then holds a
`config.json` (Qwen3, 2 layers, 64 wide) and a byte-level BPE tokenizer with a chat template, but no
weights: vLLM draws them itself with `--load-format dummy`. The text is noise, drawn anew from the
same seed at every start, so one server gives the same text at temperature 0.

The end token has the id 2 and hardly ever comes by itself, so by default a stream runs into its
`max_output_tokens` and is truncated. A stream completes normally with any of

* `"text": {"format": {"type": "json_schema", "name": "line", "schema": {"enum": ["Call me"]}}}`:
  the grammar ends it (some 20 tokens; give it `"max_output_tokens": 64`);
* `"logit_bias": {"2": 100.0}`: the end token comes at once, without any text;
* `"logit_bias": {"2": 2.5}` with a temperature near 1: after a few dozen tokens;
* `"stop": ["e"]`: at the first "e" (before vLLM 0.20 only as far as it knows the member).

`"ignore_eos": true` and a large `max_output_tokens` make a long stream.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

END_TOKEN = "<|im_end|>"  # noqa: S105 - a token of text
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END_TOKEN]
VOCABULARY_SIZE = 384
CONTEXT_TOKENS = 16_384

# The form of Qwen's own templates, which vLLM's parsers and chat utilities are made for.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What the merges are learned from: Melville, "Moby-Dick" (1851), first lines.
TEXT = """\
Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my
purse, and nothing particular to interest me on shore, I thought I would sail about a little and see
the watery part of the world. It is a way I have of driving off the spleen and regulating the
circulation. Whenever I find myself growing grim about the mouth; whenever it is a damp, drizzly
November in my soul; whenever I find myself involuntarily pausing before coffin warehouses, and
bringing up the rear of every funeral I meet, then, I account it high time to get to sea as soon as
I can.
"""


def make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of `VOCABULARY_SIZE` tokens at most, special ones first."""
    # Imported here, so that `--help` and main's error work in any interpreter, and by name, because
    # neither is installed where the types of this project are checked.
    tokenizers = import_module("tokenizers")
    transformers = import_module("transformers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def make_config(vocabulary_size: int, end_token_id: int) -> Any:
    """Return the configuration of a Qwen3 that a CPU starts and runs at once."""
    config = import_module("transformers").Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention kernels for CPUs take
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=end_token_id,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def make_tiny_model(directory: Path) -> None:
    """Write the model's configuration and tokenizer into `directory`, making it if need be."""
    tokenizer = make_tokenizer()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    # The configuration comes last: who finds it finds a whole model.
    make_config(len(tokenizer), tokenizer.eos_token_id).save_pretrained(directory)


def main() -> None:
    """Make the model in the directory that the command line names."""
    parser = argparse.ArgumentParser(description="Make a tiny random model for a vLLM under test.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory: Path = parser.parse_args().directory
    try:
        make_tiny_model(directory)
    except ImportError as error:
        sys.exit(
            f"tiny_model: {error}. Run this with the interpreter that has vLLM installed;"
            f" {sys.executable} lacks what comes with it."
        )


if __name__ == "__main__":
    main()
