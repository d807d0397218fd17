"""Reward of a response: the ones in it. verl reads this file by its path."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    return float(solution_str.count("1"))
