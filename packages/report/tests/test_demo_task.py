"""The demo's task: chains that are worked out turn by turn, and the reward that checks it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from stepscope_report.demo import task
from stepscope_report.demo.calculator import evaluate

problems = st.builds(
    lambda seed, operations: task.make_problem(random.Random(seed), operations),
    st.integers(0, 10_000),
    st.integers(1, 12),
)
EIGHT_PLUS = task.Problem(("8", "+", "5", "-", "3"))


def test_a_solution_has_a_call_for_each_operation_and_then_the_answer() -> None:
    assert EIGHT_PLUS.solution() == ["<8+5>", "<13-3>", "10."]


@given(problems)
def test_a_solution_gets_the_full_reward_and_fits_into_its_turns(problem: task.Problem) -> None:
    turns = problem.solution()
    assert task.reward(problem, turns) == 1.0
    assert len(turns) <= problem.max_turns
    assert all(len(turn) <= task.TURN_TOKENS for turn in turns)


@given(problems)
def test_the_calculator_agrees_with_the_solution(problem: task.Problem) -> None:
    left = problem
    for call in problem.solution()[:-1]:
        left = left.after(evaluate(call[1:-1]))
    assert (left.text, 0 <= int(left.terms[0]) < 100) == (problem.solution()[-1][:-1] + "=", True)


def test_the_reward_is_the_share_of_right_turns_in_their_order() -> None:
    assert task.reward(EIGHT_PLUS, ["<8+5>", "<13-3>", "11."]) == 2 / 3
    assert task.reward(EIGHT_PLUS, ["10."]) == 0.0
    assert task.reward(EIGHT_PLUS, []) == 0.0


def test_a_refused_call_costs_a_turn_and_nothing_else() -> None:
    assert EIGHT_PLUS.after(task.REFUSED) == EIGHT_PLUS
    assert task.reward(EIGHT_PLUS, ["<8+>", "<8+5>", "<13-3>", "10."]) == 1.0


def test_text_survives_its_tokens() -> None:
    assert task.decode(task.encode("^8+5=<8+5>13-3=!10.")) == "^8+5=<8+5>13-3=!10."
