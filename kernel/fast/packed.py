"""Rows of ids without their repetitions: each distinct prefix is one token."""

from typing import NamedTuple

import torch


class Packed(NamedTuple):
    """Rows of token ids without their repetitions; a token is known by all ids up to and with it."""

    ids: torch.Tensor  # (N,) int64
    positions: torch.Tensor  # (N,) int64, column of the token in its row
    tokens: torch.Tensor  # (R, L) int64, which packed token stands at a place; 0 behind a row's end
    homes: torch.Tensor  # (N,) int64, flat place (row * L + column) where a token stood first
    repeats: torch.Tensor  # (S,) int64, flat places of tokens that have their home elsewhere


def pack(rows: list[list[int]], device) -> Packed:
    """Rows begin in column 0, so the column is the position, and a causal mask hides the row's end."""
    width = max(map(len, rows))
    tokens = [[0] * width for _ in rows]
    index = {}  # (packed token before, id) -> packed token
    homes, repeats = [], []
    for r, row in enumerate(rows):
        before = None
        for column, token_id in enumerate(row):
            key = (before, token_id)
            (repeats if key in index else homes).append(r * width + column)
            before = tokens[r][column] = index.setdefault(key, len(index))
    ids = [token_id for _, token_id in index]
    positions = [home % width for home in homes]
    parts = (ids, positions, tokens, homes, repeats)
    return Packed(*(torch.tensor(part, dtype=torch.int64, device=device) for part in parts))
