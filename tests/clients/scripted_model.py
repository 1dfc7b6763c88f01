"""A model that answers by a script, so that clients which leave the choice to the model see tool calls.

Each piece of the script is one token, and the network maps a token to its successor. The chat template ends a prompt
with the token that begins the answer, chosen by the tools and results of the conversation and by words of the user.
"""

from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Tokenizer

OPENING, CLOSING = '<tool_call>\n{"name": "', '"}}\n</tool_call>'
CITY, ZONE = '", "arguments": {"city": "', '", "arguments": {"zone": "'
SCRIPTS = {
    "<|hello|>": ["Good", " morning", " to", " you", "."],
    "<|weather|>": [OPENING, "weather", CITY, "Paris", CLOSING],
    "<|clock|>": [OPENING, "clock", ZONE, "CET", CLOSING],
    "<|both|>": [OPENING, "weather", CITY, "Rome", f"{CLOSING}\n{OPENING}", "clock", ZONE, "UTC", CLOSING],
    "<|report|>": ["It is", " 18 degrees", " at noon", "!"],
    "<|object|>": ['{"degrees": ', "18", ', "time": ', '"noon"', "}"],
    "<|result|>": [OPENING, "final_result", '", "arguments": {"degrees": ', '18, "time": "', "noon", CLOSING],
}
"""Pieces of each answer, by the token that begins it. No piece occurs twice in an answer."""

END = "<|end|>"
TEMPLATE = """\
{%- set turn = namespace(results=0, asked='') -%}
{%- if tools %}<|user|>{{ tools | tojson }}<|end|>{% endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' %}{% set turn.results = 0 %}{% set turn.asked = message.content %}{% endif -%}
  {%- if message.role == 'tool' %}{% set turn.results = turn.results + 1 %}{% endif -%}
  <|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>{{ message.content }}
  {%- for call in message.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
  <|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
  {%- if tools and turn.results == 0 %}{{ '<|both|>' if 'both' in turn.asked else '<|weather|>' }}
  {%- elif tools and turn.results == 1 %}<|clock|>
  {%- elif tools and 'final_result' in tools | map(attribute='function.name') %}<|result|>
  {%- elif 'JSON' in turn.asked %}<|object|>
  {%- elif tools %}<|report|>
  {%- else %}<|hello|>
  {%- endif -%}
{%- endif -%}"""
WIDTH = 384
"""Size of the vocabulary and of the hidden states, in which each token has a component of its own."""


def save_scripted_model(folder: Path) -> Path:
    """Save the model with room for 8,192 positions."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    _network(tokenizer).save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of bytes, special tokens and the pieces of the scripts."""
    special = ["<|user|>", "<|assistant|>", END, *SCRIPTS]
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        iter([""]), vocab_size=260 + len(special), new_special_tokens=special, show_progress=False
    )
    pieces = dict.fromkeys(piece for script in SCRIPTS.values() for piece in script)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = END, "<|endoftext|>", TEMPLATE
    return tokenizer


@torch.no_grad()
def _network(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a network whose most likely next token is the successor of the last one in the script of the prompt.

    Its attention finds the token that begins the answer and adds a part of that token to each hidden state. So pieces
    may occur in several scripts, as those do that a grammar inserts.
    """
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},  # positions do not turn the last component
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    network = AutoModelForCausalLM.from_config(config)
    for parameter in network.model.layers[0].parameters():
        if parameter.dim() > 1:
            parameter.zero_()
    attention = network.model.layers[0].self_attn
    last = attention.head_dim // 2 - 1
    attention.q_proj.bias[last] = 100
    network.get_input_embeddings().weight.copy_(torch.eye(WIDTH))
    successors = network.get_output_embeddings().weight.zero_()
    for number, (begin, pieces) in enumerate(SCRIPTS.items()):
        first, *others = tokenizer.convert_tokens_to_ids([begin, *pieces, END])
        attention.k_proj.weight[last, first] = 1
        attention.v_proj.weight[number, first] = 1
        attention.o_proj.weight[first, number] = 0.25 / WIDTH**0.5  # the norm makes a component as large as that root
        for token, successor in pairwise([first, *others]):
            successors[successor, token] = 1
        successors[others, first] += 1
    return network
