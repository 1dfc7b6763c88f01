"""Add the mask token: the input at positions whose token the model predicts ahead.

In:    a network and its tokenizer.
Out:   the id of the mask token; if there was no mask token, it is added to the network and the tokenizer in place.
Never: changes the embedding of another token, or the state of a random generator.
"""

import torch
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
    known_ids = sorted(set(tokenizer.get_vocab().values()))
    taken = tokenizer.mask_token is None and MASK_TOKEN not in tokenizer.get_vocab()
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    mask_id = int(tokenizer.mask_token_id)
    rows = network.get_input_embeddings().weight.shape[0]
    new_rows = [mask_id] if taken else []
    if mask_id >= rows:
        network.resize_token_embeddings(
            max(tokenizer.get_vocab().values()) + 1, pad_to_multiple_of=_ROWS_MULTIPLE, mean_resizing=False
        )
        new_rows = list(range(rows, network.get_input_embeddings().weight.shape[0]))
    if new_rows:
        _set_to_mean(network, new_rows, [token_id for token_id in known_ids if token_id < rows])
    return mask_id


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
