"""Add the mask token: the input at positions whose token the model predicts ahead.

In:    a network and its tokenizer.
Out:   the id of the mask token; if there was no mask token, it is added to the network and the tokenizer in place.
Never: changes the embedding of another token, or the state of a random generator.
"""

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

MASK_TOKEN = "<|mask|>"

# Matrix products are fastest if the vocabulary is a multiple of 8.
_ROWS_MULTIPLE = 8


def ensure_mask_token(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the mask token, after adding the token if the tokenizer lacks it.

    A new token gets the next id. Most embeddings have unused rows (Qwen2.5: 151,665 tokens, 151,936 rows), so the token
    usually gets one of these; otherwise the network grows. The token's row and all added rows start as the mean of the
    other tokens' rows.
    """
    vocabulary = tokenizer.get_vocab()  # once, because a copy of a large one takes 0.1 s
    known_ids = sorted(set(vocabulary.values()))
    taken = tokenizer.mask_token is None and MASK_TOKEN not in vocabulary
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    mask_id = int(tokenizer.mask_token_id)
    rows = network.get_input_embeddings().weight.shape[0]
    new_rows = [mask_id] if taken else []
    if mask_id >= rows:
        _grow(network, _ROWS_MULTIPLE * -(-(mask_id + 1) // _ROWS_MULTIPLE))
        new_rows = list(range(rows, network.get_input_embeddings().num_embeddings))
    if new_rows:
        _set_to_mean(network, new_rows, [token_id for token_id in known_ids if token_id < rows])
    return mask_id


@torch.no_grad()
def _grow(network: PreTrainedModel, rows: int) -> None:
    """Append rows of undefined values to all tables. `resize_token_embeddings` would first fill new tables with random
    numbers, which takes seconds."""
    inputs, head = network.get_input_embeddings(), network.get_output_embeddings()
    tied = head is not None and head.weight is inputs.weight
    inputs.weight, inputs.num_embeddings = _longer(inputs.weight, rows), rows
    if head is not None:
        head.weight, head.out_features = inputs.weight if tied else _longer(head.weight, rows), rows
        if getattr(head, "bias", None) is not None:
            head.bias = _longer(head.bias, rows)
    network.config.get_text_config().vocab_size = network.vocab_size = rows


def _longer(table: nn.Parameter, rows: int) -> nn.Parameter:
    longer = table.new_empty(rows, *table.shape[1:])
    longer[: len(table)] = table
    return nn.Parameter(longer, requires_grad=table.requires_grad)


@torch.no_grad()
def _set_to_mean(network: PreTrainedModel, new_rows: list[int], known_rows: list[int]) -> None:
    known = torch.tensor(known_rows)
    runs = known.tensor_split(1 + (known.diff() != 1).nonzero().flatten())
    for table in _tables(network):
        # Sum slices, which are views; an index would copy all rows.
        sums = [table[int(run[0]) : int(run[-1]) + 1].sum(dim=0, dtype=torch.float32) for run in runs]
        table[new_rows] = (torch.stack(sums).sum(dim=0) / len(known)).to(table.dtype)


def _tables(network: PreTrainedModel) -> list[torch.Tensor]:
    """Return the tensors with one row per token: the input embedding, the output weight if it is not tied to that
    embedding, and the output bias if there is one."""
    inputs = network.get_input_embeddings().weight
    head = network.get_output_embeddings()
    tables = [inputs]
    if head is not None and head.weight.data_ptr() != inputs.data_ptr():
        tables.append(head.weight)
    if head is not None and getattr(head, "bias", None) is not None:
        tables.append(head.bias)
    return tables
