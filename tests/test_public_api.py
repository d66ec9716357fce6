"""The names that `import jaxlogp` provides, and the modules that it does not import."""

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

import jaxlogp

MODULES = jaxlogp, jaxlogp.head, jaxlogp.invariance, jaxlogp.losses
EXTRAS = """
    flax optax orbax grain tyro rich chex beartype hypothesis tensorboardX matplotlib torch transformers triton jax_triton
""".split()


EXPORTS = [pytest.param(module, name, id=f"{module.__name__}.{name}") for module in MODULES for name in module.__all__]


@pytest.mark.parametrize("module, name", EXPORTS)
def test_name_is_exported_and_documented(module, name):
    thing = getattr(module, name)
    if callable(thing):
        assert thing.__doc__ and len(thing.__doc__.strip().splitlines()[0]) > 10


def test_the_package_says_what_it_is_for():
    """By names that it has."""
    named = re.findall(r"^\* `(\w+)`:", jaxlogp.__doc__, re.M)
    assert len(named) == 9 and set(named) <= set(jaxlogp.__all__)


def test_import_is_light_and_starts_no_backend():
    code = (
        "import json, sys\n"
        "import jaxlogp\n"
        "from jax._src import xla_bridge\n"
        "loaded = sorted({name.split('.')[0] for name in sys.modules})\n"
        "mosaic = 'jax.experimental.mosaic.gpu' in sys.modules\n"
        "print(json.dumps([loaded, bool(xla_bridge._backends), mosaic]))\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    loaded, started, mosaic = json.loads(finished.stdout)
    assert "jax" in loaded
    assert not set(EXTRAS) & set(loaded)
    assert not mosaic, "importing the backend of GPU kernels takes half a second"
    assert not started, "importing the library must not create devices"


@pytest.mark.parametrize("module", MODULES, ids=lambda x: x.__name__)
def test_everything_public_is_exported(module):
    public = {
        name for name, thing in vars(module).items() if not name.startswith("_") and not isinstance(thing, ModuleType)
    }
    assert public == set(module.__all__) - {"losses"}
