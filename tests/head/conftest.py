"""With TRITON_INTERPRET=1 the source of the Triton kernels runs in Triton's interpreter."""

import pytest

from tests.head import cases, triton_case


@pytest.fixture(autouse=True, scope="session")
def triton_kernels():
    """Where kernels are launched, the interpreter takes them."""
    if cases.TRITON_INTERPRETED:
        with triton_case.interpreted_launches():
            yield
    else:
        yield
