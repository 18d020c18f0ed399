"""Structured output inside the engine: masks before a step, chosen tokens after it.

A constrained request samples only once its last token is known on the host (`Scheduler`), so its constraint has taken
every token when it is asked for the next mask. Masks go to the rank that samples, beside the plan, never over the wire.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from qwen_engine.layers.sampler import TokenMasks
from qwen_engine.request import Request

logger = logging.getLogger(__name__)


def masks_of(requests: Sequence[Request]) -> TokenMasks | None:
    """Masks of the constrained ones among the requests that a step samples, in the order of its sampling rows."""
    rows, masks = [], []
    for row, request in enumerate(requests):
        if request.constraint is not None:
            rows.append(row)
            masks.append(np.frombuffer(request.constraint.mask(), dtype="<i4"))
    return TokenMasks(np.array(rows), np.stack(masks)) if rows else None


def take_token(request: Request, token_id: int) -> str | None:
    """Tells the request's constraint, if it has one, what was chosen. Returns why it cannot go on; None is fine."""
    constraint = request.constraint
    if constraint is None:
        return None
    constraint.accept(token_id)
    if constraint.error is not None:
        logger.warning("request %s ends without its structure: %s", request.request_id, constraint.error)
    return constraint.error
