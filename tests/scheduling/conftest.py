"""Gives the shared helper module pytest's assertion messages."""

import pytest

pytest.register_assert_rewrite("fake_device")
