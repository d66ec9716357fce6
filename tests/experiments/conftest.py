"""The curves of a run are drawn where tests look at them."""

import pytest

from experiments.runs import plots

DRAWN = {"test_grpo.py", "test_page.py", "test_plots.py"}


class Undrawn(plots.Figure):
    """A figure with all of its panels, of which no picture is made: that takes 1.3 CPU s a run."""

    def savefig(self, file, **_):
        file.write(b"PNG")


@pytest.fixture(autouse=True, scope="module")
def pictures(request):
    """Other runs prepare every panel, from their own metrics, and write no picture."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in DRAWN:
            patch.setattr(plots, "Figure", Undrawn)
        yield
