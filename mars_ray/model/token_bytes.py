"""Compute the bytes of each token id, which APIs list with log-probabilities.

A token may be half a character, and the joined bytes of tokens may differ from the decoded sequence.
"""

import re

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""Spelling in sentencepiece of a token that is a single byte."""
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
"""The alphabet of byte-level BPE."""


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> tuple[bytes, ...]:
    """Return the bytes of each id from 0 to the highest id; ids outside the vocabulary have no bytes."""
    ids = {number: token for token, number in tokenizer.get_vocab().items()}
    special = {number: str(token).encode() for number, token in tokenizer.added_tokens_decoder.items()}
    byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
    spell = _of_byte_level if byte_level else _of_sentencepiece
    return tuple(
        special[number] if number in special else spell(ids[number]) if number in ids else b""
        for number in range(max(ids) + 1)
    )


def _of_byte_level(token: str) -> bytes:
    return bytes(_BYTE_OF[character] for character in token)


def _of_sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
