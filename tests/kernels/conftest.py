"""Shows the values of failed asserts in the shared checks too."""

import pytest

pytest.register_assert_rewrite("kernel_checks", "row_checks")
