"""What the watch over a hanging step says about the ranks, from how far each has come."""

from __future__ import annotations

import pytest

from qwen_engine.distributed.progress import Progress, who_is_behind


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ({0: (17, 4), 1: (17, 4)}, "all ranks are in step 17, at its collective 4"),
        ({0: (17, 0), 1: (17, 0)}, "all ranks are in step 17"),
        ({0: (17, 1), 1: (16, 9)}, "rank 1 has not begun step 17; rank 0 waits in step 17, at its collective 1"),
        (
            {0: (17, 61), 1: (17, 61), 2: (17, 60)},
            "rank 2 has not gone beyond collective 60 of step 17; ranks 0 and 1 wait in step 17, at its collective 61",
        ),
        ({0: (3, 0), 1: (3, 2)}, "rank 0 has not gone beyond collective 0 of step 3; rank 1 waits in step 3, at its"),
        ({0: (5, 7), 1: None, 2: (5, 7)}, "rank 1 does not answer; ranks 0 and 2 wait in step 5"),
        (
            {0: (5, 7), 1: None, 2: (4, 9), 3: (4, 9), 4: None},
            "ranks 1 and 4 do not answer, ranks 2 and 3 have not begun step 5; rank 0 waits in step 5",
        ),
    ],
)
def test_the_ranks_that_others_wait_for_are_named(positions, said):
    assert who_is_behind(positions).startswith(said)


def test_ranks_that_stand_at_the_same_point_have_the_same_position():
    first, second = Progress(), Progress()
    for progress in (first, second):
        for _ in range(3):
            progress.begin_step()
            progress.enter_collective()
    assert first.position == second.position == (3, 1)
    second.enter_collective()
    assert first.position < second.position
    first.begin_step()
    assert first.position > second.position
