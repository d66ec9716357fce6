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
    """One way of computing log-probs and gradients: a frozen dataclass of its settings, stateless and hashable.

    An engine of your own subclasses this and defines ``name``, :meth:`forward` and :meth:`backward`. Pass it as
    ``engine=``, or register it under a name (:func:`jaxlogp.head.register_engine`). Its operands are typed as varying over
    every mesh axis in use. It reduces its statistics over ``call.axis_name`` and returns the gradients of its own tokens
    and columns; the caller sums gradients over mesh axes. If ``call.frozen``, the gradients of weight and bias may be
    None, which saves a product.

    Attributes:
        name: name of the engine in arguments and records.
        reduces_gradients: whether the engine sums gradients over mesh axes itself; its operands then keep their types.
        masks_hidden: whether the engine itself keeps hidden states of masked tokens, which may be NaN, out of every
            product and gives them gradients of exactly 0. If False, they are passed in as zeros.
        takes_support: whether the engine computes log-probs on ``call.support``.
        needs_support: whether it computes those alone.
    """

    name: ClassVar[str]
    reduces_gradients: ClassVar[bool] = False
    masks_hidden: ClassVar[bool] = False
    takes_support: ClassVar[bool] = False
    needs_support: ClassVar[bool] = False

    def why_not(self, call: HeadCall) -> str | None:
        """Returns why this engine cannot take a call on this device, or None. Reads only shapes and dtypes of operands."""
        del call
        return None

    def why_not_automatic(self, call: HeadCall) -> str | None:
        """Returns why ``engine="auto"`` skips this engine although it could run, or None if it does not."""
        del call
        return None

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, Any]:
        """Computes log-probs, entropy (None unless wanted) and lse of the tokens, and the residuals of :meth:`backward`."""
        ...

    def backward(self, call: HeadCall, kept: Any, g: TokenLogProbs) -> HeadGradients:
        """Computes gradients from cotangents of log_probs and entropy (or None), which are exactly 0 where masked."""
        ...

    def why_not_second_derivative(self) -> str | None:
        """Returns why JAX cannot differentiate :meth:`forward`, :meth:`backward` and :meth:`one_pass`, or None if it can."""
        return "its passes are not differentiable"

    def shards(self, vocab_size: int, num_shards: int) -> VocabShards:
        """Returns the default vocabulary shards of this engine."""
        return VocabShards.aligned(vocab_size, num_shards)

    def skipped_tiles(self, call: HeadCall) -> WeightedSum:
        """Counts the blocks of this rank that a gradient filter skips, for engines that have one."""
        del call
        raise NotImplementedError

    def why_not_one_pass(self, call: HeadCall, entropy_cotangent: bool) -> str | None:
        """Returns why :meth:`one_pass` cannot take a call that :meth:`forward` takes, or None if it can."""
        del call, entropy_cotangent
        return "it has no one-pass gradient"

    def one_pass(
        self, call: HeadCall, cotangents: LossCotangents, tokens: Any, old_log_probs: Float[Array, " tokens"] | None
    ) -> tuple[TokenLogProbs, HeadGradients]:
        """Computes values and gradients with the logits computed once: three products instead of four.

        Args:
            call: the call.
            cotangents: function that returns the loss's cotangents for a few tokens.
            tokens: pytree of arrays [tokens, ...], the per-token data of ``cotangents``.
            old_log_probs: [tokens], close to the log-probs while the policy is close to the sampler's; None if the
                entropy has a cotangent.
        """
        del call, cotangents, tokens, old_log_probs
        raise NotImplementedError

    def why_not_known_lse(self, call: HeadCall) -> str | None:
        """Returns why :meth:`backward_of_lse` cannot take a call that :meth:`forward` takes, or None if it can."""
        del call
        return "it has no backward from a known log-sum-exp"

    def backward_of_lse(self, call: HeadCall, lse: Float[Array, " tokens"], g: TokenLogProbs) -> HeadGradients:
        """Computes gradients without a forward pass, from the known log Σ e^z of every token; no entropy."""
        del call, lse, g
        raise NotImplementedError
