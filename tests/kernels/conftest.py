"""Shows the values of failed asserts in the shared checks too, and makes Triton's interpreter twice as fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("kernel_checks", "row_checks")


@pytest.fixture(scope="session", autouse=True)
def language_patched_once_a_launch() -> Iterator[None]:
    """The interpreter puts its own functions into the language whenever one function of a kernel calls another, which
    takes as long as the rest; once a launch for each module that functions come from is enough."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launch, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: dict[str, Any] = {}

    def launch_afresh(executor: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(executor, *args, **options)

    def patch_once(function: Callable[..., Any]) -> Any:
        if function.__module__ not in patched:
            patched[function.__module__] = patch_lang(function)
        return patched[function.__module__]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
