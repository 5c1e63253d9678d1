"""Which rows: drawn in a seeded order, spread over a list, or from its two ends."""

import math

import torch


class Draws:
    """Row numbers in a seeded random order, reshuffled when used up: permutation, cursor, generator."""

    def __init__(self, rows: int, seed: int):
        self.rows = rows
        self.generator = torch.Generator().manual_seed(seed)
        self.permutation = torch.randperm(rows, generator=self.generator)
        self.cursor = 0

    def take(self, count: int) -> list[int]:
        taken = []
        while len(taken) < count:
            if self.cursor == self.rows:
                self.permutation = torch.randperm(self.rows, generator=self.generator)
                self.cursor = 0
            taken.append(int(self.permutation[self.cursor]))
            self.cursor += 1
        return taken

    def state(self) -> dict:
        return {
            "permutation": self.permutation.clone(),
            "cursor": self.cursor,
            "generator": self.generator.get_state(),
        }

    def load_state(self, state: dict) -> None:
        self.permutation, self.cursor = state["permutation"].clone(), state["cursor"]
        self.generator.set_state(state["generator"])


def updates_for(epochs: float, rows: int, batch: int) -> int:
    """Updates in `epochs` passes; draws run on over the end of a pass, so every window is full."""
    return math.ceil(epochs * rows / batch)


def spread(rows: list, count: int) -> list:
    """`count` rows at equal distances over the whole list; all of them if there are no more."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def tenths(rows: list) -> tuple[list, list]:
    """The first and the last tenth, one row at least: how a curve is summed up everywhere."""
    part = max(len(rows) // 10, 1)
    return rows[:part], rows[-part:]
