"""The interface of an engine of the head: forward and backward of one checked call, and optional methods."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Float

from jaxlogp._reduce import WeightedSum
from jaxlogp._stats import TokenLogProbs
from jaxlogp._vocab import VocabShards
from jaxlogp.head.call import HeadCall, HeadGradients

LossCotangents = Callable[[TokenLogProbs, Any], TokenLogProbs]
"""(values of some tokens, the loss's data of these tokens) -> cotangents of log_probs, and of entropy or None."""


@runtime_checkable
class Engine(Protocol):
    """Computes log-probs and gradients in its own way. Stateless and hashable: a frozen dataclass of its settings.

    An engine of your own subclasses this, defines ``name``, :meth:`forward` and :meth:`backward`, and is given as
    ``engine=`` or registered under a name (:func:`jaxlogp.head.register_engine`). It sees operands that are typed as varying
    over every mesh axis in use, reduces its statistics over ``call.axis_name``, and returns the gradients of its own
    tokens and columns; psums of gradients over mesh axes are left to the caller. Where ``call.frozen``, the gradients of
    weight and bias may be None, which saves a product.

    Attributes:
        name: the name by which callers ask for it, and which records show.
        reduces_gradients: True: operands keep their types, and the engine sums gradients over mesh axes itself.
        masks_hidden: True: hidden states of masked tokens may hold anything, even NaN, and the engine keeps them out of
          every product and gives them gradients of exactly 0; False: they are passed in as zeros.
    """

    name: ClassVar[str]
    reduces_gradients: ClassVar[bool] = False
    masks_hidden: ClassVar[bool] = False

    def why_not(self, call: HeadCall) -> str | None:
        """Why this engine cannot take a call on this device, or None. Only shapes and dtypes of operands matter."""
        del call
        return None

    def why_not_automatic(self, call: HeadCall) -> str | None:
        """Why ``engine="auto"`` passes this engine over even where it could run, or None when it does not."""
        del call
        return None

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, Any]:
        """Log-probs, entropy (None unless wanted) and lse of the tokens, and what :meth:`backward` needs of them."""
        ...

    def backward(self, call: HeadCall, kept: Any, g: TokenLogProbs) -> HeadGradients:
        """Gradients for the cotangents of log_probs and entropy (or None), which are exactly 0 where masked."""
        ...

    def why_not_second_derivative(self) -> str | None:
        """Why JAX cannot differentiate :meth:`forward`, :meth:`backward` and :meth:`one_pass`, or None when it can."""
        return "its passes are not differentiable"

    def shards(self, vocab_size: int, num_shards: int) -> VocabShards:
        """The vocabulary shards that this engine wants where the caller names none."""
        return VocabShards.aligned(vocab_size, num_shards)

    def skipped_tiles(self, call: HeadCall) -> WeightedSum:
        """How many blocks of this rank a gradient filter skips, out of how many; for engines that have one."""
        del call
        raise NotImplementedError

    def why_not_one_pass(self, call: HeadCall, entropy_cotangent: bool) -> str | None:
        """Why :meth:`one_pass` cannot take a call that :meth:`forward` takes, or None when it can."""
        del call, entropy_cotangent
        return "it has no one-pass gradient"

    def one_pass(
        self, call: HeadCall, cotangents: LossCotangents, tokens: Any, old_log_probs: Float[Array, " tokens"] | None
    ) -> tuple[TokenLogProbs, HeadGradients]:
        """Values and gradients with the logits computed once: three products instead of four.

        Args:
            call: the call.
            cotangents: gives the loss's cotangents, a few tokens at a time.
            tokens: pytree of arrays [tokens, ...], the data that ``cotangents`` needs of each token.
            old_log_probs: [tokens], close to the log-probs while the policy is close to the sampler's; None where the
              entropy has a cotangent.
        """
        del call, cotangents, tokens, old_log_probs
        raise NotImplementedError

    def why_not_known_lse(self, call: HeadCall) -> str | None:
        """Why :meth:`backward_of_lse` cannot take a call that :meth:`forward` takes, or None when it can."""
        del call
        return "it has no backward from a known log-sum-exp"

    def backward_of_lse(self, call: HeadCall, lse: Float[Array, " tokens"], g: TokenLogProbs) -> HeadGradients:
        """:meth:`backward` without a forward pass, from the known log Σ e^z of every token; no entropy."""
        del call, lse, g
        raise NotImplementedError
