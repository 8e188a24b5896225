"""A vocabulary in equal parts, one for each rank, and how the ranks agree on a token without collecting the logits."""

import torch
from torch import Tensor

from minisgl_worker.kernels.sampling import Draw, combine_draws, sample
from minisgl_worker.parallel import ParallelGroup, share_vocabulary


class SharedVocabulary:
    """Which token ids are this rank's.

    Attributes:
        num_rows: of this rank's part, padding included; the same on every rank.
        first_token_id: of the part; may be past the end.
        num_tokens: rows of the part that stand for a token; the others are padding.
    """

    def __init__(self, vocab_size: int, group: ParallelGroup):
        self.size, self._group = vocab_size, group
        self.num_rows, self.first_token_id = share_vocabulary(vocab_size, group)
        self.num_tokens = max(0, min(self.num_rows, vocab_size - self.first_token_id))

    def mask_padding(self, logits: Tensor) -> Tensor:
        """Set logits [n, num_rows], of any float dtype, of padding to -inf, in place: none of them can be drawn."""
        if self.num_tokens < self.num_rows:
            logits[:, self.num_tokens :] = -torch.inf
        return logits

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Every rank's [n, num_rows] of any dtype -> the whole vocabulary's on each, [n, size] of that dtype.

        Costs n * size values per rank.
        """
        return self._group.gather_columns(logits)[:, : self.size]

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Draw:
        """Draw from the whole vocabulary, of which logits [n, num_rows] are this rank's; otherwise as `sample`, where
        dtypes and shapes are.

        Each rank draws from its part; then the ranks exchange what they drew, 8 bytes per row.
        """
        own = sample(logits, temperature, seeds, positions, self.first_token_id)
        if self._group.size == 1:
            return own
        pairs = self._group.gather(torch.stack([own.scores.view(torch.int32), own.tokens.to(torch.int32)]))
        return combine_draws(pairs[:, 1].to(torch.int64), pairs[:, 0].view(torch.float32))
