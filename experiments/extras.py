"""Packages that come with an extra of this project, imported where they are needed."""

import importlib
from typing import Any


def import_extra(package: str, argument: str, extra: str) -> Any:
    """Returns a package; raises ValueError, about `argument`, if the extra is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        expected = f'the extra {extra} (pip install -e ".[experiments,{extra}]")'
        raise ValueError(f"{argument}: expected {expected}, got no package {error.name or package}") from error
