"""What the ranks of the pipeline tests run; each function returns plain JSON values."""

from collections import Counter

from distributed.zero_cases import train


def train_and_count(root, **options):
    """As `train`, with the number of forward passes of each of this rank's layers."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

    runs, plain = Counter(), Qwen2Attention.forward

    def counting(self, *args, **kwargs):
        runs[self.layer_idx] += self.training
        return plain(self, *args, **kwargs)

    Qwen2Attention.forward = counting
    return {
        **train(root, **options),
        "runs": {str(key): runs[key] for key in sorted(runs) if runs[key]},
    }
