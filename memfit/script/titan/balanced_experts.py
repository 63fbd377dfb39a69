"""Expert parallelism without data: every rank of a group of experts gets as many tokens as every other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memfit.device.virtual.fake_group import is_simulated


def balance_experts() -> None:
    """Replaces what torchtitan's dispatcher reads of the counts of tokens, in this process, for good. On a real group
    it changes nothing.

    The counts follow from the router's choices, which a trace does not have; their sum is known. The tokens that a rank
    sends are divided evenly over the group, and it receives as many as it sends.
    """
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    dispatch, exchange = AllToAllTokenDispatcher.dispatch, AllToAllTokenDispatcher._sync_token_count_exchange

    def noting(self: Any, tokens: Tensor, scores: Tensor, experts: Tensor, counts: Tensor) -> Any:
        self._memfit_sent = experts.numel()
        return dispatch(self, tokens, scores, experts, counts)

    def balanced(self: Any, own: Tensor, received: Tensor, ranks: int) -> Any:
        if not is_simulated():
            return exchange(self, own, received, ranks)
        received_counts, _, _ = exchange(self, own, received, ranks)
        least, more = divmod(self._memfit_sent, ranks)
        sent = [least + (rank < more) for rank in range(ranks)]
        return received_counts, sent, list(sent)

    AllToAllTokenDispatcher.dispatch = noting
    AllToAllTokenDispatcher._sync_token_count_exchange = balanced
