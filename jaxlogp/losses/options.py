"""Messages for misspelled keywords of losses, in place of Python's bare TypeError."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jaxlogp.errors import require
from jaxlogp.losses.loss import PolicyLoss

Function = TypeVar("Function", bound=Callable[..., Any])

SYNONYMS = {
    "beta": "kl_coefficient",
    "kl_coef": "kl_coefficient",
    "kl_beta": "kl_coefficient",
    "use_bias_correction_kl": "kl_unbiased",
    "ent_coef": "entropy_coefficient",
    "entropy_coeff": "entropy_coefficient",
    "clip_range": "epsilon",
    "epsilon_low": "epsilon",
    "loss_agg_mode": "reduction",
    "loss_type": "reduction",
}
"""Names of the same options in TRL, verl and other trainers."""
LOSS_OPTIONS = {field.name for field in dataclasses.fields(PolicyLoss)} - {"name"}


def suggest_options(further: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Returns a decorator that turns an unknown keyword into a ValueError naming the most likely one.

    Args:
        further: keywords that the function takes by its `**`; it takes no others.
    """

    def decorate(function: Function) -> Function:
        called = getattr(function, "__name__", repr(function))
        parameters = inspect.signature(function).parameters.values()
        known = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD} | set(further)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known:
                name = next(name for name in kwargs if name not in known)
                require(False, name, f"an option of {called}", _likely(name, kwargs[name], known))
            return function(*args, **kwargs)

        return checked

    return decorate


def _likely(name: str, value: Any, known: set[str]) -> str:
    option = SYNONYMS.get(name, name)
    if option in LOSS_OPTIONS - known and "loss" in known:
        return f"an option of the loss: did you mean loss=grpo({option}={value!r})?"
    close = [option] if option in known else difflib.get_close_matches(name, known, 1)
    return f"an unknown name: did you mean {close[0]}?" if close else f"an unknown name; it has {sorted(known)}"
