"""What a server meets on the open net: bodies made to cost it more than they cost their sender."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from qwen_engine.server import protocol


def _kinds(base: type[protocol.Body] = protocol.Body) -> Iterator[type[protocol.Body]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


@pytest.mark.parametrize("kind", [*_kinds()], ids=lambda kind: kind.__name__)
def test_a_body_full_of_errors_costs_no_more_than_one_with_a_few(kind):
    wrong = object()
    flat, nested = [wrong] * 5000, [[wrong] * 100] * 100
    keys = {f"key{number}": wrong for number in range(5000)}
    for content in (keys, *({name: value} for name in kind.model_fields for value in (flat, nested, keys))):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({**content, "one more": wrong})
        assert caught.value.error_count() < 20, content.keys()
